"""The stock recipe as a baseline: sort by expert, `ragged_all_to_all`, `ragged_dot`, and back, all by JAX's own means.

Letters: S ep shards, D destinations (the same shards), E experts, e local experts, T tokens of a shard, K choices,
A = T*K assignments, N rows of the receive buffer, H row width, F expert hidden width.

One update per peer, gathers and scatters as `x[i]` and `.at[i].set`, derivatives as JAX makes them. Nothing drops: the
receive buffer holds exactly what the most loaded device gets in this problem, which a real run cannot know before, so
the recipe looks a little better here than it is. XLA:CPU has no ragged_all_to_all; there the emulation of
`ep_jax.ep.ragged` stands in, so that the logic is tested.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ep_jax.ep.ragged import Updates, exchange

NAME = "stock"
ITERATIONS = 5  # most timed calls: one takes several hundred milliseconds where others take twenty


def receive_rows(ids_TK: np.ndarray, shards: int, experts: int) -> int:
    """Rows that the most loaded device gets. ids_TK: int [S*T, K] of all shards."""
    return int(np.bincount(ids_TK.reshape(-1) // (experts // shards), minlength=shards).max())


def stock_layer(rows_N: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The layer of one shard inside shard_map over `ep`, with a receive buffer of `rows_N` rows.

    (rows [T,H], ids int32 [T,K], weights float32 [T,K], w_in [e,H,2F], w_out [e,F,H]) -> (out [T,H], fates int8 [T,K],
    all 0 = kept).
    """

    def local(rows_TH, ids_TK, weights_TK, w_in_eH2F, w_out_eFH):
        shards, me = lax.axis_size("ep"), lax.axis_index("ep")
        experts, (tokens, choices) = w_in_eH2F.shape[0], ids_TK.shape
        expert_A = ids_TK.reshape(-1)
        order_A = jnp.argsort(expert_A)
        counts_De = jnp.bincount(expert_A, length=shards * experts).astype(jnp.int32).reshape(shards, experts)
        counts_SDe = lax.all_gather(counts_De, "ep")
        counts_SD, came_Se = counts_SDe.sum(axis=2), counts_SDe[:, me]
        sent_D, came_S = counts_SD[me], counts_SD[:, me]
        forth = Updates(_before(sent_D), sent_D, _before(counts_SD, axis=0)[me], came_S)
        back = Updates(_before(came_S), came_S, _before(counts_SD, axis=1)[:, me], sent_D)

        received_NH = _send(rows_TH[order_A // choices], forth, back, rows_N)
        expert_N = jnp.repeat(
            jnp.tile(jnp.arange(experts), shards), came_Se.reshape(-1), total_repeat_length=rows_N
        )  # rows come source by source, each sorted by expert
        order_N = jnp.argsort(jnp.where(jnp.arange(rows_N) < came_S.sum(), expert_N, experts))
        sizes_e = came_Se.sum(axis=0)
        gate, up = jnp.split(lax.ragged_dot(received_NH[order_N], w_in_eH2F, sizes_e), 2, axis=-1)
        results_NH = lax.ragged_dot(jax.nn.silu(gate) * up, w_out_eFH, sizes_e)

        as_received_NH = jnp.zeros_like(results_NH).at[order_N].set(results_NH)
        returned_AH = _send(as_received_NH, back, forth, tokens * choices)
        unsorted_AH = jnp.zeros_like(returned_AH).at[order_A].set(returned_AH)
        terms_TKH = unsorted_AH.reshape(tokens, choices, -1).astype(jnp.float32) * weights_TK[..., None]
        kept_TK = lax.pcast(jnp.zeros((tokens, choices), jnp.int8), "ep", to="varying")
        return terms_TKH.sum(axis=1).astype(rows_TH.dtype), kept_TK

    return local


def _before(sizes: jax.Array, axis: int = 0) -> jax.Array:
    """Sums of what comes before each entry."""
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


def _send(rows: jax.Array, forth: Updates, back: Updates, out_rows: int) -> jax.Array:
    """Rows moved by `forth` into a buffer of `out_rows` zero rows."""

    def stock(rows, *updates):
        out = lax.pcast(jnp.zeros((out_rows, rows.shape[1]), rows.dtype), "ep", to="varying")
        return lax.ragged_all_to_all(rows, out, *updates, axis_name="ep")

    def emulated(rows, *updates):
        return exchange(rows, Updates(*updates), back, out_rows)

    return lax.platform_dependent(rows, *forth, cpu=emulated, default=stock)
