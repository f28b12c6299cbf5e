"""Capacities in rows from capacity factors, exact on the host and on the device.

Letters: S ep shards, E experts, e = E/S local experts, K choices per token, T tokens per shard, W waves,
v valid tokens of a shard, V valid tokens of the ep group.

A factor is the exact fraction of its decimal text, so 1.15 x 200 is 230. Static sizes (buffers) use T; logical limits
use v and V in the same formulas, on device, in int32. Buffers of experts' rows are rounded up (`whole_rows`). This file
knows no transport; each asks for the rows it needs.
"""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp

from ep_jax.fields import ConfigError

INT32_LIMIT = 2**31
WHOLE_ROWS = 8  # products of grouped rows take so many at a time (ep_jax_kernels.hopper.ALIGNED_ROWS)
TOKEN_RATES = 1024


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Static sizes of one routed layer on one ep group."""

    num_shards: int  # S
    num_experts: int  # E
    experts_per_token: int  # K
    tokens: int  # T, per shard

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.num_shards

    @property
    def assignments(self) -> int:
        """A = T*K, per shard."""
        return self.tokens * self.experts_per_token

    @property
    def most_per_destination(self) -> int:
        """Most assignments that one token can send to one shard: min(K, e)."""
        return min(self.experts_per_token, self.local_experts)

    @property
    def visiting_share(self) -> Fraction:
        """Of tokens that choose any expert of one shard, expected under uniform routing."""
        return self._choosing(self.local_experts)

    def crossing_share(self, experts: int) -> float:
        """Tokens that choose any of `experts` experts, over their assignments to these, expected under uniform routing:
        what is left of a shard's rows for a peer's `experts` experts when a token's row goes there once."""
        return float(self._choosing(experts) * self.num_experts / (experts * self.experts_per_token))

    def _choosing(self, experts: int) -> Fraction:
        """The share of tokens that choose any of `experts` experts, expected under uniform routing."""
        missed = math.comb(self.num_experts - experts, self.experts_per_token)
        return 1 - Fraction(missed, math.comb(self.num_experts, self.experts_per_token))


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Rows = ceil(numerator * count / divisor), between 1 and `at_most`."""

    numerator: int
    divisor: int
    at_most: int

    def static_rows(self, count: int) -> int:
        """The buffer size in rows for `count` tokens (or assignments), a Python integer."""
        return max(1, min(-(-self.numerator * count // self.divisor), self.at_most))

    def logical_rows(self, count: jax.Array) -> jax.Array:
        """The same for an int32 count on device, without leaving int32."""
        whole, rest = count // self.divisor, count % self.divisor
        scaled = self.numerator * rest
        rows = self.numerator * whole + scaled // self.divisor + (scaled % self.divisor > 0)
        return jnp.clip(rows, 1, self.at_most)


def sender_pool(factor: float, shape: LayerShape, waves: int) -> Capacity:
    """P, per source, destination and wave, as a function of v: ceil(cs*K*v / (S*W)), at most ceil(T*min(K,e) / W)."""
    worst = Fraction(shape.most_per_destination * shape.num_shards, shape.experts_per_token)
    rate = _fraction("ep.sender_factor", factor, worst) * shape.experts_per_token / (shape.num_shards * waves)
    most = -(-shape.tokens * shape.most_per_destination // waves)
    return _capacity("ep.sender_factor", factor, rate, most)


def token_pool(factor: float, shape: LayerShape, waves: int) -> Capacity:
    """P where a slot holds a token, as a function of v: ceil(r*v / W), at most ceil(T / W).

    r is cs*p rounded up to a multiple of 1/1024, so that any factor fits int32; p is the share of tokens that choose a
    shard under uniform routing.
    """
    share = shape.visiting_share
    rate = math.ceil(TOKEN_RATES * _fraction("ep.sender_factor", factor, 1 / share) * share)
    return _capacity("ep.sender_factor", factor, Fraction(rate, TOKEN_RATES) / waves, -(-shape.tokens // waves))


def cell(factor: float, shape: LayerShape, waves: int) -> Capacity:
    """C, per source, expert and wave, as a function of v: ceil(cs*K*v / (E*W)), at most ceil(T / W)."""
    worst = Fraction(shape.num_experts, shape.experts_per_token)
    rate = _fraction("ep.sender_factor", factor, worst) * shape.experts_per_token / (shape.num_experts * waves)
    return _capacity("ep.sender_factor", factor, rate, -(-shape.tokens // waves))


def expert_rows(factor: float, shape: LayerShape, waves: int, pool_rows: int) -> Capacity:
    """R, per local expert and wave, as a function of V: ceil(cr*K*V / (E*W)), at most S*min(P,T)."""
    worst = Fraction(shape.num_experts * waves, shape.experts_per_token)
    rate = _fraction("ep.receiver_factor", factor, worst) * shape.experts_per_token / (shape.num_experts * waves)
    most = shape.num_shards * min(pool_rows, shape.tokens)
    return _capacity("ep.receiver_factor", factor, rate, most)


def destination_rows(factor: float, shape: LayerShape, experts_in_wave: int) -> Capacity:
    """N of one wave, per destination, as a function of V: ceil(cr*K*V * experts_in_wave / E), at most what can come."""
    most_per_token = min(shape.experts_per_token, experts_in_wave)
    worst = Fraction(most_per_token * shape.num_experts, shape.experts_per_token * experts_in_wave)
    rate = _fraction("ep.receiver_factor", factor, worst) * shape.experts_per_token * experts_in_wave
    most = shape.num_shards * shape.tokens * most_per_token
    return _capacity("ep.receiver_factor", factor, rate / shape.num_experts, most)


def whole_rows(rows: int, buffers: int = 1) -> int:
    """The least number of rows, `rows` or more, of which so many buffers have together a multiple of 8.

    Buffers of rows that kernels multiply are that large; what is accepted stays the same.
    """
    unit = WHOLE_ROWS // math.gcd(WHOLE_ROWS, buffers)
    return -(-rows // unit) * unit


def _fraction(key: str, factor: float, worst: Fraction) -> Fraction:
    """The exact fraction of a factor's decimal text, no larger than the factor from which nothing can drop."""
    if not factor > 0:
        raise ConfigError(f"{key} = {factor!r}: allowed is above 0")
    return min(Fraction(repr(float(factor))), worst)


def _capacity(key: str, factor: float, rate: Fraction, at_most: int) -> Capacity:
    """rate is rows per counted token. Refuses what int32 arithmetic on the device cannot hold."""
    if rate.numerator * rate.denominator >= INT32_LIMIT:
        raise ConfigError(
            f"{key} = {factor!r}: its fraction {rate.numerator}/{rate.denominator} overflows int32; "
            f"allowed are numerator x denominator below {INT32_LIMIT}, so use fewer decimals"
        )
    return Capacity(rate.numerator, rate.denominator, at_most)
