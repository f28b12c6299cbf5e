"""Batches for the step: global jax.Arrays, read ahead, each process reading only the rows of its own devices.

Letters: B sequences of a step, M microbatches, L columns. Step s takes the global sequence positions s*B to s*B + B - 1
in order; position m * B/M + b of them is row b of microbatch m, whatever the mesh and the number of processes. The
position of a run is its next step and nothing else. Rows come from `sequences.py`; the step is not known here.
"""

import functools
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_jax.data.sequences import Batch, Sequences, rows_at
from ep_jax.fields import ConfigError
from ep_jax.mesh import BATCH_AXES

if TYPE_CHECKING:
    from ep_jax.config import RunConfig

EVALUATION_SEED = 0  # one fixed shuffle, so that the first rows are a fair sample of the held-out half
HELD_OUT_ORDERS = ("shuffled", "document")
MAX_STEPS = 2**40
READER_THREADS = 4


class Layout:
    """The shape [M, B/M, L] of a batch on a mesh, and the part of it that this process holds.

    Raises ConfigError when M does not divide B or the mesh does not divide B/M.
    """

    def __init__(self, sequences: Sequences, *, sequences_per_step: int, accumulation: int, mesh: Mesh):
        rows_per_microbatch, remainder = divmod(sequences_per_step, accumulation)
        if remainder or rows_per_microbatch % mesh.size or not rows_per_microbatch:
            raise ConfigError(
                f"train.sequences_per_step = {sequences_per_step}: must be a multiple of train.accumulation x "
                f"devices = {accumulation} x {mesh.size}"
            )
        self.sequences = sequences
        self.shape = (accumulation, rows_per_microbatch, sequences.sequence_length)
        self.sharding = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES, None))
        indices = self.sharding.devices_indices_map(self.shape)
        held = [self._rows(indices[device]) for device in self.sharding.addressable_devices]
        self.local_rows = np.array(sorted(row for rows in held for row in rows))  # of B/M, ascending

    def read(self, rows: np.ndarray) -> Batch:
        """This process's part, NumPy [M, rows held here, L], of the batch that has the given rows (int64 [B])."""
        local = rows.reshape(self.shape[:2])[:, self.local_rows]
        batch = self.sequences.batch(local.ravel())
        return Batch(*(array.reshape(*local.shape, -1) for array in batch))

    def origins(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Document and position, int64 [M, rows held here, L], of the tokens that `read` gives."""
        local = rows.reshape(self.shape[:2])[:, self.local_rows]
        document, position = self.sequences.origins(local.ravel())
        return document.reshape(*local.shape, -1), position.reshape(*local.shape, -1)

    def place(self, local: Batch) -> Batch:
        """The global arrays [M, B/M, L] whose local part is given."""

        def part(array: np.ndarray, index: Any) -> np.ndarray:
            rows = self._rows(index)
            first = int(np.searchsorted(self.local_rows, rows.start))
            return array[:, first : first + len(rows)]

        def put(array: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(self.shape, self.sharding, lambda index: part(array, index))

        return Batch(*map(put, local))

    def _rows(self, index: tuple[slice, ...]) -> range:
        """The rows of a microbatch that a device with this index of the global array holds."""
        return range(*index[1].indices(self.shape[1]))


class BatchStream:
    """Training batches of a run, from any step.

    Raises ConfigError when the batch does not fit the mesh or there are fewer rows than a step takes. With several
    processes, all must construct it: their data are compared.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        seed: int,
        sequences_per_step: int,
        accumulation: int,
        mesh: Mesh,
        prefetch: int = 4,
    ):
        if sequences.num_rows < sequences_per_step:
            raise ConfigError(
                f"train.sequences_per_step = {sequences_per_step}: found {sequences.num_rows} training rows of "
                f"{sequences.sequence_length} tokens, needed at least {sequences_per_step}"
            )
        self.layout = Layout(sequences, sequences_per_step=sequences_per_step, accumulation=accumulation, mesh=mesh)
        self.sequences, self.seed, self.prefetch = sequences, seed, prefetch
        self.sequences_per_step = sequences_per_step
        check_same_everywhere(sequences)

    @classmethod
    def of_run(cls, config: "RunConfig", sequences: Sequences, mesh: Mesh) -> "BatchStream":
        """The stream that a run of this configuration trains on."""
        return cls(
            sequences,
            seed=config.train.seed,
            sequences_per_step=config.train.sequences_per_step,
            accumulation=config.train.accumulation,
            mesh=mesh,
            prefetch=config.data.prefetch,
        )

    def rows(self, step: int) -> np.ndarray:
        """The rows (int64 [B]) of a step: a function of seed and step alone."""
        positions = step * self.sequences_per_step + np.arange(self.sequences_per_step)
        return rows_at(positions, self.sequences.num_rows, self.seed)

    def from_step(self, start_step: int = 0) -> Generator[tuple[int, Batch]]:
        """Yields (step, batch) for start_step, start_step + 1, ... without end; close it to stop the readers."""
        return read_ahead(self.layout, self.rows, start_step, MAX_STEPS, self.prefetch)


