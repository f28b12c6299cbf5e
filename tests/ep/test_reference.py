"""The oracle against answers worked out by hand and against the definitions; its properties are a file further on.

Everything else in tests/ep is judged by the oracle, so nothing here is computed by the code it judges.
"""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from ep_jax.ep import reference
from ep_jax.ep.reference import INVALID, KEPT, RECEIVER, SENDER, Policy, Sizes

PLENTY = 1000.0


def run(ids, *, num_experts, sequence_length=None, weights=None, valid=None, **policy):
    """Fates of nested lists; by default all weights are 1, all tokens valid and each shard holds one sequence."""
    ids = np.asarray(ids)
    weights = np.ones(ids.shape, np.float32) if weights is None else np.asarray(weights, np.float32)
    valid = np.ones(ids.shape[:2], bool) if valid is None else np.asarray(valid)
    return reference.fates(
        ids,
        weights,
        valid,
        num_experts=num_experts,
        sequence_length=sequence_length or ids.shape[1],
        policy=Policy(**policy),
    )


# --- capacities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "count", "parts", "expected"),
    [
        (1.15, 200, 1, 230),  # in binary floating point 1.15 * 200 is 229.99999999999997
        (1.1, 100, 1, 110),  # 110.00000000000001: a naive ceil gives 111
        (1.1, 101, 1, 112),  # 111.1 is rounded up
        (1.25, 2 * 16, 64, 1),  # T = 16, K = 2, E = 64: 0.625 rows, not 0
        (1.25, 0, 64, 1),  # nothing to send: still a buffer
        (np.float64(1.15), 200, 1, 230),
        (2, 100, 1, 200),
        (1e-05, 300_000, 1, 3),
    ],
)
def test_capacity_is_exact_and_at_least_one(factor, count, parts, expected):
    assert reference.capacity(factor, count, parts, at_most=10**9) == expected


def test_capacity_stops_at_what_can_occur():
    assert reference.capacity(1.15, 200, 1, at_most=229) == 229


def test_sender_pool():
    sizes = Sizes(shards=2, tokens=12, choices=2, experts=8)  # e = 4
    # 1.15 * 2 * 12 / 2 = 13.8; with 5 valid tokens 1.15 * 2 * 5 / 2 = 5.75; with 3 waves 13.8 / 3 = 4.6.
    assert reference.sender_pool(sizes, Policy(transport="pooled_wave"), 12) == 14
    assert reference.sender_pool(sizes, Policy(transport="pooled_wave"), 5) == 6
    assert reference.sender_pool(sizes, Policy(transport="pooled_wave", waves=3), 12) == 5
    # A token sends at most min(K, e) rows to a shard: 12 * 2 = 24 slots, 24 / 5 = 4.8 in each of 5 waves.
    assert reference.sender_pool(sizes, Policy(transport="pooled_wave", sender_factor=PLENTY), 12) == 24
    assert reference.sender_pool(sizes, Policy(transport="pooled_wave", sender_factor=PLENTY, waves=5), 12) == 5
    one_expert_each = Sizes(shards=8, tokens=12, choices=2, experts=8)
    assert reference.sender_pool(one_expert_each, Policy(transport="pooled_wave", sender_factor=PLENTY), 12) == 12


def test_sender_pool_of_tokens():
    sizes = Sizes(shards=2, tokens=12, choices=2, experts=8)
    policy = {"transport": "pooled_wave", "slots": "token"}
    # Both choices miss a shard in 4 * 3 of 8 * 7 cases; 1.15 * (1 - 12 / 56) = 0.9036 -> 926 / 1024. Of 12 tokens
    # 10.85, of 5 valid ones 4.52, in 3 waves 3.62. A token takes one slot: 12, 12 / 5 = 2.4 in each of 5 waves.
    assert reference.sender_pool(sizes, Policy(**policy), 12) == 11
    assert reference.sender_pool(sizes, Policy(**policy), 5) == 5
    assert reference.sender_pool(sizes, Policy(**policy, waves=3), 12) == 4
    assert reference.sender_pool(sizes, Policy(**policy, sender_factor=PLENTY), 12) == 12
    assert reference.sender_pool(sizes, Policy(**policy, sender_factor=PLENTY, waves=5), 12) == 3


