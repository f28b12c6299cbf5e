"""What holds for every policy, checked on the implementation: one fate each, dense rows, drops that are exactly the
overflow, prefixes, and more capacity that never drops more.

Arithmetic is done again here in loops; only the sizes of pools come from the oracle, which has tests by hand.
"""

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from ep_jax.ep import EPConfig, reference
from ep_jax.ep.agreed import Receivers
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.reference import INVALID, KEPT, RECEIVER, SENDER, Policy
from tests.ep import ep_cases, vmapped
from tests.ep.vmapped import LENGTH

SHAPE = LayerShape(num_shards=4, num_experts=12, experts_per_token=3, tokens=8)
SIZES = reference.Sizes(SHAPE.num_shards, SHAPE.tokens, SHAPE.experts_per_token, SHAPE.num_experts)
TIGHT = dict(sender_factor=0.8, receiver_factor=0.7)
POLICIES = [
    *[
        EPConfig(**TIGHT, order=order, receive=receive, waves=waves)
        for order, receive, waves in (
            ("sequence", "expert", 1),
            ("sequence", "pool", 3),
            ("position", "expert", 3),
            ("position", "pool", 2),
            ("choice", "expert", 2),
            ("choice", "pool", 1),
            ("weight", "expert", 2),
            ("weight", "pool", 3),
        )
    ],
    *[
        EPConfig(**TIGHT, slots="token", order=order, receive=receive, waves=waves, premix=premix)
        for order, receive, waves, premix in (
            ("sequence", "pool", 2, 1),
            ("position", "expert", 3, 2),
            ("choice", "expert", 1, 1),
            ("weight", "pool", 2, 1),
        )
    ],
    EPConfig(**TIGHT, order="position", waves=2, premix=2),
    EPConfig(**TIGHT, order="weight", receive="pool", premix=4),
    *[EPConfig(transport="fixed_cell", **TIGHT, order=o, waves=w) for o, w in (("sequence", 3), ("weight", 1))],
    EPConfig(transport="fixed_cell", **TIGHT, order="choice", waves=2, premix=2),
    *[
        EPConfig(transport=transport, **TIGHT, agreed=agreed, waves=waves, premix=premix)
        for transport, agreed, waves, premix in (
            ("ragged", "round_robin", 2, 1),
            ("ragged", "water_fill", 1, 4),
            ("rowwise", "tail", 1, 1),
            ("rowwise", "water_fill", 2, 1),
            ("rowwise", "round_robin", 3, 2),
            ("ring", "water_fill", 1, 1),
            ("ring", "tail", 1, 2),
        )
    ],
]


def case_name(settings: EPConfig) -> str:
    policies = [getattr(settings, name) for name in ("order", "slots", "receive", "agreed") if name in settings.used]
    return "-".join([settings.transport, *policies, f"W{settings.waves}-g{settings.premix}"])


@pytest.fixture(autouse=True)
def on_one_device(monkeypatch):
    vmapped.patch(monkeypatch)


class Sent(collections.namedtuple("Sent", "source destination wave slot expert fate")):
    """One valid assignment as its (mixed) source ranks it."""


def ranked(settings: EPConfig, ids, weights, valid, fate) -> list[Sent]:
    """All valid assignments in the order in which each source ranks them, with the wave and slot of their rank."""
    moved = []
    for home, token, choice in np.ndindex(ids.shape):
        if valid[home, token]:
            source, place = reference.mixed_place(home, token, SHAPE.tokens, vmapped.group_of(settings))
            key = {
                "sequence": (place, choice),
                "position": (token % LENGTH, place, choice),
                "choice": (choice, token % LENGTH, place),
                "weight": (-weights[home, token, choice], place, choice),
            }[settings.order if "order" in settings.used else "sequence"]
            moved.append((source, key, int(ids[home, token, choice]), int(fate[home, token, choice]), place))
    in_line, sent = collections.defaultdict(dict), []
    for nth, (source, _, expert, what, place) in enumerate(sorted(moved)):
        destination = expert // SHAPE.local_experts
        pool = in_line[source, expert if settings.transport == "fixed_cell" else destination]
        rank = pool.setdefault(place if settings.slots == "token" else nth, len(pool))
        wave, slot = rank % settings.waves, rank // settings.waves
        if "agreed" in settings.used:
            wave, slot = expert % SHAPE.local_experts // Receivers(settings, SHAPE).group, rank
        sent.append(Sent(source, destination, wave, slot, expert, what))
    return sorted(sent, key=lambda a: (a.slot, a.wave)) if settings.slots == "token" else sent


