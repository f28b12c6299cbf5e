"""The collectives of one routed layer as a formula: kinds, counts and bytes, forward and backward, for every transport.

Letters: S ep shards, E experts, e local experts, K choices, T tokens per shard, W waves, P pool slots, M header rows,
C slots of a cell, N rows of a receiver's wave buffer, B rows of a sender's, H routed width, F expert hidden width,
g members of a pre-mix group.

Tests read the same numbers out of the lowered programs, so a changed exchange fails them. No array and no device here.
Not here: the weights' own gathers over fsdp, the router, and the one sum of valid tokens per batch.

`operand_bytes` is the size of the operand on one device: for an all-gather the shard, for a reduce-scatter the whole
sum, for an (unragged or ragged) all-to-all the buffer that it reads, filled or not. `sent_bytes` is what of it leaves
the device: an all-to-all keeps 1/S at home, an all-gather sends its shard to S-1 others, a reduce-scatter (S-1)/S of
its operand. A ragged exchange sends only rows; their number is that of balanced routing, at most what a destination
accepts.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ep_jax.ep.agreed import Receivers
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.fixed_cell import FixedCell
from ep_jax.ep.payload import float8_header_rows, header_rows
from ep_jax.ep.pooled_tokens import pooled_transport
from ep_jax.ep.ragged import Ragged
from ep_jax.ep.rowwise import crossing_shares
from ep_jax.ep.settings import EPConfig

INT32 = FLOAT32 = 4


class Widths(NamedTuple):
    """What turns rows into bytes."""

    routed: int  # H
    hidden: int  # F
    row_itemsize: int = 2  # bytes of one element of rows and expert weights; combine weights are float32

    @property
    def row_bytes(self) -> int:
        return self.routed * self.row_itemsize

    @property
    def wide_itemsize(self) -> int:
        """Bytes of an element where sums cross the network: at least float32."""
        return max(FLOAT32, self.row_itemsize)


class Collective(NamedTuple):
    """`count` equal operations of one layer; bytes are of one of them, on one device."""

    kind: str  # all_to_all, all_gather, reduce_scatter or ragged_all_to_all
    carries: str
    operand_bytes: int
    sent_bytes: int
    count: int = 1


class Collectives(NamedTuple):
    """One layer's collectives. A gradient runs both; recomputing the forward pass adds what it needs of it again."""

    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]


class Traffic(NamedTuple):
    """Bytes that leave one device for one layer."""

    forward_bytes: int
    backward_bytes: int


def collectives(settings: EPConfig, shape: LayerShape, widths: Widths) -> Collectives:
    """The collectives of `routed_experts_local` with `valid_in_group` given, for gradients of all float arguments.

    For `rowwise` these are the emulation's; `one_sided_bytes` is what the transport itself would move. For `ragged`
    they are those of every backend but the CPU.
    """
    forward, backward = FORMULAS[settings.transport](settings, shape, widths)
    group = settings.premix if "premix" in settings.used else 1
    if group > 1:
        mixed = (
            _all_to_all("mixed rows", group, shape.tokens * widths.row_bytes),
            _all_to_all("mixed routes", group, shape.tokens * 2 * shape.experts_per_token * FLOAT32),
            _all_to_all("unmixed rows", group, shape.tokens * widths.row_bytes),
        )
        fates = _all_to_all("unmixed fates", group, shape.assignments)
        forward, backward = (*mixed, fates, *forward), (*mixed, *backward)
    return Collectives(tuple(forward), tuple(backward))


def traffic(settings: EPConfig, shape: LayerShape, widths: Widths) -> Traffic:
    """Bytes that leave one device in one layer's forward and backward pass; for `rowwise` those of one-sided writes."""
    found = collectives(settings, shape, widths)
    if settings.transport == "rowwise":
        moved, receivers = one_sided_bytes(settings, shape, widths), Receivers(settings, shape)
        told = shape.num_experts * INT32 + shape.assignments * (INT32 + FLOAT32)
        weights = receivers.waves * receivers.rows(0) * FLOAT32  # gradients of a receiver's rows' weights
        mixed = [_sent(collective for collective in part if "mixed" in collective.carries) for part in found]
        others = shape.num_shards - 1
        return Traffic(moved + others * told + mixed[0], moved + others * weights + mixed[1])
    return Traffic(_sent(found.forward), _sent(found.backward))


def one_sided_bytes(settings: EPConfig, shape: LayerShape, widths: Widths) -> int:
    """`rowwise`: bytes of rows that one device writes to others, there and back, in one pass under balanced routing.

    Fewer than routed rows where a token's row crosses to a peer once (`rowwise.crossing_shares`).
    """
    routed = sum(_balanced_bytes(settings, shape, widths, wave) for wave in range(Receivers(settings, shape).waves))
    return round(routed * sum(crossing_shares(settings, shape)))


def _sent(found: Iterable[Collective]) -> int:
    return sum(collective.count * collective.sent_bytes for collective in found)


# --- one formula a transport ------------------------------------------------------------------------------------------