@pytest.mark.parametrize(
    ("order", "fates", "slots"),
    [
        # Shard 0 is wanted by tokens 0, 1 and 3, shard 1 by 0 and 2. In order of tokens the last one finds no slot.
        ("sequence", [[0, 0], [0, 0], [0, 0], [1, 1]], [[0, 0], [1, 1], [1, 1], [-1, -1]]),
        # A token counts as its heaviest assignment there: 3 (0.8) before 1 (0.3) before 0 (0.1); 0 (0.9) before 2.
        ("weight", [[1, 0], [0, 0], [0, 0], [0, 0]], [[-1, 0], [1, 1], [1, 1], [0, 0]]),
    ],
)
def test_a_slot_holds_all_that_a_token_chose_on_a_shard(order, fates, slots):
    ids, weights = np.zeros((2, 2, 4, 2))
    ids[0] = [[0, 2], [0, 1], [2, 3], [1, 0]]
    weights[0] = [[0.1, 0.9], [0.2, 0.3], [0.5, 0.5], [0.25, 0.8]]
    valid = np.array([[True] * 4, [False] * 4])
    # 1 - 1 / 6 of 4 tokens, half of that in slots: 427 / 1024 * 4 = 1.67 -> 2.
    policy = Policy(transport="pooled_wave", slots="token", order=order, sender_factor=0.5, receiver_factor=PLENTY)
    found = reference.fates(ids.astype(int), weights, valid, num_experts=4, sequence_length=4, policy=policy)
    assert found.fate[0].tolist() == fates
    assert found.slot[0].tolist() == slots


def test_cell():
    sizes = Sizes(shards=2, tokens=12, choices=2, experts=8)
    # 1.15 * 24 / 8 = 3.45, in 2 waves 1.725. A token sends at most one row to an expert: 12, 12 / 5 = 2.4 in 5 waves.
    assert reference.cell(sizes, Policy(transport="fixed_cell"), 12) == 4
    assert reference.cell(sizes, Policy(transport="fixed_cell", waves=2), 12) == 2
    assert reference.cell(sizes, Policy(transport="fixed_cell", sender_factor=PLENTY), 12) == 12
    assert reference.cell(sizes, Policy(transport="fixed_cell", sender_factor=PLENTY, waves=5), 12) == 3


def test_expert_rows():
    sizes = Sizes(shards=2, tokens=12, choices=2, experts=8)
    # V = 24: 1.33 * 48 / 8 = 7.98. V = 10: 1.33 * 20 / 8 = 3.325.
    assert reference.expert_rows(sizes, Policy(transport="pooled_wave", receiver_factor=1.33), 24) == 8
    assert reference.expert_rows(sizes, Policy(transport="pooled_wave", receiver_factor=1.33), 10) == 4
    # P = 14 > T = 12: two sources send an expert at most 12 rows each. With factor 0.5, P = 6: at most 6 each.
    policy = Policy(transport="pooled_wave", receiver_factor=PLENTY)
    assert reference.expert_rows(sizes, policy, 24) == 24
    policy = Policy(transport="pooled_wave", receiver_factor=PLENTY, sender_factor=0.5)
    assert reference.expert_rows(sizes, policy, 24) == 12


def test_destination_pool():
    sizes = Sizes(shards=2, tokens=5, choices=2, experts=4)
    # 1.2 * 2 * 10 / 2 = 12 rows for both experts of a shard, half of it for one. At most 2 * 5 rows per choice.
    policy = Policy(transport="ragged", receiver_factor=1.2)
    assert reference.destination_pool(sizes, policy, 10, experts_in_wave=2) == 12
    assert reference.destination_pool(sizes, policy, 10, experts_in_wave=1) == 6
    assert reference.destination_pool(sizes, policy, 7, experts_in_wave=2) == 9  # 8.4
    policy = Policy(transport="ragged", receiver_factor=PLENTY)
    assert reference.destination_pool(sizes, policy, 10, experts_in_wave=2) == 20
    assert reference.destination_pool(sizes, policy, 10, experts_in_wave=1) == 10


# --- fill ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "pool", "expected"),
    [
        ([5, 1, 4], 8, [4, 1, 3]),  # level 3 takes 7, one left for the first that claims more than 3
        ([1, 5, 1, 5], 7, [1, 3, 1, 2]),  # level 2 takes 6, the one left skips index 0, which has all it claims
        ([3, 3, 3], 5, [2, 2, 1]),  # two left, ascending index
        ([3, 3, 3], 2, [1, 1, 0]),  # level 0
        ([0, 2, 5], 100, [0, 2, 5]),  # room for all
        ([0, 2, 5], 7, [0, 2, 5]),  # just enough
        ([4, 4], 0, [0, 0]),
        ([], 3, []),
    ],
)
def test_fill_by_hand(n, pool, expected):
    assert reference.fill(n, pool) == expected


