"""An emulated ep group on few devices drops, computes and differentiates exactly what the real one would.

Run: python -m pytest tests/ep/test_emulated.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.config import RunConfig, check_run, load
from ep_jax.ep import EPConfig, reference, routed_experts
from ep_jax.ep.reference import RECEIVER, SENDER
from ep_jax.ep.settings import dropless
from ep_jax.fields import ConfigError
from ep_jax.launch import unused_settings
from ep_jax.mesh import MeshConfig, make_mesh
from ep_jax.planning.hardware import load_hardware
from ep_jax.planning.plan import make_plan, place
from tests.ep import ep_cases
from tests.ep.ep_cases import Sizes, problem

SIZES = Sizes()  # 8 shards of two packed rows
WAVES = EPConfig(sender_factor=0.8, receiver_factor=0.75, order="position", waves=2, emulated_shards=8)
POOL = EPConfig(sender_factor=0.8, receiver_factor=0.8, order="weight", receive="pool", premix=2, emulated_shards=8)
TOKENS = EPConfig(sender_factor=0.7, receiver_factor=0.8, slots="token", waves=2, premix=2, emulated_shards=8)
CELLS = EPConfig(transport="fixed_cell", sender_factor=0.8, order="position", rescale=True, emulated_shards=8)
RAGGED = EPConfig(transport="ragged", receiver_factor=0.75, waves=2, premix=2, emulated_shards=8)
# (fsdp, ep), settings: every policy, and every number of devices with pre-mix and without.
CASES = [
    ((1, 1), WAVES),
    ((1, 2), WAVES),
    ((1, 4), WAVES),
    ((1, 1), POOL),
    ((1, 2), RAGGED),
    ((1, 4), POOL),
    ((1, 1), dataclasses.replace(RAGGED, premix=1)),
    ((1, 4), CELLS),
    ((1, 2), TOKENS),
    ((2, 2), dataclasses.replace(RAGGED, emulated_shards=4)),  # two groups of four shards on two devices each
]


@functools.cache
def mesh_of(fsdp: int, ep: int):
    """A mesh on the first fsdp * ep of the 8 devices."""
    return make_mesh(MeshConfig(fsdp=fsdp, ep=ep), jax.devices()[: fsdp * ep])


def case_name(case) -> str:
    (fsdp, ep), settings = case
    policy = f"{settings.transport}-{settings.slots}-W{settings.waves}-g{settings.premix}"
    return f"{fsdp}x{ep}-{policy}-S{settings.emulated_shards}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_equals_the_oracle_of_the_large_group(case):
    """Fates and counts exactly, values and all gradients closely; sources are the devices that there are."""
    (fsdp, ep), settings = case
    step = ep_cases.program(settings, mesh_of(fsdp, ep), SIZES.sequence_length)
    seen = np.zeros(4, np.int64)
    for seed, routing in enumerate(ep_cases.ROUTINGS):
        given = problem(routing, SIZES, seed)
        wanted = ep_cases.oracle(given, settings, settings.emulated_shards, SIZES.sequence_length)
        by_device_DP = wanted.source_counts_DP.reshape(fsdp * ep, -1, 3).sum(axis=1)
        ep_cases.check_answer(step(*given), wanted._replace(source_counts_DP=by_device_DP))
        seen += np.bincount(wanted.fate.reshape(-1), minlength=4)
    assert step._cache_size() == 1
    assert (seen[SENDER] > 0) == (settings.transport in ("pooled_wave", "fixed_cell"))
    assert (seen[RECEIVER] > 0) == (settings.transport != "fixed_cell")


def test_equals_the_real_transport_on_eight_devices():
    real = dataclasses.replace(POOL, emulated_shards=0)
    given = problem(ep_cases.by_document, SIZES)
    (_, (out, report)), gradients = ep_cases.program(POOL, mesh_of(1, 2), SIZES.sequence_length)(*given)
    (_, (wanted_out, wanted)), wanted_gradients = ep_cases.program(real, mesh_of(1, 8), SIZES.sequence_length)(*given)
    np.testing.assert_array_equal(report.fate_TK, wanted.fate_TK)
    np.testing.assert_array_equal(report.counts_PE, wanted.counts_PE)
    np.testing.assert_array_equal(report.source_counts_DP, wanted.source_counts_DP.reshape(2, 4, 3).sum(axis=1))
    ep_cases.check_close("out", out, wanted_out, 1e-6)
    for name, found, expected in zip(ep_cases.GRADIENTS, gradients, wanted_gradients, strict=True):
        ep_cases.check_close(name, found, expected, 1e-5)


def test_64_shards_on_one_device():
    shards, experts, length, choices = 64, 128, 8, 4
    settings = EPConfig(sender_factor=1.05, receiver_factor=1.33, waves=3, emulated_shards=shards)
    rng = np.random.default_rng(0)
    tokens = shards * 2 * length
    taste = np.repeat(rng.gumbel(size=(tokens // 4, experts)), 4, axis=0)
    ids = np.argsort(-(taste + rng.gumbel(size=taste.shape)), axis=1)[:, :choices].astype(np.int32)
    valid = rng.random(tokens) < 0.9
    arrays = jnp.ones((tokens, 2)), ids, np.full(ids.shape, 0.25, np.float32), valid
    weights = jnp.ones((experts, 2, 4)), jnp.ones((experts, 2, 2))
    run = functools.partial(routed_experts, sequence_length=length, mesh=mesh_of(1, 1), settings=settings)
    _, report = jax.jit(run, compiler_options=ep_cases.QUICK)(*arrays, *weights)

    dealt = [x.reshape(shards, -1, *x.shape[1:]) for x in (ids, arrays[2], valid)]
    policy = ep_cases.policy_of(settings)
    wanted = reference.fates(*dealt, num_experts=experts, sequence_length=length, policy=policy).fate
    np.testing.assert_array_equal(report.fate_TK, wanted.reshape(ids.shape))
    assert (wanted == SENDER).any()
    assert (wanted == RECEIVER).any()
    assert report.source_counts_DP.tolist() == [[report.valid, report.sender, report.receiver]]


# --- what other parts make of it --------------------------------------------------------------------------------------


def test_dropless_settings_do_not_emulate():
    assert not dropless(WAVES).emulates
    free = EPConfig(transport="dense", emulated_shards=8)
    assert dropless(free) == free  # so that it is evaluated once
    given = RunConfig(ep=free)
    assert unused_settings(given) == ["not used by ep.transport = dense: ep.emulated_shards"]
    check_run(given)


def test_a_run_says_that_it_emulates():
    assert ", emulated_shards 8," in WAVES.describe()


def test_plans_are_of_the_real_group():
    hardware = load_hardware("h200_8")
    real, emulated = (load("tiny", [("ep.emulated_shards", text)]) for text in ("0", "8"))
    wanted, found = (make_plan(place(config, hardware), hardware) for config in (real, emulated))
    assert {key for key in wanted if wanted[key] != found[key]} == {"step", "warnings"}
    [warning] = set(found["warnings"]) - set(wanted["warnings"])
    assert "ep.emulated_shards = 8: planned as the real group of mesh.ep = 4" in warning


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"mesh.ep": 4, "ep.emulated_shards": 6}, ["ep.emulated_shards = 6", "multiple of 4 (mesh.ep)", "4 and 8"]),
        (
            {"mesh.ep": 2, "ep.emulated_shards": 6, "train.sequences_per_step": 12},
            ["router.num_experts = 16", "multiple of 6 (ep.emulated_shards)"],
        ),
        (
            {"mesh.fsdp": 2, "mesh.ep": 2, "ep.emulated_shards": 16, "train.accumulation": 2},
            ["train.sequences_per_step = 32", "multiple of 64", "times 32 shards", "ep.emulated_shards"],
        ),
        ({"ep.emulated_shards": 8, "ep.premix": 3}, ["ep.premix = 3", "divide ep.emulated_shards = 8"]),
        (
            {"ep.emulated_shards": 8, "ep.premix": 8, "data.sequence_length": 9},
            ["ep.premix = 8", "divide the tokens of a shard = 36"],
        ),
        ({"ep.emulated_shards": -1}, ["ep.emulated_shards = -1", "at least 0"]),
    ],
)
def test_runs_that_do_not_fit_are_refused(options, parts):
    with pytest.raises(ConfigError) as caught:
        check_run(load(None, [(name, str(value)) for name, value in options.items()]))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_runs_that_fit_are_accepted():
    """Pre-mix over more shards than there are devices, too."""
    options = {"mesh.fsdp": 2, "mesh.ep": 2, "ep.emulated_shards": 16, "ep.premix": 8}
    check_run(load(None, [(name, str(value)) for name, value in options.items()]))


@pytest.mark.parametrize(
    ("ep", "experts", "changes", "parts"),
    [
        (8, 16, {"emulated_shards": 12}, ["ep.emulated_shards = 12", "multiple of the mesh's ep = 8"]),
        (1, 16, {"emulated_shards": 32}, ["128 tokens", "32 shards"]),
        (2, 24, {"emulated_shards": 16}, ["24 experts", "ep.emulated_shards = 16"]),
        (1, 16, {"emulated_shards": 1, "premix": 2}, ["ep.premix = 2", "ep.emulated_shards = 1"]),
        (2, 16, {"emulated_shards": 16, "premix": 16}, ["ep.premix = 16", "8 tokens"]),
    ],
)
def test_calls_that_do_not_fit_are_refused(ep, experts, changes, parts):
    layer = ep_cases.layer(dataclasses.replace(WAVES, **changes), mesh_of(1, ep), SIZES.sequence_length)
    with pytest.raises(ConfigError) as caught:
        layer(*problem(ep_cases.uniform, Sizes(experts=experts)))
    assert all(part in str(caught.value) for part in parts), caught.value
