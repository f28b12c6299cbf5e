"""The protocol on real GPUs against the NumPy oracle: kept sets exactly, values and gradients in float32, with drops.

Run on a machine with at least one GPU: `python -m pytest -m gpu tests/gpu`. The ep axis takes all GPUs.
Letters: T tokens of all shards, K choices, E experts, H routed width, F expert hidden width.
"""

import jax
import numpy as np
import pytest

from ep_jax.ep import EPConfig, reference, routed_experts
from ep_jax.mesh import MeshConfig, make_mesh

pytestmark = pytest.mark.gpu

SEQUENCE, SEQUENCES_PER_SHARD, K, E, H, F = 64, 4, 4, 16, 64, 96
CASES = [
    dict(transport="pooled_wave", sender_factor=0.9, receiver_factor=1.0),
    dict(transport="pooled_wave", sender_factor=0.8, receiver_factor=0.9, waves=3, order="position", rescale=True),
    dict(transport="pooled_wave", sender_factor=16.0, receiver_factor=16.0, waves=2, schedule="overlapped"),
    dict(transport="ragged", receiver_factor=0.9),
    dict(transport="ragged", receiver_factor=0.8, waves=2, updates_per_cell=4, rescale=True),
    dict(transport="ragged", receiver_factor=16.0, updates_per_cell=3),
    dict(transport="dense"),
]


@pytest.fixture(scope="module")
def problem():
    """Document-skewed routing on one ep group of all GPUs, with a tenth of the tokens invalid."""
    rng = np.random.default_rng(0)
    tokens = jax.device_count() * SEQUENCES_PER_SHARD * SEQUENCE
    taste = np.repeat(rng.gumbel(size=(tokens // SEQUENCE, E)), SEQUENCE, axis=0)
    ids = np.argsort(-(taste + rng.gumbel(size=(tokens, E))), axis=1)[:, :K].astype(np.int32)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return dict(
        rows=normal(tokens, H),
        ids=ids,
        weights=rng.random((tokens, K)).astype(np.float32),
        valid=rng.random(tokens) < 0.9,
        w_gate_up=normal(E, H, 2 * F) * H**-0.5,
        w_down=normal(E, F, H) * F**-0.5,
        d_out=normal(tokens, H),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_layer_equals_the_oracle(problem, case):
    shards = jax.device_count()
    mesh, settings = make_mesh(MeshConfig(ep=shards)), EPConfig(**case)
    ids, valid = problem["ids"], problem["valid"]

    def objective(rows, weights, w_gate_up, w_down):
        out, report = routed_experts(
            rows, ids, weights, valid, w_gate_up, w_down, sequence_length=SEQUENCE, mesh=mesh, settings=settings
        )
        return (out * problem["d_out"]).sum(), (out, report)

    arguments = [problem[name] for name in ("rows", "weights", "w_gate_up", "w_down")]
    with jax.default_matmul_precision("highest"):  # not TF32
        step = jax.jit(jax.grad(objective, argnums=(0, 1, 2, 3), has_aux=True))
        gradients, (out, report) = step(*arguments)
        again, (out_again, _) = step(*arguments)

    names = ("transport", "sender_factor", "receiver_factor", "order", "receive", "agreed", "waves", "rescale")
    policy = reference.Policy(**{name: getattr(settings, name) for name in names})

    def split(array):
        return array.reshape(shards, -1, *array.shape[1:])

    by_shard = [split(problem[name]) for name in ("rows", "ids", "weights", "valid")]
    experts = (problem["w_gate_up"], problem["w_down"])
    wanted_out, wanted_fates = reference.forward(*by_shard, *experts, sequence_length=SEQUENCE, policy=policy)
    wanted = reference.gradients(*by_shard, *experts, split(problem["d_out"]), sequence_length=SEQUENCE, policy=policy)

    np.testing.assert_array_equal(split(np.asarray(report.fate_TK)), wanted_fates.fate)
    assert relative_error(out, wanted_out) < 1e-5
    for name, gradient in zip(("rows", "weights", "w_gate_up", "w_down"), gradients, strict=True):
        assert relative_error(gradient, wanted[name]) < 2e-5, name
    np.testing.assert_array_equal(out, out_again)
    for first, second in zip(gradients, again, strict=True):
        np.testing.assert_array_equal(first, second)


def relative_error(found, wanted) -> float:
    """Largest absolute error over the largest absolute value."""
    found = np.asarray(found, np.float64).reshape(wanted.shape)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