@hypothesis.given(st.lists(st.integers(0, 12), max_size=6), st.integers(0, 50))
def test_fill_is_its_definition(n, pool):
    levels = [level for level in range(51) if sum(min(claim, level) for claim in n) <= pool]
    shares = [min(claim, levels[-1]) for claim in n]
    hungry = [i for i, claim in enumerate(n) if claim > levels[-1]]
    for i in hungry[: pool - sum(shares)]:
        shares[i] += 1
    assert reference.fill(n, pool) == shares
    assert sum(shares) == min(pool, sum(n))


# --- senders ------------------------------------------------------------------------------------------------------


def test_waves_are_dealt_like_cards():
    # Two shards of one expert. All 6 tokens of shard 0 go to expert 1; shard 1 is empty. P = 1.0 * 6 / (2 * 2) -> 2.
    # Ranks 0..5 give waves 0 1 0 1 0 1 and slots 0 0 1 1 2 2; slot 2 does not exist. Rows start at 0 in each wave.
    result = run(
        [[[1]] * 6, [[0]] * 6],
        valid=[[True] * 6, [False] * 6],
        num_experts=2,
        transport="pooled_wave",
        sender_factor=1.0,
        receiver_factor=PLENTY,
        waves=2,
    )
    assert result.fate[0, :, 0].tolist() == [KEPT, KEPT, KEPT, KEPT, SENDER, SENDER]
    assert result.destination[0, :, 0].tolist() == [1, 1, 1, 1, -1, -1]
    assert result.wave[0, :, 0].tolist() == [0, 1, 0, 1, -1, -1]
    assert result.slot[0, :, 0].tolist() == [0, 0, 1, 1, -1, -1]
    assert result.row[0, :, 0].tolist() == [0, 0, 1, 1, -1, -1]
    for array in (result.destination, result.wave, result.slot, result.row):
        assert (array[1] == -1).all()
    assert (result.fate[1] == INVALID).all()


# Four tokens in two sequences of two; every token sends both choices to shard 1 (experts 2 and 3).
# Positions are 0 1 0 1. P = 1.25 * 2 * 4 / 2 = 5 of 8 assignments. The table is the slot of [token][choice].
SLOTS = {
    # flat order: t0k0 t0k1 t1k0 t1k1 t2k0
    "sequence": [[0, 1], [2, 3], [4, -1], [-1, -1]],
    # position 0 first: t0k0 t0k1 t2k0 t2k1, then t1k0
    "position": [[0, 1], [4, -1], [2, 3], [-1, -1]],
    # first choices by position: t0 t2 t1 t3, then the second choice of t0
    "choice": [[0, 4], [2, -1], [1, -1], [3, -1]],
    # 0.9, then the four 0.5 in flat order
    "weight": [[1, 2], [3, 0], [-1, -1], [4, -1]],
}


@pytest.mark.parametrize("order", SLOTS)
def test_sender_order(order):
    result = run(
        [[[2, 3]] * 4, [[0, 1]] * 4],
        weights=[[[0.5, 0.5], [0.5, 0.9], [0.3, 0.4], [0.5, 0.4]], [[0.0, 0.0]] * 4],
        valid=[[True] * 4, [False] * 4],
        num_experts=4,
        sequence_length=2,
        transport="pooled_wave",
        sender_factor=1.25,
        receiver_factor=PLENTY,
        order=order,
    )
    assert result.slot[0].tolist() == SLOTS[order]
    assert ((result.fate[0] == SENDER) == (result.slot[0] == -1)).all()


def test_fixed_cell_ranks_within_the_cell():
    # As above, but each expert has its own cell: C = 1.25 * 8 / 4 = 2.5 -> 3 of 4. By position: t0 t2 t1, t3 dropped.
    # Rows of source 0 start at 0 for local expert 0, and at (1 * 2 + 0) * 3 = 6 for local expert 1.
    common = {"num_experts": 4, "transport": "fixed_cell", "order": "position", "sequence_length": 2}
    result = run([[[2, 3]] * 4, [[0, 1]] * 4], sender_factor=1.25, **common)
    assert result.slot[0].tolist() == [[0, 0], [2, 2], [1, 1], [-1, -1]]
    assert result.row[0].tolist() == [[0, 6], [2, 8], [1, 7], [-1, -1]]
    assert result.destination[0].tolist() == [[1, 1], [1, 1], [1, 1], [-1, -1]]
    # Source 1 sends to shard 0; its rows come after those of source 0.
    assert result.row[1].tolist() == [[3, 9], [5, 11], [4, 10], [-1, -1]]
    # Two waves of ceil(0.8 * 8 / (4 * 2)) = 1 slot: t0 in wave 0, t2 in wave 1.
    result = run([[[2, 3]] * 4, [[0, 1]] * 4], sender_factor=0.8, waves=2, **common)
    assert result.wave[0].tolist() == [[0, 0], [-1, -1], [1, 1], [-1, -1]]


