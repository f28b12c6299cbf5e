"""64 shards without 64 devices: every transport's plan against the oracle, to the row.

Once as the plan functions alone, a `vmap` with the exchange as a transpose (`simulate`), and once as the transports
with tagged rows. Kept set, destination, row and counts are exact for all source shards. Then the two-rank drawing of
rowwise expert parallelism, which is public, as golden tests.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.ep import EPConfig, reference
from ep_jax.ep.agreed import Receivers
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.drops import local_drops
from ep_jax.ep.ranking import count_groups
from ep_jax.ep.reference import KEPT, RECEIVER, SENDER
from ep_jax.ep.rowwise import route_map
from ep_jax.ep.simulate import simulate
from tests.ep import ep_cases, vmapped

SHAPE = LayerShape(num_shards=64, num_experts=192, experts_per_token=2, tokens=8)
CASES = [
    EPConfig(waves=1, sender_factor=0.8, receiver_factor=0.8),
    EPConfig(waves=3, sender_factor=1.0, receiver_factor=0.6, order="position"),
    EPConfig(waves=2, sender_factor=0.8, receiver_factor=0.6, order="choice", receive="pool"),
    EPConfig(waves=1, sender_factor=1.0, receiver_factor=0.4, order="weight", receive="pool", premix=4),
    EPConfig(waves=2, sender_factor=1000.0, receiver_factor=1000.0, order="position"),
    EPConfig(slots="token", waves=3, sender_factor=0.9, receiver_factor=0.6, order="position"),
    EPConfig(slots="token", sender_factor=0.8, receiver_factor=0.4, order="weight", receive="pool", premix=4),
    EPConfig(transport="fixed_cell", waves=2, sender_factor=1.0, order="choice"),
    EPConfig(transport="fixed_cell", waves=1, sender_factor=2.0, order="position", premix=8),
    EPConfig(transport="ragged", receiver_factor=0.8),
    EPConfig(transport="ragged", receiver_factor=1.0, waves=2, updates_per_cell=3, agreed="water_fill"),
    EPConfig(transport="rowwise", receiver_factor=0.8, agreed="tail", waves=3),
    EPConfig(transport="rowwise", receiver_factor=0.6, agreed="water_fill", premix=8),
    EPConfig(transport="ring", receiver_factor=0.8, agreed="round_robin"),
]


@pytest.fixture(autouse=True)
def on_one_device(monkeypatch):
    vmapped.patch(monkeypatch)


def case_name(settings: EPConfig) -> str:
    policies = [getattr(settings, name) for name in ("order", "slots", "receive", "agreed") if name in settings.used]
    return "-".join([settings.transport, *policies, f"W{settings.waves}-g{settings.premix}"])


@pytest.mark.parametrize("settings", CASES, ids=case_name)
def test_every_row_is_where_the_oracle_says(settings):
    shape = SHAPE
    tags = 1 + np.arange(shape.num_shards * shape.tokens, dtype=np.float32).reshape(shape.num_shards, -1, 1)
    for seed in range(2):
        ids, weights, valid = vmapped.draw_routes(seed, shape)
        trip = vmapped.trip(shape, settings)(ids, weights, valid, tags)
        wanted = vmapped.oracle_of(shape, settings, ids, weights, valid)
        np.testing.assert_array_equal(trip.fate, wanted.fate)
        options = dict(num_experts=shape.num_experts, sequence_length=vmapped.LENGTH, settings=settings)
        np.testing.assert_array_equal(simulate(ids, weights, valid, **options), wanted.fate)
        for wave, (rows, sizes) in enumerate(zip(trip.received, trip.sizes, strict=True)):
            here = (wanted.fate == KEPT) & (wanted.wave == wave)
            expected = np.zeros(rows.shape, np.float32)
            source, token, _ = np.nonzero(here)
            row = in_buffer(wanted.row[here], settings, shape)
            expected[wanted.destination[here], row] = tags[source, token]
            np.testing.assert_array_equal(rows, expected)
            if sizes.shape[1]:
                first, last = experts_of(settings, shape, wave)
                kept = np.bincount(ids[here], minlength=shape.num_experts).reshape(shape.num_shards, -1)
                np.testing.assert_array_equal(sizes, kept[:, first:last])
        # What came home: each token's kept weights times its own tag.
        kept_weight = np.where(wanted.fate == KEPT, weights, 0).sum(axis=2, keepdims=True)
        np.testing.assert_allclose(trip.out, kept_weight * tags, rtol=1e-6)
        check_counts(np.asarray(trip.fate), ids, weights, shape)
        dropped = {SENDER, RECEIVER} & set(wanted.fate.reshape(-1).tolist())
        if settings.sender_factor == 1000.0:
            assert not dropped
        elif settings.transport == "pooled_wave":
            assert dropped == {SENDER, RECEIVER}
        else:
            assert dropped == {SENDER if settings.transport == "fixed_cell" else RECEIVER}


def in_buffer(row, settings: EPConfig, shape: LayerShape):
    """The oracle's rows, R for each expert, where an expert has a few more, so that all are whole groups of 8."""
    if settings.transport != "pooled_wave" or settings.receive != "expert":
        return row
    sizes = reference.Sizes(shape.num_shards, shape.tokens, shape.experts_per_token, shape.num_experts)
    apart = rows = reference.expert_rows(sizes, ep_cases.policy_of(settings), shape.num_shards * shape.tokens)
    while apart * shape.local_experts % 8:
        apart += 1
    return row // rows * apart + row % rows


