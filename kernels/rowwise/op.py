"""Movements of rows between the shards of an ep group, adjoint in pairs, on one route map.

Letters: S shards, T tokens of a shard, K choices, N rows of a shard's buffer, H row width. They run inside shard_map.

| movement | here | rows over the link per GPU |
| --- | --- | --- |
| dispatch | PUT: a token's row, read once, to its K places | each routed row, with fan-out once per peer |
| dispatch backward | GET: float32 sum over k of the places' gradients | the same, with fan-in |
| collect | GET: float32 sum over k of the places' results, cast once | the same, with fan-in |
| collect backward | PUT of the output's gradient as it is | the same, with fan-out |

With fan-in the sum is of own rows, then of the peers' sums, each of which is cast once before it crosses.

`collect` is the weighted combine of a layer whose experts multiply by the row's weight: weight * W h = W (weight * h),
and their SwiGLU touches h anyway. The backward pass then needs no second look at the results either: a weight's
gradient is <d_out, W h> = <W^T d_out, h>, at the expert, from what its derivative reads in any case, exact for a
weight of 0 too. Weights and their gradients are 4 bytes a row, moved by `dispatch_weights`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import reference
from .exchange import SHARED_BYTES, slots_that_fit
from .get import FanIn, GetLaunch, fan_in_maps, get_sum
from .put import FanOut, PutLaunch, fan_out_maps, put_rows


@dataclasses.dataclass(frozen=True)
class Movements:
    """The mesh axis, and how each movement runs: a launch of the kernel, or None for plain JAX."""

    axis: str = "ep"
    put: PutLaunch | None = dataclasses.field(default_factory=PutLaunch)
    get: GetLaunch | None = dataclasses.field(default_factory=GetLaunch)


KERNELS, PLAIN = Movements(), Movements(put=None, get=None)
# A row crosses to a peer once, and a peer's results are summed before they cross (put.py, get.py).
FANS = Movements(
    put=PutLaunch(blocks=96, groups=4, slots=8, fan_out=True), get=GetLaunch(groups=3, slots=10, fan_in=True)
)


class RouteMap(NamedTuple):
    """Where rows lie: peer * N + row for the buffer row that belongs to (token, choice), -1 for none; int32.

    A row belongs to at most one (source, token, choice); a row that belongs to none is never read and, after a PUT, is
    unwritten: it may be anything.
    """

    place_TK: jax.Array  # of this shard
    fan_out: FanOut | None = None
    fan_in: FanIn | None = None


def route_map(place_TK: jax.Array, place_STK: jax.Array, num_rows: int, how: Movements = KERNELS) -> RouteMap:
    """What `how` needs of a shard's places and all shards'; made once for the movements there and back."""
    apart = place_STK.shape[0] > 1 and place_STK.shape[2] > 1  # else no two rows of a token lie on one peer
    return RouteMap(
        place_TK,
        fan_out_maps(place_STK, num_rows, how.axis) if apart and how.put and how.put.fan_out else None,
        fan_in_maps(place_STK, num_rows, how.axis) if apart and how.get and how.get.fan_in else None,
    )


def delayed(places: RouteMap, after: jax.Array | int) -> RouteMap:
    """The same map, so that a PUT waits for `after`, a zero: what it reads first depends on it."""
    if places.fan_out is None:
        return places._replace(place_TK=places.place_TK + after)
    return places._replace(fan_out=places.fan_out._replace(send_TK=places.fan_out.send_TK + after))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dispatch(rows_TH: jax.Array, places: RouteMap, num_rows: int, how: Movements = KERNELS) -> jax.Array:
    """This shard's buffer [N,H] with every shard's rows at their places; differentiable in rows_TH.

    Raises ValueError for arrays that do not fit each other, NotImplementedError for rows that the kernels cannot move.
    """
    return put(rows_TH, places, num_rows, how)


def _dispatch_forward(rows_TH, places, num_rows, how):
    return put(rows_TH, places, num_rows, how), places._replace(fan_out=None)


def _dispatch_backward(num_rows, how, places, d_rows_NH):
    return get(d_rows_NH, places, how), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(rows_NH: jax.Array, places: RouteMap, how: Movements = KERNELS) -> jax.Array:
    """[T,H]: float32 sum of the rows at place_TK[t,k], in the order above; the adjoint of `dispatch`.

    Differentiable in rows_NH; gradients of rows without a place are unwritten. Raises as `dispatch`.
    """
    return get(rows_NH, places, how)


def _collect_forward(rows_NH, places, how):
    return get(rows_NH, places, how), (places._replace(fan_in=None), rows_NH.shape[0])


def _collect_backward(how, residuals, d_out_TH):
    places, num_rows = residuals
    return put(d_out_TH, places, num_rows, how), None


collect.defvjp(_collect_forward, _collect_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def dispatch_weights(
    weights_TK: jax.Array,
    weights_STK: jax.Array,
    place_TK: jax.Array,
    place_STK: jax.Array,
    num_rows: int,
    axis: str,
) -> jax.Array:
    """float32 [N]: the weight of each row of this shard's buffer, zero for a row without a place.

    weights_STK float32 and place_STK: every shard's, which nothing exchanges here. Differentiable in weights_TK alone,
    by one all-gather of the gradients' numbers.
    """
    row_STK = place_STK - lax.axis_index(axis) * num_rows
    row_STK = jnp.where((row_STK >= 0) & (row_STK < num_rows), row_STK, num_rows)  # -1 is negative on every shard
    return jnp.zeros(num_rows, jnp.float32).at[row_STK.reshape(-1)].set(weights_STK.reshape(-1), mode="drop")


def _dispatch_weights_forward(weights_TK, weights_STK, place_TK, place_STK, num_rows, axis):
    return dispatch_weights(weights_TK, weights_STK, place_TK, place_STK, num_rows, axis), place_TK


def _dispatch_weights_backward(num_rows, axis, place_TK, d_weights_N):
    return reference.get_numbers(d_weights_N, place_TK, axis), None, None, None


dispatch_weights.defvjp(_dispatch_weights_forward, _dispatch_weights_backward)


def put(rows_TH: jax.Array, places: RouteMap, num_rows: int, how: Movements = KERNELS) -> jax.Array:
    """`dispatch` without a derivative."""
    _check(rows_TH, places.place_TK, num_rows, how)
    if how.put is None:
        return reference.put_rows(rows_TH, places.place_TK, num_rows, how.axis)
    check_rows(rows_TH)
    return put_rows(rows_TH, places.place_TK, places.fan_out, num_rows, how.axis, how.put)


def get(rows_NH: jax.Array, places: RouteMap, how: Movements = KERNELS) -> jax.Array:
    """`collect` without a derivative."""
    _check(None, places.place_TK, rows_NH.shape[0], how)
    if how.get is None:
        return reference.get_sum(rows_NH, places.place_TK, how.axis)
    check_rows(rows_NH, places.place_TK.shape[1])
    return get_sum(rows_NH, places.place_TK, places.fan_in, how.axis, how.get)


def _check(rows_TH: jax.Array | None, place_TK: jax.Array, num_rows: int, how: Movements) -> None:
    if place_TK.ndim != 2 or place_TK.dtype != jnp.int32:
        raise ValueError(f"place_TK is {place_TK.dtype} {place_TK.shape}: expected int32 [T,K]")
    if rows_TH is not None and (rows_TH.ndim != 2 or rows_TH.shape[0] != place_TK.shape[0]):
        raise ValueError(f"rows_TH has shape {rows_TH.shape}: expected [{place_TK.shape[0]},H], tokens as in place_TK")
    if (places := lax.axis_size(how.axis) * num_rows) >= 2**31:
        raise ValueError(f"{places} rows on all shards of {how.axis}: fewer than 2**31 have an int32 place")


def check_rows(rows: jax.Array | jax.ShapeDtypeStruct, choices: int = 1) -> None:
    """Raises NotImplementedError for rows that the kernels cannot move, or not for so many choices of a token."""
    width, size = rows.shape[1], rows.dtype.itemsize
    if rows.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"rows of {rows.dtype}: the kernels move bfloat16, float16 and float32")
    if width % 256 or width * size > SHARED_BYTES // 4:
        most = SHARED_BYTES // 4 // size // 256 * 256
        raise NotImplementedError(f"rows of {width} {rows.dtype}: the kernels need a multiple of 256, at most {most}")
    if choices > (most := slots_that_fit(choices, width * size)):
        raise NotImplementedError(f"{choices} rows of {width * size} bytes: {most} of them fit into shared memory")
