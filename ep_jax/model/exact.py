"""Float32 products of bfloat16 activations on tensor cores: the router's, which would otherwise run without them.

A float32 number is the sum of three bfloat16 numbers of 8 bits each, and a product of two bfloat16 numbers is exact in
float32. So x w, with x in bfloat16, is one product of x with the three parts of w side by side, as exact as float32
arithmetic makes it, at a bfloat16 product's speed.

The embedding's gradient has another exact product here: of zeros and ones, which bfloat16 holds as they are.

Shapes: T tokens, D width, E columns, N rows, S sums of them.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ep_jax.mesh import varying


def float32_product(x_TD: jax.Array, weight_DE: jax.Array) -> jax.Array:
    """x w as float32 [T, E], of activations in any float type and a float32 weight.

    The gradient of the weight is as exact; that of x is computed to 16 bits and rounded to the type of x.
    """
    if x_TD.dtype != jnp.bfloat16:
        return jnp.einsum("td,de->te", x_TD.astype(jnp.float32), weight_DE, precision=lax.Precision.HIGHEST)
    return _product(varying(x_TD), varying(weight_DE))


@jax.custom_vjp
def _product(x_TD, weight_DE):
    return _sum_of_parts(x_TD, weight_DE)


def _forward(x_TD, weight_DE):
    return _product(x_TD, weight_DE), (x_TD, weight_DE)


def _backward(residuals, gradient_TE):
    x_TD, weight_DE = residuals
    high_TE, low_TE = bfloat16_parts(gradient_TE, 2)
    high_ED, low_ED = bfloat16_parts(weight_DE.T, 2)
    d_x_TD = _multiply(jnp.concatenate([high_TE, high_TE, low_TE], axis=1), jnp.concatenate([high_ED, low_ED, high_ED]))
    return d_x_TD.astype(x_TD.dtype), _sum_of_parts(x_TD.T, gradient_TE)


_product.defvjp(_forward, _backward)


def _sum_of_parts(left_AB, right_BC):
    """left right in float32: left is bfloat16, right float32."""
    sums_AX = _multiply(left_AB, jnp.concatenate(bfloat16_parts(right_BC, 3), axis=1))
    first, second, third = jnp.split(sums_AX, 3, axis=1)
    return third + second + first  # the smallest ones first


def _multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of two bfloat16 matrices, or stacks of them, in float32."""
    if jax.default_backend() == "cpu":  # has no such product; the same numbers in a wider type
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def ones_product(ones: jax.Array, rows: jax.Array) -> jax.Array:
    """bool [..., S, N] times rows [..., N, D], in float32: sums of chosen rows. As exact as float32 sums are."""
    if rows.dtype == jnp.bfloat16:
        return _multiply(ones.astype(rows.dtype), rows)
    return jnp.matmul(ones.astype(jnp.float32), rows.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def bfloat16_parts(x: jax.Array, parts: int) -> list[jax.Array]:
    """bfloat16 arrays, the largest first, that add up to float32 x to 8 bits each; 3 parts to x itself.

    Parts below the smallest normal number are lost. x may not be above the largest bfloat16.
    """
    found = []
    for _ in range(parts):
        # Not a cast to bfloat16 and back, which XLA takes for no operation at all.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        found.append(part.astype(jnp.bfloat16))
        x = x - part
    return found
