"""Small integers in the header lanes of a payload, exact in every floating type.

Letters: S peers, P slots per peer, H routed width, M header rows per peer, X = S*(M+P) payload rows, J lanes per slot.

A payload is [S, M+P, H]: M header rows, then P token rows. A slot's number (0 = empty) is written as J digits of base
256, one per lane: bfloat16 holds integers exactly only to 256, and reinterpreted bits would not survive a backend
that moves bfloat16 as float32. So no metadata exchange is needed and any expert id is exact.

Token rows are gathered right into their places and read right from them: nothing is put together or cut apart.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

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


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which row of a payload belongs to which slot, s*P + p. Payloads of several waves may follow each other."""

    slots: int  # P
    largest: int  # numbers are 0 to this
    width: int  # H

    @property
    def header(self) -> int:
        """M."""
        return header_rows(self.slots, self.largest, self.width)

    def rows_of(self, slot: jax.Array) -> jax.Array:
        """The payload rows of slots, of any shape; -1 stays -1."""
        return jnp.where(slot < 0, -1, slot + (slot // self.slots + 1) * self.header)

    def by_row(self, value_Q: jax.Array) -> jax.Array:
        """int32 [X]: the values (int32, one a slot) of payload rows, -1 in header rows."""
        padded = jnp.pad(value_Q.reshape(-1, self.slots), ((0, 0), (self.header, 0)), constant_values=-1)
        return padded.reshape(-1)

    def pack(self, numbers_SP: jax.Array, rows_XH: jax.Array) -> jax.Array:
        """The payload [S,M+P,H] of int32 numbers 0..largest and rows in their places; header rows may hold anything."""
        lanes = lanes_per_slot(self.largest)
        peers = numbers_SP.shape[0]
        digits = jnp.stack([(numbers_SP // BASE**j) % BASE for j in range(lanes)], axis=-1).reshape(peers, -1)
        digits = jnp.pad(digits, ((0, 0), (0, self.header * self.width - digits.shape[1])))
        digits_SMH = digits.reshape(peers, self.header, self.width)
        return write_header(rows_XH.reshape(peers, -1, self.width), digits_SMH)

    def unpack(self, payload_SXH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(int32 numbers_SP, rows_XH); rows of header and of empty slots may hold anything."""
        peers, lanes = payload_SXH.shape[0], lanes_per_slot(self.largest)
        header = lax.stop_gradient(payload_SXH)[:, : self.header].astype(jnp.float32).astype(jnp.int32)
        digits = header.reshape(peers, -1)[:, : self.slots * lanes].reshape(peers, self.slots, lanes)
        powers_J = jnp.array([BASE**j for j in range(lanes)], jnp.int32)
        numbers_SP = jnp.sum(digits * powers_J[None, None], axis=-1, dtype=jnp.int32)
        return numbers_SP, payload_SXH.reshape(-1, self.width)


@jax.custom_vjp
def write_header(payload_SXH: jax.Array, digits_SMH: jax.Array) -> jax.Array:
    """The payload with small integers in its first rows, in place where the compiler can.

    Nobody reads the gradient of a header row, so the derivative passes it on instead of clearing it.
    """
    return lax.dynamic_update_slice(payload_SXH, digits_SMH.astype(payload_SXH.dtype), (0, 0, 0))


write_header.defvjp(
    lambda payload_SXH, digits_SMH: (write_header(payload_SXH, digits_SMH), None),
    lambda _, gradient_SXH: (gradient_SXH, None),
)
