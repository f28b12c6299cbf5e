"""Rows that travel to their experts in e4m3 with a float32 scale each: half the bytes of bfloat16.

Letters: T tokens, K choices, H routed width, Q slots of a source's or receiver's wave, X payload rows, C rows of a
wave's experts.

A row is divided by its largest absolute value / 448 and rounded; the receiver multiplies and casts to the compute type
as it places rows by expert. A row with a NaN or an infinity arrives as NaN. The derivative takes no notice of this:
gradients go straight through in the compute type, from the experts' rows by one exchange back to the tokens. So the
backward pass needs indices only, and a remat policy that keeps what arrived keeps bytes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from ep_jax_kernels import call
from ep_jax_kernels.combine_rows import op as combine_op
from ep_jax_kernels.gather_rows import op as gather_op
from ep_jax_kernels.gather_rows import reference as gather_by_xla
from ep_jax_kernels.quantize_rows import op as quantize_op
from ep_jax_kernels.quantize_rows import reference as quantize_by_xla
from jax import lax

from ep_jax.ep import implementations
from ep_jax.ep.payload import Float8Rows

SendBack = Callable[[jax.Array], jax.Array]  # gradients [Q,H] in received slots -> the same in the sender's slots


def quantize(rows_TH: jax.Array, token_X: jax.Array) -> Float8Rows:
    """The payload's rows from tokens (int32, -1 for a row of zeros). No derivative of its own; see `place`."""
    kernel, plain = quantize_op.quantize_rows, quantize_by_xla.quantize_rows
    arguments = lax.stop_gradient(rows_TH), token_X
    return Float8Rows(*implementations.first("rows to float8", kernel, plain, *arguments))


def place(
    rows_TH: jax.Array,
    arrived: Float8Rows,
    row_C: jax.Array,
    held_Q: jax.Array,
    places_TK: jax.Array,
    send_back: SendBack,
) -> jax.Array:
    """[C,H] in the dtype of rows_TH: of the payload rows that arrived those at row_C (int32, -1 for a row of zeros).

    rows_TH is what this device quantised, and gets the gradient: that of the result's row held_Q[q] (int32, -1 for
    none) goes to received slot q, by `send_back` to its sender's slot, and the float32 sum over the slots places_TK[t]
    (int32, -1 for none), in order of k, to token t.
    """
    scale_C = gather_by_xla.gather_rows(arrived.scale_X[:, None], row_C)[:, 0]
    given = call.vary_alike(rows_TH, arrived.bytes_XH, row_C, scale_C, held_Q, places_TK)
    return implementations.first("rows from float8", _by_kernel, _by_xla, send_back, *given)


def _placing(restore_rows: Callable[..., Any], gather_rows: Callable[..., Any], sum_rows: Callable[..., Any]) -> Any:
    """`place` by these three."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def placed(send_back, rows_TH, bytes_XH, row_C, scale_C, held_Q, places_TK):
        del send_back, held_Q, places_TK
        return restore_rows(bytes_XH, row_C, scale_C, rows_TH.dtype)

    def forward(send_back, rows_TH, bytes_XH, row_C, scale_C, held_Q, places_TK):
        del send_back
        return restore_rows(bytes_XH, row_C, scale_C, rows_TH.dtype), (held_Q, places_TK)

    def backward(send_back, residuals, d_held_CH):
        held_Q, places_TK = residuals
        d_slots_QH = send_back(gather_rows(d_held_CH, held_Q))
        return sum_rows(d_slots_QH, places_TK), None, None, None, None, None

    placed.defvjp(forward, backward)
    return placed


_by_kernel = _placing(quantize_op.restore_rows, gather_op.gather_rows, combine_op.sum_rows)
_by_xla = _placing(quantize_by_xla.restore_rows, gather_by_xla.gather_rows, gather_by_xla.sum_rows)