@pytest.mark.parametrize(
    ("policy", "stage"),
    [
        ({"transport": "pooled_wave", "sender_factor": 1.0, "receiver_factor": PLENTY}, SENDER),
        ({"transport": "fixed_cell", "sender_factor": 1.0}, SENDER),
        ({"transport": "pooled_wave", "sender_factor": PLENTY, "receiver_factor": 0.5, "receive": "expert"}, RECEIVER),
        ({"transport": "pooled_wave", "sender_factor": PLENTY, "receiver_factor": 0.5, "receive": "pool"}, RECEIVER),
        ({"transport": "ragged", "receiver_factor": 0.5}, RECEIVER),
    ],
)
def test_limits_count_valid_tokens(policy, stage):
    # One expert per shard; each shard sends all it has to the other. With all 4 tokens valid there is room for
    # 1.0 * 4 / 2 = 0.5 * (4 + 4) / 2 = 2; with 2 of them, for 1, although the buffers have not shrunk.
    ids = [[[1]] * 4, [[0]] * 4]
    half = [[False, True, False, True], [True, False, True, False]]
    assert run(ids, num_experts=2, **policy).fate[0, :, 0].tolist() == [KEPT, KEPT, stage, stage]
    result = run(ids, valid=half, num_experts=2, **policy)
    assert result.fate[0, :, 0].tolist() == [INVALID, KEPT, INVALID, stage]


def test_rows_use_static_expert_capacity():
    # Two experts on one shard, 4 tokens, 1 valid. R = 1.0 * 1 * 4 / 2 = 2 rows per expert in the buffer; expert 1
    # starts at row 2 although its limit is now ceil(1 * 1 / 2) = 1.
    result = run(
        [[[0], [0], [1], [0]]],
        valid=[[False, False, True, False]],
        num_experts=2,
        transport="pooled_wave",
        sender_factor=PLENTY,
        receiver_factor=1.0,
    )
    assert result.row[0, :, 0].tolist() == [-1, -1, 2, -1]


def test_invalid_tokens_are_never_looked_at():
    poison = np.iinfo(np.int32).max
    result = run(
        [[[poison, poison], [0, 1]], [[-5, -5], [1, 0]]],
        weights=[[[np.nan, np.inf], [0.5, 0.5]], [[np.nan, np.nan], [0.5, 0.5]]],
        valid=[[False, True], [False, True]],
        num_experts=2,
        transport="pooled_wave",
        sender_factor=PLENTY,
        receiver_factor=PLENTY,
        order="weight",
    )
    assert result.fate.tolist() == [[[INVALID] * 2, [KEPT] * 2]] * 2


# --- receivers ----------------------------------------------------------------------------------------------------

# All tokens of both shards go to shard 0 (experts 0 and 1), slot = token. Expert 0 hears, slot by slot and source by
# source: s0t0 | s0t1 s1t1 | s1t2 | s0t3 s1t3; expert 1 hears s1t0 | s0t2. R = 1.5 * 8 / 4 = 3.
TO_SHARD_0 = {"ids": [[[0], [0], [1], [0]], [[1], [0], [0], [0]]], "num_experts": 4, "transport": "pooled_wave"}


def test_receive_expert_is_round_robin():
    result = run(**TO_SHARD_0, sender_factor=PLENTY, receiver_factor=1.5, receive="expert")
    assert result.fate[..., 0].tolist() == [[KEPT, KEPT, KEPT, RECEIVER], [KEPT, KEPT, RECEIVER, RECEIVER]]
    assert result.row[..., 0].tolist() == [[0, 1, 3 + 1, -1], [3 + 0, 2, -1, -1]]
    # Dropped rows were sent.
    assert result.slot[..., 0].tolist() == [[0, 1, 2, 3]] * 2
    assert (result.destination == 0).all()


