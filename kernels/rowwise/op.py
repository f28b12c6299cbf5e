"""Four movements of rows between the shards of an ep group, adjoint in pairs, on one route map.

Letters: S shards, T tokens of a shard, K choices, N rows of a shard's buffer, H row width. They run inside shard_map.

The route map is int32 place_TK of each source: peer * N + row for the buffer row that belongs to (token, choice), or
-1 for none. A row belongs to at most one (source, token, choice); a row that belongs to none is never read and, after
a PUT, is unwritten: it may be anything.

| movement | here | rows over the link per GPU |
| --- | --- | --- |
| dispatch | PUT: a token's row, read once, to its K places | each routed row once |
| dispatch backward | GET: float32 sum over k of the places' gradients | once |
| combine | GET: float32 sum over k of weight * result, cast once | once |
| combine backward | PUT of the output's gradient as it is; weights and their gradients as 4 bytes a row | once |

Why the backward pass of combine puts *unweighted* rows: a row's gradient is weight * d_out, and the weight's gradient
is <d_out, result>. Putting weighted rows would need every result a second time at the source (twice the link bytes),
and <weight * d_out, result> / weight at the expert has no answer for a weight of 0. With d_out itself beside the
result, both follow at the expert from rows that lie there: exact operands, one rounding, any weight. An expert layer
that multiplies by the row's weight in its own backward pass needs only `put`, `put_numbers` and `get_numbers`: its
SwiGLU derivative reads those rows anyway (<d_out, W h> = <W^T d_out, h>), and the two passes of `combine`'s
derivative fall away.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from . import reference
from .exchange import SHARED_BYTES
from .get import GetLaunch, get_sum
from .put import PutLaunch, put_rows


@dataclasses.dataclass(frozen=True)
class Movements:
    """The mesh axis, and how each movement runs: a launch of the kernel, or None for plain JAX."""

    axis: str = "ep"
    put: PutLaunch | None = dataclasses.field(default_factory=PutLaunch)
    get: GetLaunch | None = dataclasses.field(default_factory=GetLaunch)


KERNELS, PLAIN = Movements(), Movements(put=None, get=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dispatch(rows_TH: jax.Array, place_TK: jax.Array, num_rows: int, how: Movements = KERNELS) -> jax.Array:
    """This shard's buffer [N,H] with every shard's rows at their places; differentiable in rows_TH.

    Raises ValueError for arrays that do not fit each other, NotImplementedError for rows that the kernels cannot move.
    """
    return put(rows_TH, place_TK, num_rows, how)


def _dispatch_forward(rows_TH, place_TK, num_rows, how):
    return put(rows_TH, place_TK, num_rows, how), place_TK


def _dispatch_backward(num_rows, how, place_TK, d_rows_NH):
    return get(d_rows_NH, None, place_TK, how), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def combine(rows_NH: jax.Array, weights_TK: jax.Array, place_TK: jax.Array, how: Movements = KERNELS) -> jax.Array:
    """[T,H]: sum over k ascending of weights_TK[t,k] times the row at place_TK[t,k], in float32, cast once.

    For results that the experts have not weighted; ep_jax weights them there and uses `collect`, so only tests and
    tune.py call this. Differentiable in rows and weights; rows of the buffer without a place get a zero gradient.
    Raises as `dispatch`.
    """
    return get(rows_NH, weights_TK, place_TK, how)


def _combine_forward(rows_NH, weights_TK, place_TK, how):
    return get(rows_NH, weights_TK, place_TK, how), (rows_NH, weights_TK, place_TK)


def _combine_backward(how, residuals, d_out_TH):
    rows_NH, weights_TK, place_TK = residuals
    num_rows, wide = rows_NH.shape[0], jnp.promote_types(rows_NH.dtype, jnp.float32)
    d_out_NH = put(d_out_TH, place_TK, num_rows, how)
    weight_N, held_N = put_numbers(weights_TK, place_TK, num_rows, how)
    # Selects, not products: rows without a place may be anything, on both sides.
    d_out_NH = jnp.where(held_N[:, None], d_out_NH, 0).astype(wide)
    d_rows_NH = (weight_N.astype(wide)[:, None] * d_out_NH).astype(rows_NH.dtype)
    d_weight_N = jnp.sum(d_out_NH * jnp.where(held_N[:, None], rows_NH, 0).astype(wide), axis=1)
    return d_rows_NH, get_numbers(d_weight_N, place_TK, how).astype(weights_TK.dtype), None


combine.defvjp(_combine_forward, _combine_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(rows_NH: jax.Array, place_TK: jax.Array, how: Movements = KERNELS) -> jax.Array:
    """`combine` of rows that the experts have weighted already: the adjoint of `dispatch`, and nothing else moves.

    Gradients of rows without a place are unwritten.
    """
    return get(rows_NH, None, place_TK, how)


def _collect_forward(rows_NH, place_TK, how):
    return get(rows_NH, None, place_TK, how), (place_TK, rows_NH.shape[0])


def _collect_backward(how, residuals, d_out_TH):
    place_TK, num_rows = residuals
    return put(d_out_TH, place_TK, num_rows, how), None


collect.defvjp(_collect_forward, _collect_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dispatch_weights(weights_TK: jax.Array, place_TK: jax.Array, num_rows: int, how: Movements = KERNELS) -> jax.Array:
    """float32 [N]: the weight of each row of this shard's buffer, zero for a row without a place."""
    return put_numbers(weights_TK.astype(jnp.float32), place_TK, num_rows, how)[0]


