"""One battery over every transport: fates, counts, values and all gradients equal the oracle's.

Each case is one compiled program (mesh, settings) that is run on every routing. The cases are a covering set, not the
full product; `test_cases_cover` says which pairs are in it. Factor WORST is large enough that nothing can drop.
"""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.ep import EPConfig, experts, payload, ragged
from ep_jax.ep.reference import KEPT, RECEIVER, SENDER
from tests.ep import ep_cases
from tests.ep.ep_cases import Sizes, mesh_of, problem

SIZES = Sizes()
WORST = 1000.0
FACTORS = (0.25, 0.8, 1.0, WORST)


def pooled(mesh, waves, sender, receiver, order, schedule, rescale):
    settings = EPConfig(
        transport="pooled_wave",
        sender_factor=sender,
        receiver_factor=receiver,
        order=order,
        waves=waves,
        schedule=schedule,
        rescale=rescale,
    )
    return mesh, settings


def agreed(mesh, waves, receiver, updates, schedule, rescale):
    settings = EPConfig(
        transport="ragged",
        receiver_factor=receiver,
        updates_per_cell=updates,
        waves=waves,
        schedule=schedule,
        rescale=rescale,
    )
    return mesh, settings


CASES = [
    pooled((1, 2, 4), 1, 0.25, WORST, "sequence", "sequential", True),
    pooled((1, 1, 8), 1, 0.8, 0.8, "position", "overlapped", False),
    pooled((2, 2, 2), 1, 1.0, 1.0, "sequence", "sequential", False),
    pooled((1, 4, 2), 1, WORST, 0.25, "position", "sequential", True),
    pooled((2, 2, 2), 2, 0.25, 0.25, "position", "sequential", False),
    pooled((1, 4, 2), 2, 0.8, 1.0, "sequence", "overlapped", True),
    pooled((1, 1, 8), 2, 1.0, 0.8, "position", "sequential", True),
    pooled((1, 2, 4), 2, WORST, WORST, "sequence", "sequential", False),
    pooled((1, 8, 1), 3, 0.25, 1.0, "position", "overlapped", True),
    pooled((1, 8, 1), 3, 0.8, WORST, "sequence", "sequential", False),
    pooled((1, 2, 4), 3, 1.0, 0.25, "sequence", "overlapped", False),
    pooled((2, 2, 2), 3, WORST, 0.8, "position", "sequential", True),
    agreed((1, 1, 8), 1, 0.25, 1, "sequential", True),
    agreed((1, 2, 4), 1, 0.8, 3, "overlapped", False),
    agreed((2, 2, 2), 1, WORST, 1, "sequential", False),
    agreed((1, 4, 2), 2, 1.0, 3, "overlapped", True),
    agreed((2, 2, 2), 2, 0.25, 1, "sequential", False),
    agreed((1, 1, 8), 2, 0.8, 3, "sequential", False),
    agreed((1, 2, 4), 3, 0.8, 1, "sequential", True),
    agreed((1, 8, 1), 3, 1.0, 3, "sequential", False),
    agreed((1, 2, 4), 4, WORST, 3, "overlapped", False),
    ((1, 2, 4), EPConfig(transport="dense")),
    ((2, 2, 2), EPConfig(transport="dense", rescale=True)),
    ((1, 8, 1), EPConfig(transport="dense", sender_factor=0.25, receiver_factor=0.25)),
]


def case_name(case) -> str:
    (replica, fsdp, ep), s = case
    factors = f"cs{s.sender_factor:g}-cr{s.receiver_factor:g}"
    return f"{replica}x{fsdp}x{ep}-{s.transport}-W{s.waves}-{factors}-{s.order}-{s.schedule}-{s.rescale}"


def test_cases_cover():
    pairs = {(s.transport, mesh) for mesh, s in CASES if s.transport != "dense"}
    assert pairs == set(itertools.product(("pooled_wave", "ragged"), ep_cases.MESHES))
    pooled_cases = [s for _, s in CASES if s.transport == "pooled_wave"]
    assert {(s.waves, s.sender_factor) for s in pooled_cases} == set(itertools.product((1, 2, 3), FACTORS))
    assert {s.receiver_factor for s in pooled_cases} == set(FACTORS)
    for names in itertools.combinations(("order", "schedule", "rescale"), 2):
        assert len({tuple(getattr(s, name) for name in names) for s in pooled_cases}) == 4
    ragged_cases = [s for _, s in CASES if s.transport == "ragged"]
    assert {s.receiver_factor for s in ragged_cases} == set(FACTORS)
    assert {(s.updates_per_cell, s.rescale) for s in ragged_cases} == set(itertools.product((1, 3), (False, True)))


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
    pooled_wave, limited = settings.transport == "pooled_wave", settings.transport != "dense"
    can_overflow = ep > 1 or pooled_wave  # a destination pool of a single shard that gets all rows
    assert (seen[SENDER] > 0) == (pooled_wave and sender <= 1.0 and (ep > 1 or sender < 1.0))
    if receiver == WORST or not limited:
        assert seen[RECEIVER] == 0
    elif can_overflow and sender > 0.25:
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


@pytest.mark.parametrize("transport", ["pooled_wave", "ragged", "dense"])
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
    "ragged": EPConfig(transport="ragged", receiver_factor=0.75),
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