def test_receive_pool_lends_rows():
    # The 2 * 3 rows are shared: fill([6, 2], 6) = [4, 2], so expert 0 keeps one more and expert 1 starts at row 4.
    result = run(**TO_SHARD_0, sender_factor=PLENTY, receiver_factor=1.5, receive="pool")
    assert result.fate[..., 0].tolist() == [[KEPT, KEPT, KEPT, RECEIVER], [KEPT, KEPT, KEPT, RECEIVER]]
    assert result.row[..., 0].tolist() == [[0, 1, 5, -1], [4, 2, 3, -1]]


# --- agreed acceptance: the public two-rank drawing of rowwise EP --------------------------------------------------

# Ten tokens A..J, two shards of two experts, top-2. Shard 0 hosts experts 0 and 1 and is sent
#   expert 0:  B D | F G H        5 rows
#   expert 1:  A B C D E | G I J  8 rows
# and shard 1 is sent 4 + 3 = 7 rows. A factor of 1.2 gives 1.2 * 2 * 10 / 2 = 12 rows a shard.
DRAWING = [
    [[1, 2], [0, 1], [3, 1], [0, 1], [1, 2]],  # A B C D E
    [[2, 0], [0, 1], [3, 0], [1, 3], [1, 2]],  # F G H I J
]


def rows_by_name(result, shard, wave=None):
    """{"A1": row, ...} of the drawing's assignments kept on a shard, letter for the token, digit for the expert."""
    names = {}
    for s, t, k in np.argwhere((result.fate == KEPT) & (result.destination == shard)).tolist():
        if wave is None or result.wave[s, t, k] == wave:
            names["ABCDEFGHIJ"[5 * s + t] + str(DRAWING[s][t][k])] = int(result.row[s, t, k])
    return names


def in_order(*names):
    return {name: row for row, name in enumerate(names)}


def dropped(result):
    assert not (result.fate == SENDER).any()
    return {
        "ABCDEFGHIJ"[5 * s + t] + str(DRAWING[s][t][k]) for s, t, k in np.argwhere(result.fate == RECEIVER).tolist()
    }


AGREED_TRANSPORTS = ("ragged", "rowwise", "ring")


@pytest.mark.parametrize("transport", AGREED_TRANSPORTS)
def test_drawing_round_robin(transport):
    # Expert 0 takes 5 of 12 rows; fill([5, 3], 7) = [4, 3].
    result = run(DRAWING, num_experts=4, transport=transport, receiver_factor=1.2)
    assert dropped(result) == {"E1"}
    expert_0 = ("B0", "D0", "F0", "G0", "H0")
    assert rows_by_name(result, shard=0) == in_order(*expert_0, "A1", "B1", "C1", "D1", "G1", "I1", "J1")
    assert rows_by_name(result, shard=0)["A1"] == 5
    assert rows_by_name(result, shard=1) == in_order("A2", "E2", "F2", "J2", "C3", "H3", "I3")
    assert result.row[0, 4, 0] == -1
    assert result.destination[0, 4, 0] == -1
    assert (result.slot == -1).all()


@pytest.mark.parametrize("transport", AGREED_TRANSPORTS)
def test_drawing_tail(transport):
    # 5 + 5 rows leave 2 for shard 1 at expert 1.
    result = run(DRAWING, num_experts=4, transport=transport, receiver_factor=1.2, agreed="tail")
    assert dropped(result) == {"J1"}
    expert_0 = ("B0", "D0", "F0", "G0", "H0")
    assert rows_by_name(result, shard=0) == in_order(*expert_0, "A1", "B1", "C1", "D1", "E1", "G1", "I1")


@pytest.mark.parametrize(
    ("agreed", "expected"),
    [
        ("tail", {"D1", "E1", "G1", "I1", "J1"}),  # 8 rows: 2 + 3 for expert 0, 3 + 0 for expert 1
        ("round_robin", {"C1", "D1", "E1", "I1", "J1"}),  # 2 + 3, then fill([5, 3], 3) = [2, 1]
        ("water_fill", {"H0", "C1", "D1", "E1", "J1"}),  # fill([5, 8], 8) = [4, 4]: fill([2, 3], 4), fill([5, 3], 4)
    ],
)
def test_drawing_with_eight_rows(agreed, expected):
    result = run(DRAWING, num_experts=4, transport="ragged", receiver_factor=0.8, agreed=agreed)
    assert dropped(result) == expected