def experts_of(settings: EPConfig, shape: LayerShape, wave: int) -> tuple[int, int]:
    """Local experts of a wave: all but for the agreed transports."""
    if "agreed" not in settings.used:
        return 0, shape.local_experts
    experts = Receivers(settings, shape).experts_of(wave)
    return experts.start, experts.stop


def check_counts(fate_STK, ids_STK, weights_STK, shape) -> None:
    """Counts per source shard and expert are those of the oracle's report."""
    wanted = [
        [np.bincount(ids[mask], minlength=shape.num_experts) for mask in ep_cases.stages(fate)]
        for ids, fate in zip(ids_STK, fate_STK, strict=True)
    ]
    for source in (0, shape.num_shards // 2, shape.num_shards - 1):
        arrays = [jnp.asarray(x[source]) for x in (fate_STK, ids_STK, weights_STK)]
        np.testing.assert_array_equal(local_drops(*arrays, shape.num_experts).counts_PE, wanted[source])


@pytest.mark.parametrize("local_experts", [1, 2, 255, 256, 257, 600])
def test_local_expert_ids_are_exact_end_to_end(local_experts):
    """Every expert of two shards is chosen once by either shard, through bfloat16 rows and header lanes."""
    shape = LayerShape(2, 2 * local_experts, 2, tokens=max(4, -(-local_experts // 4) * 4))
    settings = EPConfig(sender_factor=1000.0, receiver_factor=1000.0)
    token = np.arange(shape.tokens)
    valid = np.stack([token < local_experts] * 2)
    one = np.stack([token % local_experts, local_experts + token[::-1] % local_experts], axis=1)
    ids = np.stack([one, one[:, ::-1]]).astype(np.int32)
    tags = np.stack([token % 128 + 1, -(token % 128) - 1])[..., None]  # exact in bfloat16
    trip = vmapped.trip(shape, settings)(ids, np.ones(ids.shape, np.float32), valid, jnp.asarray(tags, jnp.bfloat16))
    wanted = vmapped.oracle_of(shape, settings, ids, np.ones(ids.shape), valid)
    np.testing.assert_array_equal(trip.fate, wanted.fate)
    assert (wanted.fate[valid] == KEPT).all()
    (rows,) = trip.received
    expected = np.zeros(rows.shape, np.float32)
    source, token, _ = np.nonzero(wanted.fate == KEPT)
    row = in_buffer(wanted.row[wanted.fate == KEPT], settings, shape)
    expected[wanted.destination[wanted.fate == KEPT], row] = tags[source, token]
    np.testing.assert_array_equal(np.asarray(rows, np.float32), expected)


# --- golden: the public two-rank drawing of rowwise EP ----------------------------------------------------------------

# Ten tokens A..J, two shards of two experts, top-2, 1.2 * 2 * 10 / 2 = 12 rows a shard, in a buffer of 16.
NAMES = [["A1 A2", "B0 B1", "C3 C1", "D0 D1", "E1 E2"], ["F2 F0", "G0 G1", "H3 H0", "I1 I3", "J1 J2"]]
LETTERS = np.array([[pair.split() for pair in shard] for shard in NAMES])
IDS = np.array([[[int(name[1]) for name in pair] for pair in shard] for shard in LETTERS], np.int32)
DRAWING = LayerShape(num_shards=2, num_experts=4, experts_per_token=2, tokens=5)
EXPERT_0 = ["B0", "D0", "F0", "G0", "H0"]  # rows 0..4 of rank 0
GOLDEN = {
    "round_robin": ("E1", [*EXPERT_0, "A1", "B1", "C1", "D1", "G1", "I1", "J1"]),
    "tail": ("J1", [*EXPERT_0, "A1", "B1", "C1", "D1", "E1", "G1", "I1"]),
}
RANK_1 = ["A2", "E2", "F2", "J2", "C3", "H3", "I3"]


def drawn(transport: str, agreed: str):
    """(dropped names, names by row of rank 0, of rank 1), from where tagged rows arrive."""
    settings = EPConfig(transport=transport, agreed=agreed, receiver_factor=1.2)
    tags = 1 + np.arange(10, dtype=np.float32).reshape(2, 5, 1)
    ones = np.ones(IDS.shape, np.float32)
    trip = vmapped.trip(DRAWING, settings)(IDS, ones, np.ones((2, 5), bool), tags)
    (rows,), (sizes,) = trip.received, trip.sizes
    by_row = []
    for rank in range(2):
        experts = np.repeat(2 * rank + np.arange(2), sizes[rank])
        tokens = np.asarray(rows)[rank, : len(experts), 0]
        by_row.append([f"{'ABCDEFGHIJ'[int(tag) - 1]}{expert}" for tag, expert in zip(tokens, experts, strict=True)])
    assert rows.shape[1] == 16
    return LETTERS[np.asarray(trip.fate) == RECEIVER].tolist(), *by_row


@pytest.mark.parametrize("agreed", GOLDEN)
@pytest.mark.parametrize("transport", ["ragged", "rowwise", "ring"])
def test_the_drawing(transport, agreed):
    dropped, stored = GOLDEN[agreed]
    assert drawn(transport, agreed) == ([dropped], stored, RANK_1)


@pytest.mark.parametrize("agreed", GOLDEN)
def test_the_route_map_of_the_drawing(agreed):
    """The map itself: (token, expert) -> row; A1 B1 C1 D1 G1 I1 J1 are rows 5..11 of rank 0 for round_robin."""
    receivers = Receivers(EPConfig(transport="rowwise", agreed=agreed, receiver_factor=1.2), DRAWING)
    counts = jnp.stack([count_groups(jnp.asarray(ids).reshape(-1), 4) for ids in IDS])
    kept = receivers.keep(counts, jnp.int32(10))
    found = {}
    for rank in range(2):
        rows = np.asarray(route_map(jnp.asarray(IDS[rank]), kept, jnp.int32(rank), receivers))
        found |= dict(zip(LETTERS[rank].reshape(-1).tolist(), rows.reshape(-1).tolist(), strict=True))
    dropped, stored = GOLDEN[agreed]
    wanted = {name: row for row, name in enumerate(stored)} | {name: 16 + row for row, name in enumerate(RANK_1)}
    assert found == wanted | {dropped: -1}
    if agreed == "round_robin":
        assert [found[name] for name in ("A1", "B1", "C1", "D1", "G1", "I1", "J1")] == [5, 6, 7, 8, 9, 10, 11]