def held_out_batches(
    sequences: Sequences,
    *,
    sequences_per_batch: int,
    accumulation: int,
    mesh: Mesh,
    num_sequences: int = 0,
    order: str = "shuffled",
    prefetch: int = 4,
) -> Iterator[Batch]:
    """Yields `num_sequences` rows (all when 0 or more than there are) as batches, chosen by `held_out_rows`.

    The last batch is filled up with rows of padding, all invalid. The same rows for every mesh, process and run.
    """
    layout = Layout(sequences, sequences_per_step=sequences_per_batch, accumulation=accumulation, mesh=mesh)
    num_rows = min(num_sequences or sequences.num_rows, sequences.num_rows)
    num_batches = -(-num_rows // sequences_per_batch)

    def rows(index: int) -> np.ndarray:
        return held_out_rows(sequences, index, sequences_per_batch, num_rows, order)

    return (batch for _, batch in read_ahead(layout, rows, 0, num_batches, prefetch))


def held_out_rows(
    sequences: Sequences, index: int, sequences_per_batch: int, num_sequences: int, order: str = "shuffled"
) -> np.ndarray:
    """The rows (int64 [B], -1 where the last batch is filled up) of one batch of `held_out_batches`.

    `shuffled`: the batches are the first `num_sequences` rows of one fixed shuffle. `document`: each batch is a run of
    consecutive rows of `document_order`, so that a shard holds few documents and a batch few subjects; the runs begin
    at equal distances over the whole half, which makes them a fair sample, and no row comes twice. The two orders take
    the same rows only when they take all. Raises ValueError for any other order.
    """
    if order not in HELD_OUT_ORDERS:
        raise ValueError(f"order {order!r}: expected one of {', '.join(HELD_OUT_ORDERS)}")
    num_rows = min(num_sequences or sequences.num_rows, sequences.num_rows)
    first = index * sequences_per_batch
    positions = first + np.arange(sequences_per_batch)
    inside = np.minimum(positions, num_rows - 1)
    if order == "document":
        rows = document_order(sequences)[first * sequences.num_rows // num_rows + inside - first]
    else:
        rows = rows_at(inside, sequences.num_rows, EVALUATION_SEED)
    return np.where(positions < num_rows, rows, -1)


@functools.lru_cache(maxsize=2)
def document_order(sequences: Sequences) -> np.ndarray:
    """All rows (int64) by the document that they begin with, in the order of the store, then by the place in it.

    Packing puts the ends of documents, many to a row, behind all rows that one document fills; here such a row stands
    with the document whose end is its first and longest piece, hence among that document's neighbours in the source.
    """
    packing = sequences.packing
    first_piece = packing.row_starts[:-1]
    return np.lexsort((packing.start[first_piece], packing.document[first_piece]))


def read_ahead(
    layout: Layout, rows: Callable[[int], np.ndarray], start: int, stop: int, prefetch: int
) -> Generator[tuple[int, Batch]]:
    """Yields (index, global batch) for start to stop - 1, with up to `prefetch` local parts read by grain's threads.

    An error of a reader is raised here, at its batch. Closing or dropping the iterator ends the threads.
    """
    import grain

    options = grain.ReadOptions(num_threads=min(prefetch, READER_THREADS), prefetch_buffer_size=prefetch)
    reader = grain.MapDataset.range(start, stop).map(lambda index: layout.read(rows(index)))
    iterator = iter(reader.to_iter_dataset(options))
    try:
        for index, local in enumerate(iterator, start=start):
            yield index, layout.place(local)
    finally:
        iterator.close()


def check_same_everywhere(sequences: Sequences) -> None:
    """Raises ConfigError unless every process holds the same rows (another Python version has another stdlib)."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    mine = np.frombuffer(sequences.fingerprint.encode().ljust(128), np.uint8)
    everywhere = multihost_utils.process_allgather(mine)
    different = np.flatnonzero((everywhere != everywhere[0]).any(axis=1)).tolist()
    if different:
        raise ConfigError(f"data: processes {different} found other documents than process 0; all need the same files")