@pytest.mark.parametrize("waves", [2, 4])
def test_drawing_in_waves(waves):
    # One expert per wave, 1.2 * 20 / 4 = 6 rows each: expert 0 keeps all 5, expert 1 keeps fill([5, 3], 6) = [3, 3].
    result = run(DRAWING, num_experts=4, transport="ragged", receiver_factor=1.2, waves=waves)
    assert dropped(result) == {"D1", "E1"}
    assert rows_by_name(result, shard=0, wave=0) == in_order("B0", "D0", "F0", "G0", "H0")
    assert rows_by_name(result, shard=0, wave=1) == in_order("A1", "B1", "C1", "G1", "I1", "J1")
    assert result.wave.max() == 1


def test_uneven_waves():
    # Five experts on one shard in two waves: experts 0 1 2, then 3 4. Ten tokens, one expert each, two per expert.
    # With factor 0.5 the pools are 0.5 * 10 * 3 / 5 = 3 and 0.5 * 10 * 2 / 5 = 2 rows.
    ids = [[[0], [1], [2], [3], [4]] * 2]
    result = run(ids, num_experts=5, transport="ragged", receiver_factor=0.5, waves=2)
    assert result.wave[0, :, 0].tolist() == [0, 0, -1, 1, -1, 0, -1, -1, 1, -1]
    assert result.row[0, :, 0].tolist() == [0, 2, -1, 0, -1, 1, -1, -1, 1, -1]


# --- pre-mix, dense ------------------------------------------------------------------------------------------------


def test_premix_spreads_a_shard():
    # Shard 0 sends all 4 tokens to expert 1, shard 1 all to expert 0; P = 1.0 * 4 / 2 = 2, so both lose 2.
    # Dealt over the two shards in turn, each sends two rows to either expert.
    common = {"num_experts": 2, "transport": "pooled_wave", "sender_factor": 1.0, "receiver_factor": PLENTY}
    ids = [[[1]] * 4, [[0]] * 4]
    assert (run(ids, **common).fate == SENDER).sum() == 4
    result = run(ids, premix=2, **common)
    assert (result.fate == KEPT).all()
    assert result.slot[..., 0].tolist() == [[0, 0, 1, 1]] * 2
    assert result.row[..., 0].tolist() == [[0, 1, 2, 3]] * 2


def test_premix_carries_the_position():
    # Everyone wants expert 1 and each mixed shard may send 2 rows. Shard 0 of the mix holds the even tokens of both
    # shards, shard 1 the odd ones; by position the first of each home goes, in the mixed flat order those of home 0.
    common = {"num_experts": 2, "transport": "pooled_wave", "sender_factor": 1.0, "receiver_factor": PLENTY}
    by_position = run([[[1]] * 4] * 2, premix=2, order="position", **common)
    assert by_position.fate[..., 0].tolist() == [[KEPT, KEPT, SENDER, SENDER]] * 2
    in_sequence = run([[[1]] * 4] * 2, premix=2, **common)
    assert in_sequence.fate[..., 0].tolist() == [[KEPT] * 4, [SENDER] * 4]


def test_premix_places():
    # Shards 2 and 3 are the second group of two; the even tokens of both go to shard 2, shard 2's own ones first.
    places = [reference.mixed_place(home, token, 4, premix=2) for home in (2, 3) for token in range(4)]
    assert places == [(2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3)]


def test_dense_keeps_everything_at_home():
    result = run(DRAWING, num_experts=4, transport="dense", sender_factor=0.01, receiver_factor=0.01)
    assert (result.fate == KEPT).all()
    assert result.destination[:, 0, 0].tolist() == [0, 1]


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"), [("transport", "pigeon"), ("order", "random"), ("receive", "tail"), ("waves", 0)]
)
def test_policy_refuses(setting, value):
    with pytest.raises(ValueError, match=f"{setting} = "):
        Policy(**{"transport": "pooled_wave", setting: value})


def test_ring_has_one_wave():
    with pytest.raises(ValueError, match="1 for ring"):
        Policy(transport="ring", waves=2)


@pytest.mark.parametrize("row", [[0, 0], [0, 4], [-1, 0]])
def test_bad_ids_are_refused(row):
    with pytest.raises(ValueError, match="distinct, from 0 to 3"):
        run([[row]], num_experts=4, transport="dense")


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of the 2 shards"):
        run(DRAWING, num_experts=5, transport="dense")
    with pytest.raises(ValueError, match="premix = 2"):
        run(DRAWING, num_experts=4, transport="ring", premix=2)
