"""Small integers in the header lanes of a payload, exact in every floating type.

Letters: S peers, P slots per peer, H routed width, M header rows per peer, J lanes per slot.

A payload is [S, M+P, H]: M header rows, then P token rows. A slot's number (0 = empty) is written as J digits of base
256, one per lane: bfloat16 holds integers exactly only to 256, and reinterpreted bits would not survive a backend
that moves bfloat16 as float32. So no metadata exchange is needed and any expert id is exact.
"""

import jax
import jax.numpy as jnp

BASE = 256


def lanes_per_slot(largest: int) -> int:
    """J: digits needed for numbers 0..largest."""
    lanes = 1
    while BASE**lanes <= largest:
        lanes += 1
    return lanes


def header_rows(slots: int, largest: int, width: int) -> int:
    """M: rows that hold `slots` numbers up to `largest` in rows of `width` lanes."""
    return -(-slots * lanes_per_slot(largest) // width)


def pack(numbers_SP: jax.Array, rows_SPH: jax.Array, largest: int) -> jax.Array:
    """Payload [S, M+P, H] of int32 numbers 0..largest and the slots' rows, in the rows' dtype."""
    peers, slots, width = rows_SPH.shape
    digits = [(numbers_SP // BASE**j) % BASE for j in range(lanes_per_slot(largest))]
    lanes = jnp.stack(digits, axis=-1).reshape(peers, -1)
    rows = header_rows(slots, largest, width)
    lanes = jnp.pad(lanes, ((0, 0), (0, rows * width - lanes.shape[1])))
    header = lanes.astype(rows_SPH.dtype).reshape(peers, rows, width)
    return jnp.concatenate([header, rows_SPH], axis=1)


def unpack(payload_SXH: jax.Array, slots: int, largest: int) -> tuple[jax.Array, jax.Array]:
    """Inverse of `pack`: (int32 numbers_SP, rows_SPH)."""
    peers, _, width = payload_SXH.shape
    rows, lanes = header_rows(slots, largest, width), lanes_per_slot(largest)
    header = jax.lax.stop_gradient(payload_SXH[:, :rows]).astype(jnp.float32).astype(jnp.int32)
    digits = header.reshape(peers, rows * width)[:, : slots * lanes].reshape(peers, slots, lanes)
    powers_J = jnp.array([BASE**j for j in range(lanes)], jnp.int32)
    numbers_SP = jnp.sum(digits * powers_J[None, None], axis=-1, dtype=jnp.int32)
    return numbers_SP, payload_SXH[:, rows:]
