"""What `kernels.tune` runs of this folder: tokens into a float8 payload with empty slots, and a payload's rows back."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tools.bench.shapes import Shape

from ..tune_cases import Case, buffer_rows, normal, triton
from . import op, reference


def quantize_cases(shape: Shape, routings: Sequence[str]) -> Iterator[Case]:
    """Random places; nothing here depends on a routing. XLA's own way is the plain reference."""
    rng = np.random.default_rng(0)
    slots = buffer_rows(shape)
    taken = np.sort(rng.permutation(slots)[: shape.rows])
    tokens, back = np.full(slots, -1, np.int32), np.full(slots, -1, np.int32)
    tokens[taken] = np.repeat(np.arange(shape.tokens), shape.choices)
    back[: shape.rows] = rng.permutation(taken)
    rows, tokens, back = normal(0, (shape.tokens, shape.width)), jnp.asarray(tokens), jnp.asarray(back)
    row_bytes, scale_bytes = 2.0 * shape.width, 4.0
    work = row_bytes * shape.tokens + (row_bytes / 2 + scale_bytes) * slots
    yield Case(
        name="quantize",
        shape=shape.name,
        ways=triton(op.QUANTIZE_CANDIDATES, lambda launch: lambda rows, index: op.quantize_rows(rows, index, launch)),
        arguments=(rows, tokens),
        reference=reference.quantize_rows,
        baseline=reference.quantize_rows,
        baseline_arguments=(rows, tokens),
        work=work,
        baseline_work=work,
        unit="TB/s",
    )
    bytes_QH, _ = jax.jit(reference.quantize_rows)(rows, tokens)
    scales = jnp.where(back < 0, jnp.nan, jnp.abs(normal(1, (slots,))).astype(jnp.float32))
    given = (bytes_QH, back, scales)
    work = (row_bytes / 2 + scale_bytes) * shape.rows + row_bytes * slots

    def restore(launch):
        return lambda bytes_QH, index, scales: op.restore_rows(bytes_QH, index, scales, rows.dtype, launch)

    def plain(bytes_QH, index, scales):
        return reference.restore_rows(bytes_QH, index, scales, rows.dtype)

    yield Case(
        name="restore",
        shape=shape.name,
        ways=triton(op.RESTORE_CANDIDATES, restore),
        arguments=given,
        reference=plain,
        baseline=plain,
        baseline_arguments=given,
        work=work,
        baseline_work=work,
        unit="TB/s",
    )
