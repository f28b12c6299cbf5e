"""Token embeddings, looked up; the gradient has the same bits in every run.

Derived by JAX, it is a scatter-add, and a GPU adds the rows of a token in the order in which its threads arrive. So two
runs of one program drifted apart, and a resumed one left the path of the one that never stopped (experiments/LOG.md).
Here rows are sorted by token and a block of them at a time is summed by a product with ones and zeros, whose order of
sums the compiled program fixes.

Shapes: V vocabulary, D model width, T tokens, B blocks of N sorted rows, S sums of a block (S = N), R rows
that are added.
"""

import functools

import jax
import jax.numpy as jnp

from ep_jax.mesh import varying
from ep_jax.model.exact import ones_product

BLOCK_ROWS = 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(embedding_VD: jax.Array, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[..., D] in `dtype`: the float32 embedding of each token, int32 [...]. Its gradient is summed in float32."""
    return embedding_VD[tokens].astype(dtype)


def _forward(embedding_VD, tokens, dtype):
    return look_up(embedding_VD, tokens, dtype), (tokens, embedding_VD[:, :0])


def _backward(dtype, residuals, d_rows):
    tokens, like_V0 = residuals
    gradient_VD = sum_by_token(d_rows.reshape(-1, d_rows.shape[-1]), tokens.reshape(-1), like_V0.shape[0])
    return gradient_VD.astype(like_V0.dtype), None


look_up.defvjp(_forward, _backward)


def sum_by_token(rows_TD: jax.Array, tokens_T: jax.Array, vocab_size: int) -> jax.Array:
    """float32 [V, D]: the sum of the rows of each token, added in an order that depends on the tokens alone.

    A row that is not finite spoils more sums than its own token's: those of its block, up to 128 tokens, and with the
    block's first token those of all that stand in several blocks. Memory and work are linear in T, but for a product of
    (T/128)**2 times D.
    """
    (num_rows, width), nowhere = rows_TD.shape, vocab_size  # an index that no scatter writes to
    blocks = -(-num_rows // BLOCK_ROWS)
    order_T = varying(jnp.argsort(tokens_T, stable=True))
    order_BN = jnp.pad(order_T, (0, blocks * BLOCK_ROWS - num_rows), constant_values=num_rows).reshape(blocks, -1)
    tokens_BN = tokens_T.at[order_BN].get(mode="fill", fill_value=nowhere)

    changes_BN = jnp.pad(tokens_BN[:, 1:] != tokens_BN[:, :-1], ((0, 0), (1, 0)))
    is_of_BSN = jnp.cumsum(changes_BN, axis=1)[:, None, :] == jnp.arange(BLOCK_ROWS)[None, :, None]
    sums_BSD = ones_product(is_of_BSN, rows_TD.at[order_BN].get(mode="fill", fill_value=0))
    token_BS = jnp.min(jnp.where(is_of_BSN, tokens_BN[:, None, :], nowhere), axis=2)

    # A block may begin with the token that the block before ends with. Such heads are summed by token on their own, and
    # of each token the first block that has one writes the sum; so neither scatter names a token twice.
    continues_B = jnp.pad(tokens_BN[1:, 0] == tokens_BN[:-1, -1], (1, 0))
    head_B = jnp.where(continues_B, tokens_BN[:, 0], nowhere)
    is_first_B = continues_B & (head_B != jnp.pad(head_B[:-1], (1, 0), constant_values=nowhere))
    heads_BD = jnp.where(continues_B[:, None], sums_BSD[:, 0], 0)
    totals_BD = ones_product(head_B[:, None] == head_B[None], heads_BD)

    token_BS = token_BS.at[:, 0].set(jnp.where(continues_B, nowhere, token_BS[:, 0]))
    gradient_VD = varying(jnp.zeros((vocab_size, width), jnp.float32))
    gradient_VD = _add(gradient_VD, token_BS.reshape(-1), sums_BSD.reshape(-1, width))
    return _add(gradient_VD, jnp.where(is_first_B, head_B, nowhere), totals_BD)


def _add(sums_VD: jax.Array, tokens_R: jax.Array, rows_RD: jax.Array) -> jax.Array:
    """The sums with a row more for each token, which is there once, or past the last one, which is left out."""
    vocab_size = sums_VD.shape[0]
    # Those left out have indices of their own too, so that what is promised holds.
    index_R = jnp.where(tokens_R < vocab_size, tokens_R, vocab_size + jnp.arange(tokens_R.shape[0]))
    return sums_VD.at[index_R].add(rows_RD, mode="drop", unique_indices=True)
