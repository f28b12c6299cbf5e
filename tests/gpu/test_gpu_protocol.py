"""The protocol on real GPUs against the NumPy oracle: kept sets exactly, values and gradients in float32, with drops.

Run on a machine with at least one GPU: `python -m pytest -m gpu tests/gpu`. Every transport runs on meshes of all GPUs,
with the experts over all of them, over a half and over a quarter. `python -m pytest -m "gpu or not gpu" FILE` runs the
same cases on 8 virtual CPU devices, where ragged and rowwise are emulations.
Letters: T tokens of all shards, K choices, E experts, H routed width, F expert hidden width.
"""

import functools

import jax
import numpy as np
import pytest

from ep_jax.ep import EPConfig, reference, reference_values, routed_experts
from ep_jax.mesh import MeshConfig, make_mesh

pytestmark = pytest.mark.gpu

SEQUENCE, SEQUENCES_PER_SHARD, K, E, F = 64, 2, 4, 16, 96
CASES = [
    dict(transport="pooled_wave", sender_factor=0.9, receiver_factor=1.0),
    dict(transport="pooled_wave", sender_factor=0.8, receiver_factor=0.9, waves=3, order="position", rescale=True),
    dict(transport="pooled_wave", sender_factor=16.0, receiver_factor=16.0, waves=2, schedule="overlapped"),
    dict(transport="pooled_wave", slots="token", sender_factor=0.9, receiver_factor=1.0, order="weight"),
    dict(transport="pooled_wave", slots="token", sender_factor=0.8, receiver_factor=0.9, waves=2, receive="pool"),
    dict(transport="fixed_cell", sender_factor=0.9),
    dict(transport="ragged", receiver_factor=0.9),
    dict(transport="ragged", receiver_factor=0.8, waves=2, updates_per_cell=4, rescale=True),
    dict(transport="ragged", receiver_factor=16.0, updates_per_cell=3),
    dict(transport="rowwise", receiver_factor=0.9),
    dict(transport="rowwise", receiver_factor=0.8, waves=2, rescale=True),
    dict(transport="ring", receiver_factor=0.9),
    dict(transport="dense"),
]
FSDP_SIZES = [fsdp for fsdp in (1, 2, 4) if jax.device_count() % fsdp == 0]


def width_of(case) -> int:
    """H; the one-sided kernels of rowwise move rows of whole 256 elements."""
    return 256 if case["transport"] == "rowwise" else 64


@functools.cache
def problem(width: int) -> dict[str, np.ndarray]:
    """Document-skewed routing for all GPUs, with a tenth of the tokens invalid."""
    rng = np.random.default_rng(0)
    tokens = jax.device_count() * SEQUENCES_PER_SHARD * SEQUENCE
    taste = np.repeat(rng.gumbel(size=(tokens // SEQUENCE, E)), SEQUENCE, axis=0)
    ids = np.argsort(-(taste + rng.gumbel(size=(tokens, E))), axis=1)[:, :K].astype(np.int32)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return dict(
        rows=normal(tokens, width),
        ids=ids,
        weights=rng.random((tokens, K)).astype(np.float32),
        valid=rng.random(tokens) < 0.9,
        w_gate_up=normal(E, width, 2 * F) * width**-0.5,
        w_down=normal(E, F, width) * F**-0.5,
        d_out=normal(tokens, width),
    )


@pytest.mark.parametrize("fsdp", FSDP_SIZES, ids=lambda fsdp: f"ep{jax.device_count() // fsdp}xfsdp{fsdp}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_layer_equals_the_oracle(case, fsdp):
    given, settings = problem(width_of(case)), EPConfig(**case)
    mesh = make_mesh(MeshConfig(fsdp=fsdp, ep=jax.device_count() // fsdp))

    def objective(rows, weights, w_gate_up, w_down):
        out, report = routed_experts(
            rows,
            given["ids"],
            weights,
            given["valid"],
            w_gate_up,
            w_down,
            sequence_length=SEQUENCE,
            mesh=mesh,
            settings=settings,
        )
        return (out * given["d_out"]).sum(), (out, report)

    arguments = [given[name] for name in ("rows", "weights", "w_gate_up", "w_down")]
    with jax.default_matmul_precision("highest"):  # not TF32
        step = jax.jit(jax.grad(objective, argnums=(0, 1, 2, 3), has_aux=True))
        gradients, (out, report) = step(*arguments)
        again, (out_again, _) = step(*arguments)

    fate, wanted_out, wanted = oracle(given, settings, groups=fsdp)
    np.testing.assert_array_equal(report.fate_TK, fate)
    least = getattr(settings, "receiver_factor" if "receiver_factor" in settings.used else "sender_factor")
    assert np.isin(fate, (reference.SENDER, reference.RECEIVER)).any() == (settings.transport != "dense" and least < 2)
    assert relative_error(out, wanted_out) < 1e-5
    for name, gradient in zip(("rows", "weights", "w_gate_up", "w_down"), gradients, strict=True):
        assert relative_error(gradient, wanted[name]) < 2e-5, name
    np.testing.assert_array_equal(out, out_again)
    for first, second in zip(gradients, again, strict=True):
        np.testing.assert_array_equal(first, second)


def oracle(given, settings: EPConfig, groups: int):
    """(fates [T,K], values [T,H], gradients by name): one ep group after the other; expert gradients are summed."""
    names = ("transport", "sender_factor", "receiver_factor", "order", "slots", "receive", "agreed", "waves", "rescale")
    policy = reference.Policy(**{name: getattr(settings, name) for name in names})
    shards = jax.device_count() // groups
    fate, out, gradients = [], [], []
    for group in range(groups):
        rows, ids, weights, valid, d_out = (
            np.split(given[name], groups)[group].reshape(shards, -1, *given[name].shape[1:])
            for name in ("rows", "ids", "weights", "valid", "d_out")
        )
        inputs = (rows, ids, weights, valid, given["w_gate_up"], given["w_down"])
        group_out, fates = reference_values.forward(*inputs, sequence_length=SEQUENCE, policy=policy)
        fate.append(fates.fate.reshape(-1, K))
        out.append(group_out.reshape(-1, rows.shape[-1]))
        gradients.append(reference_values.gradients(*inputs, d_out, sequence_length=SEQUENCE, policy=policy))
    joined = {
        name: np.concatenate([g[name].reshape(-1, g[name].shape[-1]) for g in gradients])
        for name in ("rows", "weights")
    }
    summed = {name: sum(g[name] for g in gradients) for name in ("w_gate_up", "w_down")}
    return np.concatenate(fate), np.concatenate(out), joined | summed


def relative_error(found, wanted) -> float:
    """Largest absolute error over the largest absolute value."""
    found = np.asarray(found, np.float64)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
