"""What a policy costs: bytes that leave a GPU for a layer's forward pass, and rows that its experts are given.

Bytes are those of `ep_jax.ep.traffic`, which is held against compiled programs: whole buffers with their headers for
`pooled_wave` and `fixed_cell`, everybody's tokens for `ring`. A ragged exchange sends rows that exist: their number
comes from the replay, not from balanced routing; `rowwise` sends the expected share of them
(`rowwise.crossing_shares`). Expert rows are buffer rows, in whole groups of 8, filled or not. No array, no device here.
"""

from ep_jax.ep.agreed import Receivers
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.fixed_cell import FixedCell
from ep_jax.ep.pooled_tokens import pooled_transport
from ep_jax.ep.rowwise import crossing_shares
from ep_jax.ep.settings import EPConfig
from ep_jax.ep.traffic import Widths, collectives, one_sided_bytes, traffic

SENDS_TRUE_ROWS = ("ragged", "rowwise")


def forward_bytes(settings: EPConfig, shape: LayerShape, widths: Widths, kept_away: float) -> float:
    """Bytes that leave one GPU, dispatch and return. kept_away: rows that leave it, which matter to SENDS_TRUE_ROWS."""
    if settings.transport not in SENDS_TRUE_ROWS:
        return traffic(settings, shape, widths).forward_bytes
    crossing = sum(crossing_shares(settings, shape)) if settings.transport == "rowwise" else 2.0
    return fixed_bytes(settings, shape, widths) + crossing * kept_away * widths.row_bytes


def fixed_bytes(settings: EPConfig, shape: LayerShape, widths: Widths) -> int:
    """The part of a ragged exchange that routing does not change: counts or routes, and a pre-mix's own exchange."""
    if settings.transport == "rowwise":
        return traffic(settings, shape, widths).forward_bytes - one_sided_bytes(settings, shape, widths)
    found = collectives(settings, shape, widths).forward
    return sum(one.count * one.sent_bytes for one in found if one.kind != "ragged_all_to_all")


def expert_rows(settings: EPConfig, shape: LayerShape) -> int:
    """Rows that the buffers before a GPU's experts hold, over all waves of a layer."""
    if settings.transport == "pooled_wave":
        pooled = pooled_transport(settings, shape)
        return pooled.waves * pooled.held_rows
    if settings.transport == "fixed_cell":
        cells = FixedCell(settings, shape)
        return cells.waves * shape.num_experts * cells.cell_rows
    receivers = Receivers(settings, shape)
    return sum(receivers.rows(wave) for wave in range(receivers.waves))


def price_bytes(settings: EPConfig, shape: LayerShape, widths: Widths) -> int:
    """What "cheapest" compares: bytes that leave a GPU (where true rows go, balanced ones) and those of expert rows."""
    return traffic(settings, shape, widths).forward_bytes + expert_rows(settings, shape) * widths.row_bytes
