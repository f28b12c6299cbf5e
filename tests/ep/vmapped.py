"""A whole ep group on one device: transports under a named vmap axis, where an exchange is a transpose.

Experts are left out: rows go to their experts, and the same rows, or others, come back. So everything here is a pure
function of routes, compiled once per (shape, settings).

Letters: S shards, T tokens per shard, K choices, E experts, N rows of a wave's buffer, H width.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ep_jax.ep import EPConfig, premix, ragged, reference
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.drops import fates
from ep_jax.ep.experts import RaggedRows
from ep_jax.ep.layer import make_transport
from ep_jax.ep.routes import Routes
from tests.ep import ep_cases

LENGTH = 4  # tokens of a sequence


class Trip(NamedTuple):
    """What became of rows [S,T,H] and their routes; arrays have a leading S."""

    received: tuple[jax.Array, ...]  # by wave: the buffer [S,N,H] of each shard's experts
    sizes: tuple[jax.Array, ...]  # by wave: rows per expert [S, experts], empty [S,0] where each has its own rows
    fate: jax.Array  # int8 [S,T,K], at the original places
    out: jax.Array  # [S,T,H]: weighted sums of what came back


def patch(monkeypatch) -> None:
    """Replaces the two collectives that have no batching rule by others that give the same."""
    monkeypatch.setattr(ragged, "_ragged_all_to_all", ragged._emulated)
    monkeypatch.setattr(premix, "_all_to_all", _grouped_all_to_all)


def _grouped_all_to_all(blocks, group):
    """Block j of each member to member j, out of an all-gather of everything."""
    me = lax.axis_index("ep")
    of_group = lax.dynamic_slice_in_dim(lax.all_gather(blocks, "ep"), me - me % group, group)
    return lax.dynamic_index_in_dim(of_group, me % group, axis=1, keepdims=False)


def group_of(settings: EPConfig) -> int:
    return settings.premix if "premix" in settings.used else 1


def received_by(transport, rows, plan):
    """(buffers, sizes, what the way back needs: a wave's weights of rows and its arrival) of all waves of one shard."""
    buffers, sizes, arrivals = [], [], []
    for wave in range(transport.waves):
        held, arrival = transport.dispatch(rows, plan, wave, 0)
        ragged_rows = isinstance(held, RaggedRows)
        buffers.append(held.rows_NH if ragged_rows else held.rows_eRH.reshape(-1, rows.shape[1]))
        sizes.append(held.sizes_e if ragged_rows else jnp.zeros(0, jnp.int32))
        weights = held.weights_N if ragged_rows else held.weights_eR
        arrivals.append((None if weights is None else weights.reshape(-1, 1), arrival))
    return tuple(buffers), tuple(sizes), arrivals


def returned_from(transport, shape: LayerShape, buffers, arrivals, plan, weights):
    """(combined rows, accepted) of one shard, from its experts' results before they weighted any."""
    fixed = transport.settings.transport == "fixed_cell"
    weighted = [b if w is None else w * b for b, (w, _) in zip(buffers, arrivals, strict=True)]
    by_expert = [b.reshape(shape.local_experts, -1, b.shape[1]) if fixed else b for b in weighted]
    back = [transport.give_back(b, arrival) for b, (_, arrival) in zip(by_expert, arrivals, strict=True)]
    accepted = transport.accepted(back, plan)
    return transport.combine(back, weights, accepted, plan), accepted


def local_routes(ids, weights, valid) -> Routes:
    return Routes(ids, weights, valid, lax.psum(jnp.sum(valid, dtype=jnp.int32), "ep"), LENGTH)


def over_shards(local, shape: LayerShape):
    return jax.jit(jax.vmap(local, axis_name="ep", axis_size=shape.num_shards), compiler_options=ep_cases.QUICK)


@functools.cache
def trip(shape: LayerShape, settings: EPConfig):
    """Jitted (ids [S,T,K], weights, valid [S,T], rows [S,T,H]) -> Trip."""
    transport, group = make_transport(settings, shape), group_of(settings)

    def local(ids, weights, valid, rows):
        routes = local_routes(ids, weights, valid)
        if group > 1:
            rows, routes = premix.mix(rows, routes, group)
        plan = transport.plan(routes)
        buffers, sizes, arrivals = received_by(transport, rows, plan)
        out, accepted = returned_from(transport, shape, buffers, arrivals, plan, routes.weights_TK)
        fate = fates(routes.valid_T, plan.sent_TK, accepted)
        if group > 1:
            out, fate = premix.unmix(out, group), premix.unmix(fate, group)
        return Trip(buffers, sizes, fate, out)

    return over_shards(local, shape)


def draw_routes(seed: int, shape: LayerShape, skew: float = 2.0, documents: bool = False):
    """Skewed ids [S,T,K], distinct weights, and valid [S,T]; the last shard of several has no valid token."""
    rng = np.random.default_rng(seed)
    size = (shape.num_shards, shape.tokens, shape.num_experts)
    scores = rng.gumbel(size=size) + rng.gumbel(size=shape.num_experts) * skew
    if documents:  # each shard has a taste of its own
        scores += rng.gumbel(size=(shape.num_shards, 1, shape.num_experts)) * skew
    ids = np.argsort(-scores, axis=-1)[..., : shape.experts_per_token].astype(np.int32)
    weights = rng.permutation(ids.size).reshape(ids.shape).astype(np.float32) / ids.size + 0.125
    valid = rng.random(ids.shape[:2]) < 0.85
    if shape.num_shards > 1:
        valid[-1] = False
    return ids, weights, valid


def fates_of(shape: LayerShape, settings: EPConfig, ids, weights, valid) -> np.ndarray:
    """Fates [S,T,K] by the implementation."""
    rows = np.zeros((*valid.shape, 1), np.float32)
    return np.asarray(trip(shape, settings)(ids, weights, valid, rows).fate)


def oracle_of(shape: LayerShape, settings: EPConfig, ids, weights, valid) -> reference.Fates:
    policy = ep_cases.policy_of(settings)
    return reference.fates(ids, weights, valid, num_experts=shape.num_experts, sequence_length=LENGTH, policy=policy)