def overflow(counts, limit) -> int:
    return sum(max(0, count - limit(key)) for key, count in counts.items())


def wanted_drops(settings: EPConfig, sent: list[Sent]) -> dict[int, int]:
    """Assignments over the limits: of the sender's pools or cells, then of what arrives."""
    policy, total = ep_cases.policy_of(settings), len(sent) // SHAPE.experts_per_token
    valid = collections.Counter(a.source for a in sent)
    per_source = {source: count // SHAPE.experts_per_token for source, count in valid.items()}
    if settings.transport == "fixed_cell":
        cells = collections.Counter((a.source, a.expert, a.wave) for a in sent)
        dropped = overflow(cells, lambda cell: reference.cell(SIZES, policy, per_source[cell[0]]))
        return {SENDER: dropped, RECEIVER: 0}
    if "agreed" in settings.used:
        receivers = Receivers(settings, SHAPE)
        pools = collections.Counter((a.destination, a.wave) for a in sent)

        def rows(pool):
            experts = receivers.experts_of(pool[1])
            return reference.destination_pool(SIZES, policy, total, experts.stop - experts.start)

        return {SENDER: 0, RECEIVER: overflow(pools, rows)}
    pools = collections.Counter((a.source, a.destination, a.wave) for a in sent)
    dropped = overflow(pools, lambda pool: reference.sender_pool(SIZES, policy, per_source[pool[0]]))
    if settings.slots == "token":
        dropped = sum(a.slot >= reference.sender_pool(SIZES, policy, per_source[a.source]) for a in sent)
    through = [a for a in sent if a.fate != SENDER]
    rows = reference.expert_rows(SIZES, policy, total)
    if settings.receive == "expert":
        arrivals = collections.Counter((a.expert, a.wave) for a in through)
        return {SENDER: dropped, RECEIVER: overflow(arrivals, lambda _: rows)}
    arrivals = collections.Counter((a.destination, a.wave) for a in through)
    return {SENDER: dropped, RECEIVER: overflow(arrivals, lambda _: rows * SHAPE.local_experts)}


@pytest.mark.parametrize("settings", POLICIES, ids=case_name)
@hypothesis.settings(max_examples=8)
@hypothesis.given(seed=st.integers(0, 2**30), skew=st.sampled_from([0.0, 1.0, 2.0, 30.0]), documents=st.booleans())
def test_every_policy(settings, seed, skew, documents):
    ids, weights, valid = vmapped.draw_routes(seed, SHAPE, skew, documents)
    tags = 1 + np.arange(valid.size, dtype=np.float32).reshape(*valid.shape, 1)
    trip = vmapped.trip(SHAPE, settings)(ids, weights, valid, tags)
    fate = np.asarray(trip.fate)
    assert ((fate == INVALID) == ~valid[..., None]).all()

    sent = ranked(settings, ids, weights, valid, fate)
    drops = collections.Counter(a.fate for a in sent)
    assert {stage: drops[stage] for stage in (SENDER, RECEIVER)} == wanted_drops(settings, sent)

    # Of each cell, a prefix of what the sender let through is kept; of each pool, a prefix is sent.
    cells, pools = collections.defaultdict(list), collections.defaultdict(list)
    for a in sent:
        pools[a.source, a.expert if settings.transport == "fixed_cell" else a.destination].append(a.fate == SENDER)
        if a.fate != SENDER:
            cells[a.source, a.expert, a.wave].append(a.fate == RECEIVER)
    for kept_first in (*cells.values(), *pools.values()):
        assert kept_first == sorted(kept_first)

    # Every kept row lies in one row of its expert's shard, and rows have no gaps where the layout promises none.
    for destination in range(SHAPE.num_shards):
        held = [np.asarray(buffer)[destination, :, 0] for buffer in trip.received]
        here = (fate == KEPT) & (ids // SHAPE.local_experts == destination)
        tokens = np.broadcast_to(tags, ids.shape)[here]
        assert sorted(tag for buffer in held for tag in buffer.tolist() if tag) == sorted(tokens.tolist())
        for buffer, sizes in zip(held, trip.sizes, strict=True):
            if sizes.shape[1]:
                runs = buffer[None]
                assert (buffer != 0).sum() == np.asarray(sizes)[destination].sum()
            else:
                parts = SHAPE.num_experts if settings.transport == "fixed_cell" else SHAPE.local_experts
                runs = buffer.reshape(parts, -1)
            filled = (runs != 0).astype(int)
            assert (np.diff(filled, axis=1) <= 0).all()


# --- capacity that suffices, and more of it ---------------------------------------------------------------------------


def drops_of(policy: Policy, routes, sizes: reference.Sizes = SIZES):
    ids, weights, valid = routes
    fate = reference.fates(
        ids, weights, valid, num_experts=sizes.experts, sequence_length=LENGTH, policy=policy
    ).fate  # fmt: skip
    return np.isin(fate, (SENDER, RECEIVER))


FACTOR = st.integers(1, 60).map(lambda twentieths: twentieths / 20)


@pytest.mark.parametrize("settings", POLICIES, ids=case_name)
@hypothesis.settings(max_examples=8)
@hypothesis.given(
    seed=st.integers(0, 2**30), less=st.tuples(FACTOR, FACTOR), more=st.tuples(FACTOR, FACTOR), documents=st.booleans()
)
def test_more_capacity_never_drops_more(settings, seed, less, more, documents):
    routes = vmapped.draw_routes(seed, SHAPE, 1.0, documents)
    names = ("transport", "order", "slots", "receive", "agreed", "waves", "premix")
    policy = {name: getattr(settings, name) for name in names}
    more = tuple(max(pair) for pair in zip(less, more, strict=True))
    drops = {
        (sender, receiver): drops_of(Policy(**policy, sender_factor=sender, receiver_factor=receiver), routes)
        for sender in (less[0], more[0])
        for receiver in (less[1], more[1])
    }
    assert drops[more].sum() <= drops[more[0], less[1]].sum() <= drops[less].sum()
    assert drops[more].sum() <= drops[less[0], more[1]].sum()
    # The receiver's rows never swap one assignment for another, nor do cells; a sender's pool can (below).
    assert not (drops[less[0], more[1]] & ~drops[less]).any()
    if settings.transport != "pooled_wave":
        assert not (drops[more] & ~drops[less]).any()
    enough = Policy(**policy, sender_factor=100.0, receiver_factor=100.0)
    assert not drops_of(enough, routes).any()


@pytest.mark.parametrize("receive", ["expert", "pool"])
def test_a_larger_sender_pool_can_change_who_is_dropped(receive):
    """The counterexamples of ARCHITECTURE.md: as many drops, but another assignment's."""
    if receive == "pool":
        # One shard, experts 0 and 1, and 2 * ceil(0.5 * 4 / 2) = 2 rows for both: 0 0 are kept, then 0 and 1.
        ids, valid = np.array([[[0], [0], [1], [1]]], np.int32), np.ones((1, 4), bool)
        factors, kept = {0.5: [0, 1], 1.0: [0, 2]}, 0.5
    else:
        # Two shards with 2 and 4 valid tokens, all for expert 1 with 3 rows. Pools of 1 and 2 slots, then 2 and 3.
        ids, valid = np.ones((2, 4, 1), np.int32), np.array([[True, True, False, False], [True] * 4])
        factors, kept = {1.0: [0, 4, 5], 1.5: [0, 1, 4]}, 1.0
    shape = LayerShape(len(ids), 2, 1, 4)
    for sender_factor, tokens in factors.items():
        settings = EPConfig(sender_factor=sender_factor, receiver_factor=kept, receive=receive)
        fate = vmapped.fates_of(shape, settings, ids, np.ones(ids.shape, np.float32), valid)
        assert np.flatnonzero(fate == KEPT).tolist() == tokens


# --- the same tokens over 1, 2, 4 and 8 shards ------------------------------------------------------------------------

DEGREES, EXPERTS, TOKENS, CHOICES = (1, 2, 4, 8), 8, 64, 2


def split(shards: int, routes):
    return [x.reshape(shards, TOKENS // shards, *x.shape[2:]) for x in routes]


def kept_by_degree(options: dict, seed: int) -> list[np.ndarray]:
    """Kept assignments [tokens, K] of the same tokens for each number of shards."""
    routes = vmapped.draw_routes(seed, LayerShape(1, EXPERTS, CHOICES, TOKENS), 1.0)
    kept = []
    for shards in DEGREES:
        policy = Policy(**TIGHT | options | {"premix": min(shards, options.get("premix", 1))})
        sizes = reference.Sizes(shards, TOKENS // shards, CHOICES, EXPERTS)
        kept.append(~drops_of(policy, split(shards, routes), sizes).reshape(TOKENS, CHOICES))
    return kept


def same_set(options: dict, seed: int) -> bool:
    first, *others = kept_by_degree(options, seed)
    return all((first == other).all() for other in others)


def same_counts(options: dict, seed: int) -> bool:
    ids = vmapped.draw_routes(seed, LayerShape(1, EXPERTS, CHOICES, TOKENS), 1.0)[0][0]
    first, *others = [np.bincount(ids[kept], minlength=EXPERTS).tolist() for kept in kept_by_degree(options, seed)]
    return all(first == other for other in others)


SAME_SET = [dict(transport="dense"), *[dict(transport=t, agreed="tail", waves=EXPERTS) for t in ("ragged", "rowwise")]]
SAME_COUNTS = [
    *[dict(transport="rowwise", agreed=agreed, waves=EXPERTS) for agreed in ("round_robin", "water_fill")],
    dict(transport="pooled_wave", sender_factor=1000.0),
    dict(transport="pooled_wave", sender_factor=1000.0, order="weight"),
]
NEITHER = [
    *[dict(transport="pooled_wave", order=order) for order in ("sequence", "position", "choice", "weight")],
    dict(transport="pooled_wave", sender_factor=1000.0, waves=2),
    dict(transport="pooled_wave", sender_factor=1000.0, receive="pool"),
    dict(transport="pooled_wave", premix=8),
    *[dict(transport="fixed_cell", order=order) for order in ("sequence", "position", "choice", "weight")],
    *[dict(transport="rowwise", agreed=agreed) for agreed in ("tail", "round_robin", "water_fill")],
    dict(transport="ring", agreed="tail", premix=8),
]


def policy_name(options: dict) -> str:
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize("options", SAME_SET, ids=policy_name)
def test_kept_set_is_the_same_for_every_ep_size(options):
    assert all(same_set(options, seed) and same_counts(options, seed) for seed in range(8))
    assert options["transport"] == "dense" or not all(kept.all() for kept in kept_by_degree(options, 0))


@pytest.mark.parametrize("options", SAME_COUNTS, ids=policy_name)
def test_only_rows_per_expert_are_the_same_for_every_ep_size(options):
    assert all(same_counts(options, seed) for seed in range(8))
    assert not all(same_set(options, seed) for seed in range(8))


@pytest.mark.parametrize("options", NEITHER, ids=policy_name)
def test_kept_set_and_rows_per_expert_depend_on_the_ep_size(options):
    assert not all(same_counts(options, seed) for seed in range(8))
    plenty = options | {"sender_factor": 1000.0, "receiver_factor": 1000.0}
    assert same_set(plenty, seed=0)


def test_the_implementation_keeps_the_same_set_for_every_ep_size():
    settings = EPConfig(transport="rowwise", agreed="tail", waves=EXPERTS, **TIGHT)
    for seed in range(3):
        routes = vmapped.draw_routes(seed, LayerShape(1, EXPERTS, CHOICES, TOKENS), 1.0)
        found = [
            vmapped.fates_of(LayerShape(shards, EXPERTS, CHOICES, TOKENS // shards), settings, *split(shards, routes))
            for shards in DEGREES
        ]
        assert all((fate.reshape(-1) == found[0].reshape(-1)).all() for fate in found)
        assert (found[0] == RECEIVER).any()
