"""Small integers in the header lanes of a payload, exact in every floating type; in float8 payloads scales beside them.

Letters: S peers, P slots per peer, H routed width, M header rows per peer, X = S*(M+P) payload rows, J lanes per slot.

A payload is [S, M+P, H]: M header rows, then P token rows. A slot's number (0 = empty) is written as J digits of base
256, one per lane: bfloat16 holds integers exactly only to 256, and reinterpreted bits would not survive a backend
that moves bfloat16 as float32. So no metadata exchange is needed and any expert id is exact.

A float8 payload travels as uint8, which no backend converts: a slot's number and the float32 scale of its row are eight
bytes of the header, the row H bytes.

Token rows are gathered right into their places and read right from them: nothing is put together or cut apart.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BASE = 256
SLOT_BYTES = 8  # of a float8 header: an int32 and a float32


class Float8Rows(NamedTuple):
    """Rows of a payload in e4m3; a row is bytes * scale."""

    bytes_XH: jax.Array  # float8_e4m3fn
    scale_X: jax.Array  # float32


def lanes_per_slot(largest: int) -> int:
    """J: digits needed for numbers 0..largest."""
    lanes = 1
    while BASE**lanes <= largest:
        lanes += 1
    return lanes


def header_rows(slots: int, largest: int, width: int) -> int:
    """M: rows that hold `slots` numbers up to `largest` in rows of `width` lanes."""
    return -(-slots * lanes_per_slot(largest) // width)


def float8_header_rows(slots: int, width: int) -> int:
    """M of a float8 payload: rows of `width` bytes that hold an int32 and a float32 a slot."""
    return -(-slots * SLOT_BYTES // width)


@dataclasses.dataclass(frozen=True)
class Places:
    """Which row of a payload belongs to which slot, s*P + p. Payloads of several waves may follow each other."""

    slots: int  # P

    @property
    def header(self) -> int:
        """M."""
        raise NotImplementedError

    def rows_of(self, slot: jax.Array) -> jax.Array:
        """The payload rows of slots, of any shape; -1 stays -1."""
        return jnp.where(slot < 0, -1, slot + (slot // self.slots + 1) * self.header)

    def pad(self, value_QJ: jax.Array) -> jax.Array:
        """[X,J]: the values of payload rows, zeros in header rows."""
        by_peer = value_QJ.reshape(-1, self.slots, value_QJ.shape[1])
        return jnp.pad(by_peer, ((0, 0), (self.header, 0), (0, 0))).reshape(-1, value_QJ.shape[1])

    def by_row(self, value_Q: jax.Array) -> jax.Array:
        """int32 [X]: the values (int32, one a slot) of payload rows, -1 in header rows."""
        padded = jnp.pad(value_Q.reshape(-1, self.slots), ((0, 0), (self.header, 0)), constant_values=-1)
        return padded.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Layout(Places):
    """A payload in the dtype of the rows."""

    largest: int  # numbers are 0 to this
    width: int  # H

    @property
    def header(self) -> int:
        """M."""
        return header_rows(self.slots, self.largest, self.width)

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


@dataclasses.dataclass(frozen=True)
class Float8Layout(Places):
    """A payload of e4m3 rows, as bytes. Nothing here has a derivative; see float8.py."""

    width: int  # H

    @property
    def header(self) -> int:
        """M."""
        return float8_header_rows(self.slots, self.width)

    def pack(self, numbers_SP: jax.Array, rows: Float8Rows) -> jax.Array:
        """The payload uint8 [S,M+P,H] of int32 numbers and rows in their places; header rows may hold anything."""
        peers = numbers_SP.shape[0]
        bits_SP = lax.bitcast_convert_type(rows.scale_X.reshape(peers, -1)[:, self.header :], jnp.int32)
        header = lax.bitcast_convert_type(jnp.stack([numbers_SP, bits_SP], axis=-1), jnp.uint8).reshape(peers, -1)
        header = jnp.pad(header, ((0, 0), (0, self.header * self.width - header.shape[1])))
        payload_SXH = lax.bitcast_convert_type(rows.bytes_XH, jnp.uint8).reshape(peers, -1, self.width)
        return lax.dynamic_update_slice(payload_SXH, header.reshape(peers, self.header, self.width), (0, 0, 0))

    def unpack(self, payload_SXH: jax.Array) -> tuple[jax.Array, Float8Rows]:
        """(int32 numbers_SP, rows); rows of empty slots may hold anything, scales of header rows are 1."""
        peers = payload_SXH.shape[0]
        header = payload_SXH[:, : self.header].reshape(peers, -1)[:, : self.slots * SLOT_BYTES]
        words_SP2 = lax.bitcast_convert_type(header.reshape(peers, self.slots, 2, SLOT_BYTES // 2), jnp.int32)
        scale_SP = lax.bitcast_convert_type(words_SP2[..., 1], jnp.float32)
        scale_X = jnp.pad(scale_SP, ((0, 0), (self.header, 0)), constant_values=1).reshape(-1)
        bytes_XH = lax.bitcast_convert_type(payload_SXH.reshape(-1, self.width), jnp.float8_e4m3fn)
        return words_SP2[..., 0], Float8Rows(bytes_XH, scale_X)


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
