"""Faults that other expert-parallel layers had: padding that takes slots, counts in bfloat16, sums in bfloat16, shapes
that are cut to fit. Each test fails if ours has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.ep import EPConfig, check_routes, routed_experts
from ep_jax.ep.reference import INVALID, RECEIVER, SENDER
from ep_jax.ep.rows import combine_rows, move_rows
from ep_jax.ep.settings import TRANSPORTS
from ep_jax.fields import ConfigError
from tests.ep import ep_cases
from tests.ep.ep_cases import Sizes, mesh_of, problem


def layer(rows, ids, weights, valid, w_gate_up, w_down, *, mesh=(1, 1, 8), sequence_length=8, **settings):
    return routed_experts(
        rows,
        ids,
        weights,
        valid,
        w_gate_up,
        w_down,
        sequence_length=sequence_length,
        mesh=mesh_of(*mesh),
        settings=EPConfig(**settings),
    )


# --- padding ----------------------------------------------------------------------------------------------------------


def with_padding(array, filler):
    """[8 sequences of 16, ...] -> [8 sequences of 32, ...], the second half of each is `filler`."""
    halves = array.reshape(8, 16, *array.shape[1:])
    return np.concatenate([halves, np.full_like(halves, filler)], axis=1).reshape(-1, *array.shape[1:])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_padding_changes_nothing_whatever_it_contains(transport):
    sizes = Sizes(tokens=16, sequence_length=16, choices=2, experts=8)
    given = problem(ep_cases.uniform, sizes)

    @functools.partial(jax.jit, compiler_options=ep_cases.QUICK)
    def run(rows, weights, w_gate_up, w_down, ids, valid, d_out):
        def loss(rows, weights, w_gate_up, w_down):
            out, report = layer(
                *(rows, ids, weights, valid, w_gate_up, w_down),
                sequence_length=len(rows) // 8,
                transport=transport,
                sender_factor=1.0,
                receiver_factor=0.9,
                rescale=transport == "ragged",
            )
            return jnp.sum(jnp.where(valid[:, None], out * d_out, 0)), (out, report)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(rows, weights, w_gate_up, w_down)

    weights = (given.w_gate_up, given.w_down)
    (loss, (out, report)), grads = run(given.rows, given.extra_weights, *weights, given.ids, given.valid, given.d_out)
    (padded_loss, (padded_out, padded_report)), padded_grads = run(
        with_padding(given.rows, np.nan),
        with_padding(given.extra_weights, np.nan),
        *weights,
        with_padding(given.ids, 10**6),
        with_padding(given.valid, False),
        with_padding(given.d_out, np.nan),
    )

    real = with_padding(given.valid, False)
    np.testing.assert_array_equal(np.asarray(padded_report.fate_TK)[real], report.fate_TK)
    assert (np.asarray(padded_report.fate_TK)[~real] == INVALID).all()
    np.testing.assert_array_equal(padded_report.counts_PE, report.counts_PE)
    assert int(padded_report.valid) == 256
    if transport != "dense":
        assert int(report.sender + report.receiver) > 0
    np.testing.assert_allclose(padded_report.weights_P, report.weights_P, rtol=1e-6)
    np.testing.assert_allclose(padded_loss, loss, rtol=1e-5)
    for padded, wanted in ((padded_out, out), *zip(padded_grads[:2], grads[:2], strict=True)):
        ep_cases.check_close("valid positions", np.asarray(padded)[real], wanted, 1e-5)
        assert (np.asarray(padded)[~real] == 0.0).all()
    for padded, wanted in zip(padded_grads[2:], grads[2:], strict=True):
        ep_cases.check_close("expert gradients", padded, wanted, 1e-5)


# --- one side limited -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sender", "receiver", "clean"), [(8.0, 0.5, SENDER), (0.5, 8.0, RECEIVER)])
def test_drops_carry_the_name_of_their_stage(sender, receiver, clean):
    sizes = Sizes(choices=2, experts=8)
    given = problem(ep_cases.uniform, sizes)
    arguments = (given.rows, given.ids, given.extra_weights, given.valid, given.w_gate_up, given.w_down)
    quick = functools.partial(jax.jit, compiler_options=ep_cases.QUICK)
    run = quick(lambda *arguments: layer(*arguments, sender_factor=sender, receiver_factor=receiver)[1])
    report = run(*arguments)
    counts = {SENDER: int(report.sender), RECEIVER: int(report.receiver)}
    assert counts.pop(clean) == 0
    (dropped,) = counts.values()
    assert dropped > 0
    assert int(report.valid) == given.ids.size
    assert float(report.drop_rate) == pytest.approx(dropped / given.ids.size, rel=1e-6)


# --- number formats ---------------------------------------------------------------------------------------------------


def test_counts_beyond_256_are_exact_in_a_bfloat16_layer():
    sizes = Sizes(tokens=600, choices=1, experts=8)
    given = problem(ep_cases.uniform, sizes, dtype=jnp.bfloat16)
    ids = np.zeros_like(given.ids)
    run = jax.jit(lambda *arguments: layer(*arguments, mesh=(1, 8, 1), sender_factor=8.0, receiver_factor=8.0)[1])
    report = run(given.rows, ids, given.extra_weights, given.valid, given.w_gate_up, given.w_down)
    assert report.counts_PE.dtype == jnp.int32
    assert report.counts_PE.tolist() == [[4800] + [0] * 7, [0] * 8, [0] * 8]
    assert report.source_counts_DP.tolist() == [[600, 0, 0]] * 8


@pytest.mark.parametrize("ones", [False, True])
def test_combine_sums_bfloat16_rows_in_float32(ones):
    rng, (tokens, width, choices) = np.random.default_rng(0), (512, 1024, 8)
    rows = jnp.asarray(rng.normal(size=(tokens * choices, width)), jnp.bfloat16)
    weights = np.ones((tokens, choices), np.float32) if ones else rng.random((tokens, choices)).astype(np.float32)
    place = np.arange(tokens * choices, dtype=np.int32)
    found = np.asarray(
        jax.jit(combine_rows, static_argnums=4)(rows, weights, place.reshape(tokens, choices), place, rows.dtype)
    )
    exact = np.einsum(
        "tk,tkh->th", weights.astype(np.float64), np.asarray(rows, np.float64).reshape(tokens, choices, -1)
    )
    wanted = exact.astype(jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    ulps = np.abs(found.view(np.int16).astype(int) - wanted.view(np.int16).astype(int))
    assert ulps.max() <= 1
    assert (ulps > 0).mean() <= (0 if ones else 1e-3)


def test_gradient_of_a_row_sums_its_choices_in_float32():
    # 256 + 1 + 1 is 258 in float32; in bfloat16 each 1 would vanish.
    rows, source = jnp.zeros((1, 4), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    places = jnp.arange(3, dtype=jnp.int32)[None]
    _, pull = jax.vjp(lambda rows: move_rows(rows, source, places), rows)
    (gradient,) = pull(jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16) * jnp.ones((3, 4), jnp.bfloat16))
    assert gradient.tolist() == [[258.0] * 4]


# --- shapes that do not fit -------------------------------------------------------------------------------------------


def good_call(tokens=128, choices=2, experts=8, width=8, hidden=6):
    return {
        "rows": jnp.zeros((tokens, width)),
        "ids": jnp.zeros((tokens, choices), jnp.int32) + jnp.arange(choices, dtype=jnp.int32)[None],
        "weights": jnp.zeros((tokens, choices)),
        "valid": jnp.ones(tokens, bool),
        "w_gate_up": jnp.zeros((experts, width, 2 * hidden)),
        "w_down": jnp.zeros((experts, hidden, width)),
    }


@pytest.mark.parametrize(
    ("call", "mesh", "message"),
    [
        (good_call() | {"premix": 3}, (1, 1, 8), r"ep.premix = 3: must divide the mesh's ep = 8"),
        (good_call(experts=6), (1, 2, 4), r"6 experts: .* ep = 4"),
        (good_call(tokens=120), (1, 1, 8), r"120 tokens: a multiple of 8 shards x sequence_length 8"),
        (good_call(choices=3, experts=2), (1, 4, 2), r"3 choices per token: at most 2 experts"),
        (good_call() | {"weights": jnp.zeros((128, 3))}, (1, 1, 8), r"combine_weights_TK .*\(128, 3\): .*\(128, 2\)"),
        (good_call() | {"valid": jnp.ones(64, bool)}, (1, 1, 8), r"valid_T .*\(64,\): expected \(128,\)"),
        (good_call() | {"valid": jnp.ones(128)}, (1, 1, 8), r"valid_T is float32: expected bool"),
        (good_call() | {"ids": jnp.zeros((128, 2))}, (1, 1, 8), r"expert_ids_TK is float32: expected int32"),
        (good_call() | {"w_down": jnp.zeros((8, 6, 7))}, (1, 1, 8), r"w_down_EFH .*\(8, 6, 7\): expected \(8, 6, 8\)"),
        (good_call() | {"w_gate_up": jnp.zeros((8, 8, 6))}, (1, 1, 8), r"w_gate_up_EH2F .*expected \(8, 8, 12\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_in_one_line(call, mesh, message):
    with pytest.raises(ConfigError, match=message) as error:
        layer(**call, mesh=mesh)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("row", [[0, 8], [-1, 0], [3, 3]])
def test_ids_that_no_expert_has_are_refused(row):
    call = good_call()
    call["ids"] = call["ids"].at[17].set(jnp.array(row))
    with pytest.raises(ConfigError, match=r"expert_ids_TK of token 17 = \[.*\]: allowed are distinct ids from 0 to 7"):
        layer(**call)
    # An invalid token's ids are never looked at, and inside jit nobody can look.
    call["valid"] = call["valid"].at[17].set(False)
    check_routes(call["ids"], call["valid"], 8)
    with pytest.raises(ConfigError, match="token 17"):
        check_routes(np.asarray(call["ids"]), np.ones(128, bool), 8)


def test_a_mesh_without_ep_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    arguments = list(good_call().values())
    with pytest.raises(ConfigError, match=r"mesh axes \('data',\): an axis named ep is needed"):
        routed_experts(*arguments, sequence_length=8, mesh=mesh, settings=EPConfig())


def test_a_mesh_with_only_ep_gives_the_same():
    given = problem(ep_cases.uniform, Sizes(choices=2, experts=8))
    arguments = (given.rows, given.ids, given.extra_weights, given.valid, given.w_gate_up, given.w_down)
    alone = jax.make_mesh((8,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    results = [
        jax.jit(lambda *a, mesh=mesh: routed_experts(*a, sequence_length=8, mesh=mesh, settings=EPConfig()))(*arguments)
        for mesh in (alone, mesh_of(1, 1, 8))
    ]
    ep_cases.check_same_bits(*results)
