"""Garbage in rows that nobody wrote, in the whole layer with experts: nothing of it reaches a result or a gradient.

`test_adjoint` does the same at the edges of every transport; here the garbage is inside, where slots, receive buffers
and the tail of a grouped matmul are.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.ep import EPConfig, experts, payload, pooled_tokens, ragged
from tests.ep import ep_cases
from tests.ep.ep_cases import Sizes, mesh_of, problem

SIZES = Sizes()


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
    pack, unpack = payload.Layout.pack, payload.Layout.unpack

    def written(layout, numbers):
        return layout.by_row(jnp.where(numbers > 0, 1, -1)) > 0

    def spoiled_pack(layout, numbers, rows):
        packed = pack(layout, numbers, spoil(rows, written(layout, numbers)))
        used = layout.slots * payload.lanes_per_slot(layout.largest)
        lane = jnp.arange(layout.header * layout.width).reshape(1, layout.header, layout.width)
        lanes = jnp.where(lane < used, packed[:, : layout.header], garbage(packed[:, : layout.header]))
        return jnp.concatenate([lanes, packed[:, layout.header :]], axis=1)

    def spoiled_unpack(layout, received):
        numbers, rows = unpack(layout, received)
        return numbers, spoil(rows, written(layout, numbers))

    monkeypatch.setattr(payload.Layout, "pack", spoiled_pack)
    monkeypatch.setattr(payload.Layout, "unpack", spoiled_unpack)


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


def spoil_tails(monkeypatch):
    """The grouped matmul alone: `rowwise`, `ring` and a pooled receiver have buffers of their own."""
    monkeypatch.setattr(experts, "lax", types.SimpleNamespace(ragged_dot=sloppy_ragged_dot))


def spoil_slots_and_tails(monkeypatch):
    spoil_slots(monkeypatch)
    spoil_tails(monkeypatch)


def spoil_tokens(monkeypatch):
    """Slots of tokens go out without a header: garbage in the empty ones and in rows that no expert owns, too."""
    spoil_slots_and_tails(monkeypatch)
    move = pooled_tokens.move_rows
    monkeypatch.setattr(
        pooled_tokens, "move_rows", lambda rows, source, places: spoil(move(rows, source, places), source >= 0)
    )


POOLED_TIGHT = EPConfig(sender_factor=1.15, receiver_factor=0.5, waves=2)
POOL_TIGHT = EPConfig(sender_factor=1.15, receiver_factor=0.5, receive="pool", order="choice", premix=2)
TOKENS_TIGHT = EPConfig(sender_factor=0.9, receiver_factor=0.5, slots="token", receive="pool", waves=2)
RAGGED_TIGHT = EPConfig(transport="ragged", receiver_factor=0.5, waves=2)
ROWWISE_TIGHT = EPConfig(transport="rowwise", receiver_factor=0.5, agreed="tail")
RING_TIGHT = EPConfig(transport="ring", receiver_factor=0.5, agreed="water_fill")


@functools.cache
def clean_results(settings):
    step = ep_cases.program(settings, mesh_of(1, 1, 8), SIZES.sequence_length)
    return [step(*problem(routing, SIZES)) for routing in ep_cases.ROUTINGS]


@pytest.mark.parametrize(
    ("settings", "spoil_all"),
    [
        (POOLED_TIGHT, spoil_slots),
        (POOL_TIGHT, spoil_slots_and_tails),
        (TOKENS_TIGHT, spoil_tokens),
        (RAGGED_TIGHT, spoil_greedy),
        (RAGGED_TIGHT, spoil_sloppy),
        (ROWWISE_TIGHT, spoil_tails),
        (RING_TIGHT, spoil_tails),
    ],
    ids=["pooled_wave", "pooled_wave-pool", "pooled_wave-token", "ragged-greedy", "ragged-sloppy", "rowwise", "ring"],
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
