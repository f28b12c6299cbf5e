"""The oracle against what holds for every policy, and its gradients against finite differences.

Nothing here is computed by the code it judges.
"""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from ep_jax.ep import reference, reference_values
from ep_jax.ep.reference import INVALID, KEPT, RECEIVER, SENDER, Policy

PLENTY = 1000.0
ORDERS = ("sequence", "position", "choice", "weight")
AGREED_TRANSPORTS = ("ragged", "rowwise", "ring")

# --- properties of every policy -------------------------------------------------------------------------------------

LEGAL = (
    [
        {"transport": "pooled_wave", "order": order, "receive": receive, "waves": waves, "premix": premix}
        for order, receive, waves, premix in itertools.product(ORDERS, ("expert", "pool"), (1, 3), (1, 2))
    ]
    + [
        {"transport": "pooled_wave", "slots": "token", "order": order, "receive": receive, "waves": waves}
        for order, receive, waves in itertools.product(ORDERS, ("expert", "pool"), (1, 3))
    ]
    + [{"transport": "fixed_cell", "order": order, "waves": waves} for order in ORDERS for waves in (1, 2)]
    + [
        {"transport": transport, "agreed": agreed, "waves": waves, "premix": premix}
        for transport in AGREED_TRANSPORTS
        for agreed in ("tail", "round_robin", "water_fill")
        for waves in ((1, 2) if transport != "ring" else (1,))
        for premix in (1, 2)
    ]
    + [{"transport": "dense"}]
)
FACTORS = st.sampled_from([0.3, 0.75, 1.0, 1.15])


def routing(seed, shards, tokens, choices, experts):
    """Skewed random routes: ids [S,T,K], float32 weights with ties, and valid [S,T]."""
    rng = np.random.default_rng(seed)
    popularity = rng.gumbel(size=experts) * 2
    ids = np.argsort(-(popularity + rng.gumbel(size=(shards, tokens, experts))), axis=-1)[..., :choices]
    weights = rng.integers(1, 9, ids.shape).astype(np.float32) / 8
    return ids, weights, rng.random((shards, tokens)) < 0.8


