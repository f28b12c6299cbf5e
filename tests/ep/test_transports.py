"""One battery over every row of the transport table: fates, counts, values and all gradients equal the oracle's.

Each case is one compiled program (mesh, settings) that is run on every routing. The cases are a covering set, not the
full product; `test_cases_cover` says which pairs are in it. Factor WORST is large enough that nothing can drop.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.ep import EPConfig, reference_values, routed_experts
from ep_jax.ep.reference import KEPT, RECEIVER, SENDER
from ep_jax.ep.settings import AGREEMENTS, ORDERS, RECEIVES
from ep_jax.fields import ConfigError
from tests.ep import ep_cases
from tests.ep.ep_cases import Sizes, mesh_of, problem

SIZES = Sizes()
WORST = 1000.0
FACTORS = (0.25, 0.8, 1.0, WORST)


def case(replica, fsdp, ep, transport, **settings):
    return (replica, fsdp, ep), EPConfig(transport=transport, **settings)


def pooled(mesh, waves, sender, receiver, order, receive, schedule, rescale, premix=1, slots="assignment"):
    settings = dict(waves=waves, sender_factor=sender, receiver_factor=receiver, order=order, receive=receive)
    settings |= dict(slots=slots)
    return case(*mesh, "pooled_wave", **settings, schedule=schedule, rescale=rescale, premix=premix)


def cells(mesh, waves, sender, order, schedule, rescale, premix=1):
    settings = dict(waves=waves, sender_factor=sender, order=order, schedule=schedule, rescale=rescale, premix=premix)
    return case(*mesh, "fixed_cell", **settings)


def agreed(mesh, transport, policy, waves, receiver, rescale, premix=1, updates=1, schedule="sequential"):
    settings = dict(agreed=policy, waves=waves, receiver_factor=receiver, rescale=rescale, premix=premix)
    return case(*mesh, transport, **settings, updates_per_cell=updates, schedule=schedule)


CASES = [
    pooled((1, 2, 4), 1, 0.25, WORST, "sequence", "expert", "sequential", True),
    pooled((1, 1, 8), 1, 0.8, 0.8, "position", "expert", "overlapped", False, premix=4),
    pooled((2, 2, 2), 1, 1.0, 1.0, "choice", "pool", "sequential", False),
    pooled((1, 4, 2), 1, WORST, 0.25, "weight", "expert", "sequential", True, premix=2),
    pooled((2, 2, 2), 2, 0.25, 0.25, "position", "pool", "sequential", False),
    pooled((1, 4, 2), 2, 0.8, 1.0, "weight", "pool", "overlapped", True),
    pooled((1, 1, 8), 2, 1.0, 0.8, "choice", "expert", "sequential", True, premix=8),
    pooled((1, 2, 4), 2, WORST, WORST, "sequence", "pool", "sequential", False, premix=2),
    pooled((1, 8, 1), 3, 0.25, 1.0, "position", "expert", "overlapped", True),
    pooled((1, 8, 1), 3, 0.8, WORST, "sequence", "pool", "sequential", False),
    pooled((1, 2, 4), 3, 1.0, 0.25, "sequence", "expert", "overlapped", False),
    pooled((2, 2, 2), 3, WORST, 0.8, "choice", "expert", "sequential", True),
    pooled((1, 2, 4), 1, 0.8, WORST, "sequence", "expert", "sequential", True, slots="token"),
    pooled((1, 1, 8), 2, 0.8, 0.8, "position", "pool", "overlapped", False, premix=4, slots="token"),
    pooled((2, 2, 2), 3, 0.25, 1.0, "weight", "expert", "sequential", True, slots="token"),
    pooled((1, 4, 2), 1, 1.0, 0.25, "choice", "pool", "sequential", False, premix=2, slots="token"),
    pooled((1, 8, 1), 2, WORST, 0.8, "weight", "pool", "overlapped", False, slots="token"),
    cells((1, 1, 8), 1, 0.8, "position", "sequential", False),
    cells((1, 2, 4), 3, 1.0, "sequence", "overlapped", True),
    cells((2, 2, 2), 2, 0.25, "choice", "sequential", False, premix=2),
    cells((1, 4, 2), 1, 0.8, "weight", "sequential", True),
    cells((1, 8, 1), 2, WORST, "sequence", "sequential", False),
    agreed((1, 1, 8), "ragged", "round_robin", 1, 0.25, True),
    agreed((1, 2, 4), "ragged", "tail", 1, 0.8, False, updates=3, schedule="overlapped", premix=2),
    agreed((2, 2, 2), "ragged", "water_fill", 1, WORST, False),
    agreed((1, 4, 2), "ragged", "water_fill", 2, 1.0, True, updates=3, schedule="overlapped"),
    agreed((1, 2, 4), "ragged", "round_robin", 3, 0.8, True),
    agreed((1, 8, 1), "ragged", "tail", 3, 0.8, False, updates=3),
    agreed((1, 1, 8), "rowwise", "tail", 1, 0.8, False),
    agreed((1, 2, 4), "rowwise", "water_fill", 3, 1.0, True, premix=4),
    agreed((2, 2, 2), "rowwise", "round_robin", 2, 0.25, False, schedule="overlapped"),
    agreed((1, 8, 1), "rowwise", "round_robin", 1, WORST, True),
    agreed((1, 4, 2), "rowwise", "round_robin", 4, 1.0, True),
    agreed((1, 1, 8), "ring", "round_robin", 1, 0.8, True, premix=8),
    agreed((1, 2, 4), "ring", "tail", 1, 0.25, False),
    agreed((2, 2, 2), "ring", "water_fill", 1, 1.0, False),
    agreed((1, 4, 2), "ring", "water_fill", 1, 0.8, True),
    agreed((1, 8, 1), "ring", "round_robin", 1, WORST, False),
    case(1, 2, 4, "dense"),
    case(2, 2, 2, "dense", rescale=True),
    case(1, 8, 1, "dense", sender_factor=0.25, receiver_factor=0.25, premix=2),
]
LIMITED = ("pooled_wave", "fixed_cell", "ragged", "rowwise", "ring")


def case_name(case) -> str:
    mesh, settings = case
    policies = [getattr(settings, name) for name in ("order", "slots", "receive", "agreed") if name in settings.used]
    return "-".join(["x".join(map(str, mesh)), settings.transport, *policies, f"W{settings.waves}-g{settings.premix}"])


def test_cases_cover():
    assert {(s.transport, mesh) for mesh, s in CASES if s.transport != "dense"} == set(
        itertools.product(LIMITED, ep_cases.MESHES)
    )
    of = {name: [s for _, s in CASES if s.transport == name] for name in LIMITED}
    for settings in of.values():
        assert {s.rescale for s in settings} == {False, True}
        assert {s.sender_factor if s.transport == "fixed_cell" else s.receiver_factor for s in settings} == set(FACTORS)
    pooled_cases = of["pooled_wave"]
    assert {(s.order, s.receive) for s in pooled_cases} == set(itertools.product(ORDERS, RECEIVES))
    assert {(s.waves, s.sender_factor) for s in pooled_cases} == set(itertools.product((1, 2, 3), FACTORS))
    tokens = [s for s in pooled_cases if s.slots == "token"]
    assert {s.order for s in tokens} == set(ORDERS)
    assert {s.receive for s in tokens} == set(RECEIVES)
    assert {(mesh[2], s.rescale) for mesh, s in CASES if s.slots == "token"} >= {
        (8, False),
        (4, True),
        (2, True),
        (2, False),
    }
    for names in itertools.combinations(("receive", "schedule", "rescale"), 2):
        assert len({tuple(getattr(s, name) for name in names) for s in pooled_cases}) == 4
    assert {s.order for s in of["fixed_cell"]} == set(ORDERS)
    assert {s.waves for s in of["fixed_cell"]} == {1, 2, 3}
    for name in ("ragged", "rowwise", "ring"):
        assert {s.agreed for s in of[name]} == set(AGREEMENTS)
    assert {s.waves for name in ("ragged", "rowwise") for s in of[name]} == {1, 2, 3, 4}
    assert {(s.updates_per_cell, s.rescale) for s in of["ragged"]} == set(itertools.product((1, 3), (False, True)))
    assert {s.transport for _, s in CASES if s.premix > 1 and s.transport != "dense"} == set(LIMITED)
    premixed = {(mesh[2], s.premix) for mesh, s in CASES if s.premix > 1 and s.transport != "dense"}
    assert premixed == {(2, 2), (4, 2), (4, 4), (8, 4), (8, 8)}
    # Waves that divide neither the tokens of a shard nor its experts.
    assert any(SIZES.tokens % s.waves for s in of["pooled_wave"])
    assert any(SIZES.experts // mesh[2] % s.waves for mesh, s in CASES if s.transport == "ragged")


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_equals_the_oracle(case):
    (replica, fsdp, ep), settings = case
    step = ep_cases.program(settings, mesh_of(replica, fsdp, ep), SIZES.sequence_length)
    seen = np.zeros(4, np.int64)
    for seed, routing in enumerate(ep_cases.ROUTINGS):
        given = problem(routing, SIZES, seed)
        result = step(*given)
        wanted = ep_cases.oracle(given, settings, ep, SIZES.sequence_length)
        ep_cases.check_answer(result, wanted)
        ep_cases.check_same_bits(result, step(*given))
        seen += np.bincount(wanted.fate.reshape(-1), minlength=4)
    assert step._cache_size() == 1
    # The routings overflow what is limited, and only that; the stage that dropped is named right.
    sender, receiver = settings.sender_factor, settings.receiver_factor
    by_sender, by_receiver = settings.transport in ("pooled_wave", "fixed_cell"), "receiver_factor" in settings.used
    assert (seen[SENDER] > 0) == (by_sender and sender <= 1.0 and (ep > 1 or sender < 1.0))
    if receiver == WORST or not by_receiver:
        assert seen[RECEIVER] == 0
    elif receiver < 1.0 and (not by_sender or sender > 0.25):
        assert seen[RECEIVER] > 0
    assert seen[KEPT] > 0


# --- one expert per shard, one choice per token -----------------------------------------------------------------------

SINGLE = Sizes(choices=1, experts=8)


def uneven(rng, sizes):
    """Device i sends i tokens to expert i+1 and the rest to expert 0."""
    device, token = np.divmod(np.arange(ep_cases.NUM_DEVICES * sizes.tokens), sizes.tokens)
    ids = np.where(token < device, (device + 1) % sizes.experts, 0)
    return ids[:, None].astype(np.int32), np.ones(len(ids), bool)


def two_experts(rng, sizes):
    """Only experts 0 and 3 are ever chosen."""
    ids = 3 * (np.arange(ep_cases.NUM_DEVICES * sizes.tokens) % 2)
    return ids[:, None].astype(np.int32), np.ones(len(ids), bool)


@pytest.mark.parametrize("transport", [*LIMITED, "dense"])
def test_uneven_counts_and_idle_experts(transport):
    settings = EPConfig(transport=transport, sender_factor=8.0, receiver_factor=8.0)
    step = ep_cases.program(settings, mesh_of(1, 1, 8), SINGLE.sequence_length)

    given = problem(uneven, SINGLE)
    result = step(*given)
    ep_cases.check_answer(result, ep_cases.oracle(given, settings, 8, SINGLE.sequence_length), 1e-6, 1e-5)
    assert result[0][1][1].counts_PE[0].tolist() == [107, 0, 1, 2, 3, 4, 5, 6]

    given = problem(two_experts, SINGLE)
    result = step(*given)
    ep_cases.check_answer(result, ep_cases.oracle(given, settings, 8, SINGLE.sequence_length))
    idle = [1, 2, 4, 5, 6, 7]
    for gradient in result[1][3:]:
        assert (np.asarray(gradient)[idle] == 0.0).all()
        assert (np.asarray(gradient)[[0, 3]] != 0.0).any()


# --- number formats ---------------------------------------------------------------------------------------------------

TIGHT = {
    "pooled_wave": EPConfig(sender_factor=0.8, receiver_factor=0.75, waves=2, rescale=True),
    "slots of tokens": EPConfig(sender_factor=0.8, receiver_factor=0.75, waves=2, slots="token"),
    "ragged": EPConfig(transport="ragged", receiver_factor=0.75),
    "ring": EPConfig(transport="ring", receiver_factor=0.75, agreed="tail", premix=2),
}


@pytest.mark.parametrize("transport", TIGHT)
def test_float64(transport):
    """The oracle to 1e-12, and the loss really computed by central differences through the router."""
    settings, sizes = TIGHT[transport], Sizes(experts=8, choices=2)
    with jax.enable_x64(True):
        step = ep_cases.program(settings, mesh_of(1, 1, 8), sizes.sequence_length)
        given = problem(ep_cases.by_document, sizes, dtype=np.float64)
        result = step(*given)
        assert result[0][1][0].dtype == jnp.float64
        wanted = ep_cases.oracle(given, settings, 8, sizes.sequence_length)
        ep_cases.check_answer(result, wanted, 1e-12, 1e-12)
        dropped = (wanted.fate == SENDER) | (wanted.fate == RECEIVER)
        assert dropped.any()
        if not settings.rescale:  # a dropped choice has no say, so its weight gets no gradient
            assert (np.asarray(result[1][1])[dropped] == 0.0).all()

        rng, small = np.random.default_rng(0), 1e-5
        for position, name in ((0, "rows"), (2, "w_router")):
            array, gradient = given[position], np.asarray(result[1][position])
            for flat in rng.choice(array.size, 10, replace=False):
                index = np.unravel_index(flat, array.shape)
                losses = [float(step(*moved(given, name, index, shift))[0][0]) for shift in (small, -small)]
                difference = (losses[0] - losses[1]) / (2 * small)
                assert difference == pytest.approx(gradient[index], rel=1e-4, abs=1e-7)


def moved(given, name, index, shift):
    array = getattr(given, name).copy()
    array[index] += shift
    return given._replace(**{name: array})


@pytest.mark.parametrize(
    ("transport", "slots"), [*[(name, "assignment") for name in LIMITED], ("pooled_wave", "token")]
)
def test_bfloat16(transport, slots):
    waves, premix = (1, 4) if transport == "ring" else (2, 1)
    settings = EPConfig(transport=transport, sender_factor=0.8, receiver_factor=0.8, waves=waves, premix=premix)
    settings = dataclasses.replace(settings, slots=slots)
    given = problem(ep_cases.by_document, SIZES, dtype=jnp.bfloat16)
    result = ep_cases.program(settings, mesh_of(1, 2, 4), SIZES.sequence_length)(*given)
    assert result[0][1][0].dtype == jnp.bfloat16
    assert [gradient.dtype for gradient in result[1]] == [x.dtype for x in given[:5]]
    # Rows are rounded to 8 bits three times on their way; sums between are in float32.
    bound = 3 * 2.0**-8
    ep_cases.check_answer(result, ep_cases.oracle(given, settings, 4, SIZES.sequence_length), bound, bound)


# --- slots of tokens: how much a slot may hold ------------------------------------------------------------------------


def test_a_slot_has_flags_for_31_assignments():
    """Every choice of every token on its one shard: the last flag of a slot is in use, and one more is refused."""
    sizes = Sizes(tokens=8, choices=31, experts=32)
    settings = EPConfig(slots="token", sender_factor=2.0, receiver_factor=2.0)
    given = problem(ep_cases.uniform, sizes)
    result = ep_cases.program(settings, mesh_of(1, 8, 1), sizes.sequence_length)(*given)
    ep_cases.check_answer(result, ep_cases.oracle(given, settings, 1, sizes.sequence_length))
    assert (np.asarray(result[0][1][1].fate_TK) == KEPT).all()
    wider = dataclasses.replace(sizes, choices=32)
    with pytest.raises(ConfigError, match="^ep.slots = 'token': a token may choose 32 experts of one shard.* up to 31"):
        ep_cases.program(settings, mesh_of(1, 8, 1), 8)(*problem(ep_cases.uniform, wider))


# --- weights that sum to zero -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        EPConfig(transport="dense", rescale=True),
        EPConfig(slots="token", rescale=True, sender_factor=0.8, receiver_factor=0.75),
        EPConfig(emulated_shards=8, rescale=True, sender_factor=0.8, receiver_factor=0.75),
    ],
    ids=["dense", "token", "emulated"],
)
def test_rescaling_a_token_without_weight(settings):
    """Zero over zero is nothing, in values and gradients, also where experts weight their results."""
    given, mesh = problem(ep_cases.uniform, SIZES), mesh_of(1, 1, 8)
    weights = np.random.default_rng(0).random(given.ids.shape).astype(np.float32)
    weights[::5] = 0

    def objective(rows, weights, w_gate_up, w_down):
        out, report = routed_experts(
            *(rows, given.ids, weights, given.valid, w_gate_up, w_down),
            sequence_length=SIZES.sequence_length,
            mesh=mesh,
            settings=settings,
        )
        return jnp.sum(out * given.d_out), (out, report.fate_TK)

    arguments = given.rows, weights, given.w_gate_up, given.w_down
    step = jax.jit(jax.value_and_grad(objective, (0, 1, 2, 3), has_aux=True), compiler_options=ep_cases.QUICK)
    (_, (out, fate)), gradients = step(*arguments)
    parts = [array.reshape(8, -1, *array.shape[1:]) for array in (given.rows, given.ids, weights, given.valid)]
    options = {"sequence_length": SIZES.sequence_length, "policy": ep_cases.policy_of(settings)}
    right, fates = reference_values.forward(*parts, given.w_gate_up, given.w_down, **options)
    d_out = given.d_out.reshape(right.shape)
    wanted = reference_values.gradients(*parts, given.w_gate_up, given.w_down, d_out, **options)
    np.testing.assert_array_equal(fate, fates.fate.reshape(fate.shape))
    for one, other in zip((out, *gradients), (right, *wanted.values()), strict=True):
        np.testing.assert_allclose(one, other.reshape(one.shape), rtol=0, atol=2e-5 * np.abs(other).max())