@pytest.mark.parametrize("transport", ["pooled_wave", "ragged"])
def test_bfloat16(transport):
    settings = EPConfig(transport=transport, sender_factor=0.8, receiver_factor=0.8, waves=2)
    given = problem(ep_cases.by_document, SIZES, dtype=jnp.bfloat16)
    result = ep_cases.program(settings, mesh_of(1, 2, 4), SIZES.sequence_length)(*given)
    assert result[0][1][0].dtype == jnp.bfloat16
    assert [gradient.dtype for gradient in result[1]] == [x.dtype for x in given[:5]]
    ep_cases.check_answer(result, ep_cases.oracle(given, settings, 4, SIZES.sequence_length), 2e-2, 2e-2)


# --- rows nobody wrote ------------------------------------------------------------------------------------------------


def garbage(rows):
    """NaN, a huge number, infinity, NaN, ... by row, in the shape of `rows` [..., row, lane]."""
    kind = jax.lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 2) % 3
    return jnp.where(kind == 0, jnp.nan, jnp.where(kind == 1, 1e30, -jnp.inf)).astype(rows.dtype)


@jax.custom_vjp
def spoil(rows, written):
    """rows where `written`, garbage elsewhere; so too for the gradient that comes back."""
    return jnp.where(written[..., None], rows, garbage(rows))


spoil.defvjp(lambda rows, written: (spoil(rows, written), written), lambda written, ct: (spoil(ct, written), None))


def spoil_slots(monkeypatch):
    """Garbage in empty and rejected slots, on both sides of the exchange, and in unused header lanes."""
    pack, unpack = payload.pack, payload.unpack

    def spoiled_pack(numbers, rows, largest):
        packed = pack(numbers, spoil(rows, numbers > 0), largest)
        header = payload.header_rows(numbers.shape[1], largest, rows.shape[-1])
        used = numbers.shape[1] * payload.lanes_per_slot(largest)
        lane = jnp.arange(header * rows.shape[-1]).reshape(1, header, rows.shape[-1])
        lanes = jnp.where(lane < used, packed[:, :header], garbage(packed[:, :header]))
        return jnp.concatenate([lanes, packed[:, header:]], axis=1)

    def spoiled_unpack(received, slots, largest):
        numbers, rows = unpack(received, slots, largest)
        return numbers, spoil(rows, numbers > 0)

    monkeypatch.setattr(payload, "pack", spoiled_pack)
    monkeypatch.setattr(payload, "unpack", spoiled_unpack)


def spoil_buffers(monkeypatch):
    """Garbage in every row of a receive buffer that no update covers, in both directions and in the gradient."""
    take_rows = ragged.take_rows
    monkeypatch.setattr(
        ragged,
        "take_rows",
        lambda rows, index: jnp.where(index[:, None] < 0, garbage(out := take_rows(rows, index)), out),
    )


def greedy_ragged_dot(rows, weights, sizes):
    """A grouped matmul that reads every row: what lies past the last group counts as the last expert's."""
    past = rows.shape[0] - jnp.sum(sizes)
    return jax.lax.ragged_dot(rows, weights, sizes.at[-1].add(past))


@jax.custom_vjp
def sloppy_ragged_dot(rows, weights, sizes):
    """A grouped matmul that never reads past the last group and leaves garbage there, in its gradient too."""
    held = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return spoil(jax.lax.ragged_dot(spoil(rows, held), weights, sizes), held)


def sloppy_forward(rows, weights, sizes):
    return sloppy_ragged_dot(rows, weights, sizes), (rows, weights, sizes)


def sloppy_backward(residuals, gradient):
    rows, weights, sizes = residuals
    held = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    rows, gradient = (jnp.where(held[:, None], x, 0) for x in (rows, gradient))
    _, pull = jax.vjp(lambda rows, weights: jax.lax.ragged_dot(rows, weights, sizes), rows, weights)
    d_rows, d_weights = pull(gradient)
    return spoil(d_rows, held), d_weights, None


sloppy_ragged_dot.defvjp(sloppy_forward, sloppy_backward)


def spoil_greedy(monkeypatch):
    spoil_buffers(monkeypatch)
    monkeypatch.setattr(experts, "lax", types.SimpleNamespace(ragged_dot=greedy_ragged_dot))


def spoil_sloppy(monkeypatch):
    spoil_buffers(monkeypatch)
    monkeypatch.setattr(experts, "lax", types.SimpleNamespace(ragged_dot=sloppy_ragged_dot))


POOLED_TIGHT = EPConfig(sender_factor=1.15, receiver_factor=0.5, waves=2)
RAGGED_TIGHT = EPConfig(transport="ragged", receiver_factor=0.5, waves=2)


@functools.cache
def clean_results(settings):
    step = ep_cases.program(settings, mesh_of(1, 1, 8), SIZES.sequence_length)
    return [step(*problem(routing, SIZES)) for routing in ep_cases.ROUTINGS]


@pytest.mark.parametrize(
    ("settings", "spoil_all"),
    [(POOLED_TIGHT, spoil_slots), (RAGGED_TIGHT, spoil_greedy), (RAGGED_TIGHT, spoil_sloppy)],
    ids=["pooled_wave", "ragged-greedy", "ragged-sloppy"],
)
def test_garbage_in_rows_nobody_wrote_changes_nothing(monkeypatch, settings, spoil_all):
    clean = clean_results(settings)
    spoil_all(monkeypatch)
    step = ep_cases.program(settings, mesh_of(1, 1, 8), SIZES.sequence_length)
    text = step.lower(*problem(ep_cases.uniform, SIZES)).as_text()
    assert "0xFF800000" in text, "no garbage in the program"
    for routing, wanted in zip(ep_cases.ROUTINGS, clean, strict=True):
        result = step(*problem(routing, SIZES))
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(result))
        ep_cases.check_same_bits(result, wanted)
