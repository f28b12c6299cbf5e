"""The experts on rows at a fixed distance on a real GPU, in both ways to multiply rows, against plain JAX in float32.

Run on a machine with at least one GPU: `python -m pytest -m gpu tests/gpu/test_gpu_kernels.py`. Rows that hold no token
are NaN, in rows and in output gradients; experts have awkward sizes. Letters: e experts, R rows of each, H, F widths.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.grouped_matmul.tiles import capacity_groups
from ep_jax_kernels.grouped_mlp import reference
from ep_jax_kernels.grouped_mlp.op import Methods, capacity_mlp

pytestmark = pytest.mark.gpu

SIZES = (0, 1, 7, 63, 64, 65, 300, 299)
R, H, F = 300, 512, 768


@pytest.mark.parametrize("batched", [False, True], ids=["owned rows", "all rows"])
def test_experts_on_capacity_rows_never_see_the_tails(batched):
    rng = np.random.default_rng(0)
    sizes = jnp.array(SIZES, jnp.int32)
    held = np.arange(R) < np.array(SIZES)[:, None]
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    rows, d_out = (jnp.where(held[..., None], normal(len(SIZES), R, H), jnp.nan) for _ in range(2))
    w_gate_up, w_down = normal(len(SIZES), H, 2 * F) * H**-0.5, normal(len(SIZES), F, H) * F**-0.5

    def layer(rows, w_gate_up, w_down):
        return capacity_mlp(rows, w_gate_up, w_down, sizes, R, methods=Methods(batched=batched))

    def plain(rows, w_gate_up, w_down):
        rows = jnp.where(held[..., None], rows, 0).reshape(-1, H)
        return reference.grouped_mlp(rows, w_gate_up, w_down, capacity_groups(sizes, R)).reshape(len(SIZES), R, H)

    @jax.jit
    def found(rows, w_gate_up, w_down):
        out, pull = jax.vjp(layer, rows, w_gate_up, w_down)
        return out, *pull(d_out)

    with jax.default_matmul_precision("highest"):  # not TF32
        wide = [array.astype(jnp.float32) for array in (rows, w_gate_up, w_down)]
        out, pull = jax.vjp(plain, *wide)
        wanted = out, *pull(jnp.where(held[..., None], d_out, 0).astype(jnp.float32))
    names = "out", "d_rows", "d_gate_up", "d_down"
    for name, got, want in zip(names, found(rows, w_gate_up, w_down), wanted, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        if name in ("out", "d_rows"):
            got, want = np.where(held[..., None], got, 0), np.where(held[..., None], want, 0)
        for expert, (one, right) in enumerate(zip(got, want, strict=True)):
            error = np.linalg.norm(one - right)
            assert error <= 1e-2 * np.linalg.norm(right), f"{name} of expert {expert}: {error}"
