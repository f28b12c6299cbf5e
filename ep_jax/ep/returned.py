"""What comes back to a source, and how it is combined, for transports whose results return row by row.

Letters: T tokens, K choices, Q rows of all waves, H routed width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ep_jax.ep.rows import combine_rows


class Returned(NamedTuple):
    """One wave's results at the source."""

    rows_QH: jax.Array
    # bool, or where slots hold tokens int32 with a bit for each assignment; None: everything that was sent was accepted
    accepted_Q: jax.Array | None


class ReturnsRows:
    """Base of these transports: everything here follows from the plan's place_TK and its inverse assignment_Q."""

    def accepted(self, returned: Sequence[Returned], plan: Any) -> jax.Array:
        """bool [T,K]: which assignments were sent (place_TK >= 0, a row of all waves) and accepted."""
        sent_TK = plan.place_TK >= 0
        flags = [wave.accepted_Q for wave in returned if wave.accepted_Q is not None]
        return sent_TK & jnp.concatenate(flags)[jnp.maximum(plan.place_TK, 0)] if flags else sent_TK

    def combine(
        self, returned: Sequence[Returned], weights_TK: jax.Array, accepted_TK: jax.Array, plan: Any
    ) -> jax.Array:
        """[T,H]: the weighted sum of each token's accepted rows."""
        rows_QH = jnp.concatenate([wave.rows_QH for wave in returned])
        place_TK = jnp.where(accepted_TK, plan.place_TK, -1)
        return combine_rows(rows_QH, weights_TK, place_TK, plan.assignment_Q, rows_QH.dtype)