def _dispatch_weights_forward(weights_TK, place_TK, num_rows, how):
    return dispatch_weights(weights_TK, place_TK, num_rows, how), place_TK


def _dispatch_weights_backward(num_rows, how, place_TK, d_weights_N):
    return get_numbers(d_weights_N, place_TK, how), None


dispatch_weights.defvjp(_dispatch_weights_forward, _dispatch_weights_backward)


def put(rows_TH: jax.Array, place_TK: jax.Array, num_rows: int, how: Movements = KERNELS) -> jax.Array:
    """`dispatch` without a derivative."""
    _check(rows_TH, place_TK, num_rows, how)
    if how.put is None:
        return reference.put_rows(rows_TH, place_TK, num_rows, how.axis)
    check_rows(rows_TH)
    return put_rows(rows_TH, place_TK, num_rows, how.axis, how.put)


def get(rows_NH: jax.Array, weights_TK: jax.Array | None, place_TK: jax.Array, how: Movements = KERNELS) -> jax.Array:
    """`combine` without a derivative; weights of None are all 1."""
    _check(None, place_TK, rows_NH.shape[0], how)
    if weights_TK is not None and weights_TK.shape != place_TK.shape:
        raise ValueError(f"weights_TK has shape {weights_TK.shape}: expected {place_TK.shape}, as place_TK")
    if how.get is None:
        return reference.get_sum(rows_NH, weights_TK, place_TK, how.axis)
    check_rows(rows_NH)
    weights_TK = None if weights_TK is None else weights_TK.astype(jnp.float32)
    return get_sum(rows_NH, weights_TK, place_TK, how.axis, how.get)


def put_numbers(
    values_TK: jax.Array, place_TK: jax.Array, num_rows: int, how: Movements = KERNELS
) -> tuple[jax.Array, jax.Array]:
    """([N] numbers at their places, zero elsewhere; [N] bool where one was put)."""
    return reference.put_numbers(values_TK, place_TK, num_rows, how.axis)


def get_numbers(values_N: jax.Array, place_TK: jax.Array, how: Movements = KERNELS) -> jax.Array:
    """[T,K] numbers at their places, zero for a place of -1; what lies elsewhere in values_N is not read."""
    return reference.get_numbers(values_N, place_TK, how.axis)


def _check(rows_TH: jax.Array | None, place_TK: jax.Array, num_rows: int, how: Movements) -> None:
    if place_TK.ndim != 2 or place_TK.dtype != jnp.int32:
        raise ValueError(f"place_TK is {place_TK.dtype} {place_TK.shape}: expected int32 [T,K]")
    if rows_TH is not None and (rows_TH.ndim != 2 or rows_TH.shape[0] != place_TK.shape[0]):
        raise ValueError(f"rows_TH has shape {rows_TH.shape}: expected [{place_TK.shape[0]},H], tokens as in place_TK")
    if (places := lax.axis_size(how.axis) * num_rows) >= 2**31:
        raise ValueError(f"{places} rows on all shards of {how.axis}: fewer than 2**31 have an int32 place")


def check_rows(rows: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises NotImplementedError for rows that the kernels cannot move."""
    width, size = rows.shape[1], rows.dtype.itemsize
    if rows.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"rows of {rows.dtype}: the kernels move bfloat16, float16 and float32")
    if width % 256 or width * size > SHARED_BYTES // 4:
        most = SHARED_BYTES // 4 // size // 256 * 256
        raise NotImplementedError(f"rows of {width} {rows.dtype}: the kernels need a multiple of 256, at most {most}")