def _pooled_wave(settings: EPConfig, shape: LayerShape, widths: Widths):
    """Rows with ids one way, rows with accepted flags the other; gradients take the same buffers back.

    Float8 rows are bytes and have their scales beside the ids; the gradients of these rows are wide and have no header.
    Where slots hold tokens, ids go with weights in an exchange of their own.
    """
    pooled = pooled_transport(settings, shape)
    slots = pooled.pool_rows

    def exchange(carries: str, header: int, row_bytes: int) -> Collective:
        return _all_to_all(carries, shape.num_shards, shape.num_shards * (header + slots) * row_bytes, settings.waves)

    largest = 2**pooled.per_slot - 1  # flags of a slot, as one number
    back = exchange("results and flags", header_rows(slots, largest, widths.routed), widths.row_bytes)
    if settings.slots == "token":
        entries = settings.waves * shape.num_shards * slots * pooled.per_slot
        told = _all_to_all("ids and weights", shape.num_shards, 2 * entries * FLOAT32)
        rows = exchange("rows", 0, widths.row_bytes)
        return (told, rows, back), (told, rows, back)
    if settings.payload == "float8_e4m3":
        there = exchange("float8 rows, ids and scales", float8_header_rows(slots, widths.routed), widths.routed)
        return (there, back), (exchange("gradients of rows", 0, widths.row_bytes), back)
    there = exchange("rows and ids", header_rows(slots, shape.local_experts, widths.routed), widths.row_bytes)
    return (there, back), (there, back)


def _fixed_cell(settings: EPConfig, shape: LayerShape, widths: Widths):
    """Every cell one way and back."""
    size = shape.num_experts * FixedCell(settings, shape).cell_rows * widths.row_bytes
    both = tuple(_all_to_all(carries, shape.num_shards, size, settings.waves) for carries in ("rows", "results"))
    return both, both


def _ragged(settings: EPConfig, shape: LayerShape, widths: Widths):
    """Counts, then rows from the sender's buffer and results from the receiver's; gradients the other way round."""
    receivers, here = Receivers(settings, shape), Ragged(settings, shape).sender_rows()
    there_and_back = []
    for wave in range(receivers.waves):
        sent = _balanced_bytes(settings, shape, widths, wave)
        sizes = (("rows", here), ("results", receivers.rows(wave)))
        there_and_back += [Collective("ragged_all_to_all", name, n * widths.row_bytes, sent) for name, n in sizes]
    return (_counts(shape), *there_and_back), there_and_back


def _rowwise(settings: EPConfig, shape: LayerShape, widths: Widths):
    """The emulation: all shards' route maps, rows and results are gathered in every wave."""
    receivers, shards = Receivers(settings, shape), shape.num_shards
    rows, held, waves = shape.tokens, receivers.rows(0), receivers.waves
    forward = (
        _counts(shape),
        _all_gather("route map", shards, shape.assignments * INT32, waves),
        _all_gather("rows", shards, rows * widths.row_bytes, waves),
        _all_gather("results", shards, held * widths.row_bytes, waves),
    )
    wide = shards * widths.routed * widths.wide_itemsize
    return forward, tuple(
        _reduce_scatter(carries, shards, count * wide, waves) for carries, count in (("rows", rows), ("results", held))
    )


def _ring(settings: EPConfig, shape: LayerShape, widths: Widths):
    """Ids, rows and weights to everybody, partial sums back in float32; gradients are the transposes."""
    del settings
    shards, wide = shape.num_shards, shape.tokens * widths.routed * widths.wide_itemsize
    forward = (
        _all_gather("ids", shards, shape.assignments * INT32),
        _all_gather("rows", shards, shape.tokens * widths.row_bytes),
        _all_gather("weights", shards, shape.assignments * FLOAT32),
        _reduce_scatter("results", shards, shards * wide),
    )
    backward = (
        _all_gather("results", shards, wide),
        _reduce_scatter("weights", shards, shards * shape.assignments * FLOAT32),
        _reduce_scatter("rows", shards, shards * wide),
    )
    return forward, backward


def _dense(settings: EPConfig, shape: LayerShape, widths: Widths):
    """No row moves: the experts' weights come, and their gradients are summed in float32."""
    del settings
    shards, elements = shape.num_shards, shape.local_experts * widths.routed * widths.hidden
    sizes = (("gate and up", 2 * elements), ("down", elements))
    gathers = tuple(_all_gather(name, shards, n * widths.row_itemsize) for name, n in sizes)
    return gathers, tuple(_reduce_scatter(name, shards, shards * n * widths.wide_itemsize) for name, n in sizes)


FORMULAS = {
    "pooled_wave": _pooled_wave,
    "fixed_cell": _fixed_cell,
    "ragged": _ragged,
    "rowwise": _rowwise,
    "ring": _ring,
    "dense": _dense,
}


def _counts(shape: LayerShape) -> Collective:
    return _all_gather("counts", shape.num_shards, shape.num_experts * INT32)


def _balanced_bytes(settings: EPConfig, shape: LayerShape, widths: Widths, wave: int) -> int:
    """Bytes of rows that leave a device in one direction of a wave when every expert is chosen equally often."""
    receivers = Receivers(settings, shape)
    experts = receivers.experts_of(wave)
    arriving = shape.assignments * shape.num_shards * (experts.stop - experts.start) // shape.num_experts
    return min(arriving, receivers.accepted_rows(wave)) * (shape.num_shards - 1) // shape.num_shards * widths.row_bytes


def _all_to_all(carries: str, group: int, size: int, count: int = 1) -> Collective:
    return Collective("all_to_all", carries, size, size * (group - 1) // group, count)


def _all_gather(carries: str, group: int, size: int, count: int = 1) -> Collective:
    return Collective("all_gather", carries, size, size * (group - 1), count)


def _reduce_scatter(carries: str, group: int, size: int, count: int = 1) -> Collective:
    return Collective("reduce_scatter", carries, size, size * (group - 1) // group, count)
