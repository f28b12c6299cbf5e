"""Dispatch and combine as linear maps: gradients are exact transposes, and rows nobody wrote have no part in them.

For fixed routes dispatch maps rows x to the experts' buffers, combine maps buffers y and weights w to rows, both
linearly. The identities <Dx, y> = <x, D'y>, <C(y, w), z> = <y, C'z> = <w, C''z> hold to float64 rounding, with drops.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.ep import EPConfig, premix
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.layer import make_transport
from ep_jax.ep.reference import RECEIVER, SENDER
from tests.ep import ep_cases, vmapped

SHAPE = LayerShape(num_shards=4, num_experts=20, experts_per_token=3, tokens=8)
WIDTH = 4
TIGHT = dict(sender_factor=0.9, receiver_factor=0.7)
CASES = [
    EPConfig(**TIGHT, waves=2),
    EPConfig(**TIGHT, waves=3, order="weight", receive="pool"),
    EPConfig(**TIGHT, order="choice", premix=2),
    EPConfig(**TIGHT, slots="token", order="weight", receive="pool", waves=2),
    EPConfig(transport="fixed_cell", **TIGHT, waves=2),
    EPConfig(transport="ragged", **TIGHT, waves=2, updates_per_cell=3),
    EPConfig(transport="rowwise", **TIGHT, waves=2, agreed="tail"),
    EPConfig(transport="ring", **TIGHT, agreed="water_fill", premix=4),
    EPConfig(transport="dense"),
]


def case_name(settings: EPConfig) -> str:
    return f"{settings.transport}-{settings.slots}-W{settings.waves}-g{settings.premix}"


@pytest.fixture(autouse=True)
def exact_on_one_device(monkeypatch):
    vmapped.patch(monkeypatch)
    with jax.enable_x64(True):
        yield


def mixed(group, weights, rows, routes_of):
    """(rows, routes) of the mixed shard."""
    return premix.mix(rows, routes_of(weights), group) if group > 1 else (rows, routes_of(weights))


def dispatch(settings, ids, weights, valid, rows):
    """The experts' buffers, by wave."""
    transport, group = make_transport(settings, SHAPE), vmapped.group_of(settings)
    rows, routes = mixed(group, weights, rows, lambda w: vmapped.local_routes(ids, w, valid))
    return vmapped.received_by(transport, rows, transport.plan(routes))[0]


def combine(settings, ids, order_weights, valid, buffers, weights):
    """Combined rows; ranks by `order_weights`, so that the result is linear in `weights`."""
    transport, group = make_transport(settings, SHAPE), vmapped.group_of(settings)
    zeros = jnp.zeros((SHAPE.tokens, WIDTH))
    if settings.slots == "token" or settings.transport == "dense":  # experts weight; ranks have no derivative
        order_weights = weights
    rows, routes = mixed(group, order_weights, zeros, lambda w: vmapped.local_routes(ids, w, valid))
    if group > 1:
        weights = premix._swap(weights, group)
    plan = transport.plan(routes)
    arrivals = vmapped.received_by(transport, rows, plan)[2]
    out, _ = vmapped.returned_from(transport, SHAPE, buffers, arrivals, plan, weights)
    return premix.unmix(out, group) if group > 1 else out


@functools.cache
def maps(settings):
    """Jitted over all shards: D, and (C, C'z, C''z, D'y)."""

    def transposes(ids, w, valid, x, y, z):
        out, pull_home = jax.vjp(functools.partial(combine, settings, ids, w, valid), y, w)
        _, pull_forth = jax.vjp(functools.partial(dispatch, settings, ids, w, valid), x)
        return out, *pull_home(z), *pull_forth(y)

    return vmapped.over_shards(functools.partial(dispatch, settings), SHAPE), vmapped.over_shards(transposes, SHAPE)


@functools.cache
def given(settings, seed=0):
    """(routes, x, y, z, which rows of the buffers hold a token)."""
    ids, weights, valid = vmapped.draw_routes(seed, SHAPE)
    weights = weights.astype(np.float64)
    rng = np.random.default_rng(seed)
    fate = vmapped.oracle_of(SHAPE, settings, ids, weights, valid).fate
    assert settings.transport == "dense" or np.isin(fate, (SENDER, RECEIVER)).any()
    x, z = (rng.normal(size=(*valid.shape, WIDTH)) for _ in range(2))
    written = [np.asarray(b)[..., 0] != 0 for b in maps(settings)[0](ids, weights, valid, np.ones_like(x))]
    y = tuple(rng.normal(size=(*w.shape, WIDTH)) for w in written)
    return (ids, weights, valid), x, y, z, written


def inner(first, second) -> float:
    return sum(float(np.sum(np.asarray(a) * np.asarray(b))) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("settings", CASES, ids=case_name)
def test_gradients_are_the_transposes(settings):
    routes, x, y, z, _ = given(settings)
    forth, transposes = maps(settings)
    out, back_y, back_w, back_x = transposes(*routes, x, y, z)
    assert inner(forth(*routes, x), y) == pytest.approx(inner([x], [back_x]), rel=1e-12)
    assert inner([out], [z]) == pytest.approx(inner(y, back_y), rel=1e-12)
    assert inner([out], [z]) == pytest.approx(inner([routes[1]], [back_w]), rel=1e-12)
    assert abs(inner([out], [z])) > 0.1


def spoiled(rows, written):
    """Garbage in the rows [...,H] that are not `written`."""
    kind = np.arange(written.size).reshape(*written.shape, 1) % 3
    return np.where(written[..., None], rows, np.choose(kind, [np.nan, 1e30, -np.inf]))


@pytest.mark.parametrize("settings", CASES, ids=case_name)
def test_rows_nobody_wrote_have_no_part(settings):
    """Whatever experts leave in them, forward and backward, and whatever invalid tokens contain."""
    routes, x, y, z, written = given(settings)
    _, transposes = maps(settings)
    clean = transposes(*routes, x, y, z)
    poisoned_y = tuple(spoiled(rows, held) for rows, held in zip(y, written, strict=True))
    assert any(np.isnan(rows).any() for rows in poisoned_y)
    poisoned = transposes(*routes, spoiled(x, routes[2]), poisoned_y, z)
    ep_cases.check_same_bits(clean, poisoned)
    for gradient, held in zip(poisoned[1], written, strict=True):
        assert (np.asarray(gradient)[~held] == 0).all()


@pytest.mark.parametrize("settings", CASES, ids=case_name)
def test_invalid_tokens_move_nothing(settings):
    routes, x, _, _, written = given(settings)
    forth, _ = maps(settings)
    ep_cases.check_same_bits(forth(*routes, x), forth(*routes, spoiled(x, routes[2])))
    nobody = np.zeros_like(routes[2])
    assert all((np.asarray(rows) == 0).all() for rows in forth(routes[0], routes[1], nobody, spoiled(x, nobody)))
