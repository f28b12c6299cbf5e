"""Writes the routing of steps that have run, off the critical path: a thread fetches it from the devices and stores it.

Letters: M microbatches, N layers, D source shards of the mesh, s those of this process, T tokens of a shard, K choices.

Each process writes the part of its own devices. At most WAITING steps wait to be written, which bounds their device
memory; a run that records faster than its disk writes waits here. What is recorded is decided in `step.py`.
"""

import dataclasses
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ep_jax.config import RunConfig
from ep_jax.data.batches import Layout
from ep_jax.traces.file import NAME, TraceHeader, TraceStep, id_type, write_step

TRACE_FOLDER = "trace"
HELD_OUT_TRACE_FOLDER = "trace_held_out"
WAITING = 2


class Recorder:
    """Records routes into a folder of trace files. Errors of the writing thread are raised by the next call."""

    def __init__(self, config: RunConfig, mesh: Mesh, layout: Layout, folder: Path, source: str):
        self.config, self.layout, self.folder = config, layout, folder
        self.devices = mesh.size
        emulated = config.ep.emulated_shards if config.ep.emulates else 0
        self.shards_of_device = emulated // config.mesh.ep if emulated else 1
        self.header = TraceHeader(
            num_experts=config.router.num_experts,
            sequence_length=config.data.sequence_length,
            ep=emulated or config.mesh.ep,
            source=source,
            # Recorded shard by shard, an emulated group is a group like any other.
            policy=dataclasses.asdict(config.ep) | {"emulated_shards": 0},
        )
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="trace")
        self.waiting: deque[Future] = deque()

    @property
    def step_bytes(self) -> int:
        """Ids and weights of one recorded step over all processes, before compression."""
        tokens = self.layout.shape[0] * self.layout.shape[1] * self.layout.shape[2]
        assignments = self.config.model.num_layers * tokens * self.config.router.experts_per_token
        return assignments * (np.dtype(id_type(self.config.router.num_experts)).itemsize + 4)

    def describe(self) -> str:
        """What is recorded where, on one line."""
        size = f"{self.step_bytes / 1e6:,.1f} MB" if self.step_bytes >= 1e5 else f"{self.step_bytes:,} bytes"
        return f"trace: routing of every {self.config.trace.every}. step into {self.folder}, at most {size} each"

    def forget_after(self, step: int) -> None:
        """Removes what an earlier run recorded after `step`: the run goes on from there.

        Each process removes parts that no other process writes, so none takes away what another has just written.
        """
        for path in self.folder.glob("step_*.npz"):
            match = NAME.fullmatch(path.name)
            mine = match and int(match[2]) % jax.process_count() == jax.process_index()
            if match and mine and int(match[1]) > step:
                path.unlink()

    def record(self, step: int, routes: Any, counts_NPE: Any, rows: np.ndarray) -> None:
        """Records one step: RecordedRoutes [M,N,D*T,K] and its drop counts on the devices, and its rows (int64 [B])."""
        while len(self.waiting) >= WAITING:
            self.waiting.popleft().result()
        self.waiting.append(self.writer.submit(self._write, step, routes, counts_NPE, rows))

    def close(self) -> None:
        """Waits until everything is written; raises what went wrong."""
        try:
            while self.waiting:
                self.waiting.popleft().result()
        finally:
            self.writer.shutdown()

    def _write(self, step: int, routes: Any, counts_NPE: Any, rows: np.ndarray) -> None:
        ids_by_device, weights_by_device = (self._by_device(array) for array in routes)
        devices, split = sorted(ids_by_device), self.shards_of_device
        shards_s = [device * split + i for device in devices for i in range(split)]
        document, position = self.layout.origins(rows)
        document, position = (array.reshape(array.shape[0], len(shards_s), -1) for array in (document, position))
        part = TraceStep(
            header=self.header,
            step=step,
            expert_ids_NMSTK=self._stack(ids_by_device),
            weights_NMSTK=self._stack(weights_by_device),
            valid_MST=document >= 0,
            document_MST=document,
            position_MST=position,
            counts_NPE=np.asarray(counts_NPE),
            shards_S=np.array(shards_s),
        )
        write_step(self.folder, part, index=jax.process_index(), count=jax.process_count())

    def _by_device(self, array: jax.Array) -> dict[int, np.ndarray]:
        """This process's parts of [M, N, D*T, K] by their devices' places in mesh order."""
        tokens = array.shape[2] // self.devices
        return {(piece.index[2].start or 0) // tokens: np.asarray(piece.data) for piece in array.addressable_shards}

    def _stack(self, by_device: dict[int, np.ndarray]) -> np.ndarray:
        """[N,M,s,T,K] in mesh order."""
        parts_MNDTK = np.stack([by_device[device] for device in sorted(by_device)], axis=2)
        microbatches, layers, devices, tokens, choices = parts_MNDTK.shape
        split = (devices * self.shards_of_device, tokens // self.shards_of_device)
        return parts_MNDTK.reshape(microbatches, layers, *split, choices).swapaxes(0, 1)