@pytest.mark.parametrize("policy", LEGAL, ids=lambda policy: "-".join(map(str, policy.values())))
@hypothesis.settings(max_examples=8)
@hypothesis.given(seed=st.integers(0, 2**31), sender_factor=FACTORS, receiver_factor=FACTORS)
def test_every_assignment_has_one_fate_and_one_row(policy, seed, sender_factor, receiver_factor):
    shards, tokens, choices, experts = 4, 6, 3, 12
    ids, weights, valid = routing(seed, shards, tokens, choices, experts)
    policy = Policy(sender_factor=sender_factor, receiver_factor=receiver_factor, **policy)
    result = reference.fates(ids, weights, valid, num_experts=experts, sequence_length=3, policy=policy)
    kept = result.fate == KEPT

    assert ((result.fate == INVALID) == ~valid[..., None]).all()
    report = reference.counts(result, ids, weights, num_experts=experts)
    kept_SE, valid_SE = np.zeros((2, shards, experts), np.int64)
    for s, t, k in np.ndindex(ids.shape):
        valid_SE[s, ids[s, t, k]] += valid[s, t]
        kept_SE[s, ids[s, t, k]] += kept[s, t, k]
    np.testing.assert_array_equal(report.valid, valid_SE)
    np.testing.assert_array_equal(report.valid, kept_SE + report.sender + report.receiver)
    all_weight = weights[valid].sum() or 1.0
    assert report.lost_sender == pytest.approx(weights[result.fate == SENDER].sum() / all_weight)
    assert report.lost_receiver == pytest.approx(weights[result.fate == RECEIVER].sum() / all_weight)

    if policy.transport == "dense":
        assert (kept == valid[..., None]).all()
        return
    assert ((result.row >= 0) == kept).all()
    assert (result.destination[kept] == ids[kept] // (experts // shards)).all()
    assert result.wave.max() < policy.waves
    places = list(zip(result.destination[kept], result.wave[kept], result.row[kept], strict=True))
    assert len(set(places)) == len(places)
    assert policy.transport not in AGREED_TRANSPORTS or not (result.fate == SENDER).any()
    assert policy.transport != "fixed_cell" or not (result.fate == RECEIVER).any()
    if policy.premix == 1:
        # Among those the sender let through, each cell keeps a prefix: by slot in its wave, or in flat order.
        passed = [tuple(index) for index in np.argwhere((result.fate == KEPT) | (result.fate == RECEIVER)).tolist()]
        pooled = policy.transport == "pooled_wave"
        for _, cell in itertools.groupby(
            sorted((i[0], ids[i], result.wave[i] if pooled else 0, result.slot[i], *i[1:]) for i in passed),
            key=lambda entry: entry[:3],
        ):
            kept_in_order = [kept[entry[0], entry[-2], entry[-1]] for entry in cell]
            assert kept_in_order == sorted(kept_in_order, reverse=True)
    if policy.transport in AGREED_TRANSPORTS or (policy.transport == "pooled_wave" and policy.receive == "pool"):
        # Dense rows: 0..n-1 of each wave, and expert-contiguous.
        for wave in {place[:2] for place in places}:
            here = kept & (result.destination == wave[0]) & (result.wave == wave[1])
            by_row = np.argsort(result.row[here])
            assert result.row[here][by_row].tolist() == list(range(here.sum()))
            assert (np.diff(ids[here][by_row]) >= 0).all()


@pytest.mark.parametrize("policy", LEGAL, ids=lambda policy: "-".join(map(str, policy.values())))
def test_enough_capacity_drops_nothing(policy):
    for seed in range(4):
        ids, weights, valid = routing(seed, 4, 6, 3, 12)
        policy_ = Policy(sender_factor=PLENTY, receiver_factor=PLENTY, **policy)
        result = reference.fates(ids, weights, valid, num_experts=12, sequence_length=3, policy=policy_)
        assert (result.fate[valid] == KEPT).all()


def test_forced_drops_happen_at_both_stages():
    # What the properties above rest on: the routes they draw do overflow.
    ids, weights, valid = routing(0, 4, 6, 3, 12)
    policy = Policy(transport="pooled_wave", sender_factor=0.75, receiver_factor=0.75)
    result = reference.fates(ids, weights, valid, num_experts=12, sequence_length=3, policy=policy)
    assert set(np.unique(result.fate)) == {KEPT, SENDER, RECEIVER, INVALID}


# --- values and gradients -------------------------------------------------------------------------------------------


def problem(seed=1, shards=2, tokens=6, choices=3, experts=6, width=3, hidden=2):
    """Keyword arguments of `forward`, without policy; the values of invalid tokens are poison."""
    rng = np.random.default_rng(seed)
    ids, weights, valid = routing(seed, shards, tokens, choices, experts)
    valid[0, 1] = False
    rows = rng.normal(size=(shards, tokens, width))
    rows[~valid] = np.nan
    return {
        "rows": rows,
        "expert_ids": ids,
        "weights": weights.astype(np.float64) + rng.random(weights.shape),
        "valid": valid,
        "w_gate_up": rng.normal(size=(experts, width, 2 * hidden)),
        "w_down": rng.normal(size=(experts, hidden, width)),
        "sequence_length": 2,
    }


def expert_output(arguments, s, t, k):
    """SwiGLU of one row, written down once more with exp."""
    gate, up = np.split(arguments["rows"][s, t] @ arguments["w_gate_up"][arguments["expert_ids"][s, t, k]], 2)
    return gate / (1 + np.exp(-gate)) * up @ arguments["w_down"][arguments["expert_ids"][s, t, k]]


def test_forward_sums_survivors_and_rescales():
    # One shard, V = 3, so each expert has 0.6 * 2 * 3 / 4 = 0.9 -> 1 row. Token 0 keeps both choices; token 1 loses
    # expert 0 and keeps expert 2 with weight 0.75 of 1; token 2 loses both; token 3 is invalid.
    arguments = problem(shards=1, tokens=4, choices=2, experts=4) | {
        "expert_ids": np.array([[[0, 1], [0, 2], [1, 0], [0, 0]]]),
        "weights": np.array([[[0.5, 0.5], [0.25, 0.75], [0.5, 0.5], [1.0, 1.0]]]),
        "valid": np.array([[True, True, True, False]]),
        "rows": np.random.default_rng(0).normal(size=(1, 4, 3)),
    }
    settings = {"transport": "pooled_wave", "sender_factor": PLENTY, "receiver_factor": 0.6}
    both = 0.5 * expert_output(arguments, 0, 0, 0) + 0.5 * expert_output(arguments, 0, 0, 1)
    one = expert_output(arguments, 0, 1, 1)

    out, result = reference_values.forward(**arguments, policy=Policy(**settings))
    assert result.fate.tolist() == [[[KEPT, KEPT], [RECEIVER, KEPT], [RECEIVER, RECEIVER], [INVALID, INVALID]]]
    np.testing.assert_allclose(out, [[both, 0.75 * one, np.zeros(3), np.zeros(3)]], rtol=1e-12, atol=0)
    report = reference.counts(result, arguments["expert_ids"], arguments["weights"], num_experts=4)
    assert (report.lost_sender, report.lost_receiver) == (0.0, pytest.approx(1.25 / 3))
    assert report.valid.tolist() == [[3, 2, 1, 0]]
    assert report.receiver.tolist() == [[2, 1, 0, 0]]

    out, _ = reference_values.forward(**arguments, policy=Policy(**settings, rescale=True))
    np.testing.assert_allclose(out, [[both, one, np.zeros(3), np.zeros(3)]], rtol=1e-12, atol=0)


def test_survivors_of_weight_zero_stay_zero_when_rescaled():
    arguments = problem(shards=1, tokens=2, choices=2, experts=4) | {
        "expert_ids": np.array([[[0, 1], [0, 2]]]),
        "weights": np.array([[[0.5, 0.5], [1.0, 0.0]]]),
        "valid": np.ones((1, 2), bool),
        "rows": np.ones((1, 2, 3)),
    }
    policy = Policy(transport="pooled_wave", sender_factor=PLENTY, receiver_factor=0.6, rescale=True)
    out, result = reference_values.forward(**arguments, policy=policy)
    assert result.fate[0, 1].tolist() == [RECEIVER, KEPT]
    assert (out[0, 1] == 0).all()
    gradients = reference_values.gradients(**arguments, d_out=np.ones_like(out), policy=policy)
    assert (gradients["weights"][0, 0] != 0).all()
    assert (gradients["weights"][0, 1] == 0).all()
    assert (gradients["rows"][0, 1] == 0).all()


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "pooled_wave", "sender_factor": 0.9, "receiver_factor": 0.9},
        {"transport": "fixed_cell", "sender_factor": 0.8},
        {"transport": "ragged", "receiver_factor": 0.8, "waves": 2},
    ],
    ids=lambda settings: settings["transport"],
)
def test_gradients_are_finite_differences(settings, rescale):
    arguments = problem()
    policy = Policy(**settings, rescale=rescale)
    out, result = reference_values.forward(**arguments, policy=policy)
    kept, valid = result.fate == KEPT, arguments["valid"]
    assert (kept.any(-1) & ~kept.all(-1) & valid).any(), "no token lost only a part of its choices"
    assert np.isfinite(out).all()

    d_out = np.random.default_rng(2).normal(size=out.shape)
    d_out[~valid] = np.nan
    gradients = reference_values.gradients(**arguments, d_out=d_out, policy=policy)

    def loss(name, index, shift):
        moved = arguments[name].copy()
        moved[index] += shift
        out, _ = reference_values.forward(**arguments | {name: moved}, policy=policy)
        return (out[valid] * d_out[valid]).sum()

    step = 1e-5
    for name, gradient in gradients.items():
        assert gradient.shape == arguments[name].shape
        assert gradient.dtype == np.float64
        numeric = np.zeros_like(gradient)
        for index in np.ndindex(gradient.shape):
            numeric[index] = (loss(name, index, step) - loss(name, index, -step)) / (2 * step)
        np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-8, err_msg=name)
