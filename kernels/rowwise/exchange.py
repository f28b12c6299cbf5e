"""How one-sided kernels reach the arrays of their peers, and the order in which everybody may touch them.

Letters: S shards of the axis. A kernel of this folder runs on all GPUs of the mesh at once, as one custom call of a
program that all of them execute. Its peers' operands and outputs are reached through the table of their addresses
that XLA exchanges for every execution and hands to the kernel; a peer is an index into that table, computed on the
device, so nothing is unrolled over peers and no TMA descriptor names one.

The rule: **a peer touches an array of mine only between the start and the end of my own call.** For XLA, which knows
nothing of peers, each call is then an ordinary operation that reads its operands and writes its outputs, and whatever
XLA does with the buffers before and after (reuse, rematerialisation, loop bodies, donation, the next layer's call) is
right for the same reason as for any other operation.

* Start: before each such kernel XLA runs a barrier of all GPUs on the same stream (we do not ask it to skip it). Past
  it, everything that any GPU queued before the call is done: operands are complete, and an output's memory has no
  earlier user left. Nothing is written to or read from a peer before.
* End: a block counts itself finished on its own GPU when its last row has arrived (PUT: the bulk stores are complete,
  not only read out of shared memory; GET: the rows lie in shared memory). The first block waits for all blocks of its
  GPU, then tells every peer, then waits until every peer has told it. The kernel, hence the call, ends after that: no
  peer still writes my output or reads my operand. Signals are released and acquired at system scope.
* Only the first block of a GPU ever waits for a peer, and only after its own rows; all others run to their end. A
  grid larger than the GPU, or a GPU that shares its multiprocessors with NCCL or a matmul, delays but cannot
  deadlock. The exception is a PUT with fan-out, whose blocks all wait for the peers half-way: its grid is small
  enough to be on the GPU at once and to leave multiprocessors to NCCL, whose kernels may be waiting for peers in
  their turn. After that wait a block touches its own GPU's output only, so nobody waits a second time.
* Counters are zeroed by XLA before the barrier and belong to one call, so calls do not share state.
* No collective of the program can stand in for a start. A PUT depends on an all-gather, so every GPU has begun that
  all-gather when the PUT runs; but what a peer runs in between (from counts to places) has its temporaries where XLA
  likes, also in the memory that becomes the PUT's output. Only a wait that XLA puts directly before the call, after
  its memory was given to it, tells that the memory is free. For a GET the peers' operands come from a product that
  was queued after every earlier collective.
* No end can be left to the next start either. An operand of a GET is dead for XLA when its own GPU is done with the
  call, and the operation that follows may overwrite it; nothing obliges that operation to be one of this folder.

What the caller owes: every GPU of the mesh makes the same calls in the same order (no `lax.cond` on a value that
differs between devices), and two rows never go to one place. Rows that nobody puts stay unwritten, and may be
anything.

Waiting is bounded: when a counter has not come within about ten seconds of polling, although all peers have passed
the barrier, the kernel traps and the CUDA error ends the program. A peer that never reaches the barrier is beyond the
kernel: XLA's own rendezvous ends the process when a host does not come, and a stream that stands still is for a
watchdog on the host.

What is known of the machinery below (read in jaxlib's sources, seen on 2 H200 with JAX 0.11.2): the table holds 8
peers, so a larger mesh lowers and compiles but is refused here; all GPUs of the mesh must reach each other by NVLink;
JAX refuses a mesh whose devices are not in row-major order. XLA's barrier takes 5 microseconds when nobody is late.
With one GPU per process the first call ends in "NCCL operation ncclGetPeerDevicePointer(win_, 0, peer.value(),
&peer_addr) failed: unhandled system error", so several processes are refused too; settings of NCCL have not been
tried.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import call

MOST_PEERS = 8  # of XLA's table of addresses
MOST_POLLS = 1 << 24  # of a counter in global memory, at 0.6 us or more each
SHARED_BYTES = 220 * 1024  # of a Hopper block's 227 KiB; the rest is for barriers and Mosaic itself
WARPGROUP = 128  # threads
MOST_SLOTS = 32  # Mosaic keeps one bit of state per barrier in a 32-bit word


def check_devices(devices: Sequence[Any]) -> None:
    """Raises NotImplementedError, naming what is missing, unless one-sided kernels can run on all devices of a mesh."""
    for device in devices:
        if device.platform != "gpu" or float(device.compute_capability) < 9:
            raise NotImplementedError(
                f"one-sided row movements on {device.device_kind}: need NVIDIA GPUs from Hopper on"
            )
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"one-sided row movements with {jax.process_count()} processes: ncclGetPeerDevicePointer failed on H200 "
            "with one GPU per process (JAX 0.11.2, NCCL 2.28.9); run all GPUs in one process"
        )
    if len(devices) > MOST_PEERS:
        raise NotImplementedError(f"one-sided row movements on a mesh of {len(devices)} GPUs: at most {MOST_PEERS}")


@dataclasses.dataclass(frozen=True)
class Peers:
    """The shards of a mesh axis, as seen inside a kernel."""

    axis: str
    shards: int

    def array_of(self, ref: Any, peer: jax.Array) -> Any:
        """The peer's array that corresponds to `ref`, an operand or output of the kernel."""
        place: Any = {self.axis: peer}
        return ref if self.shards == 1 else plgpu.remote_ref(ref, place)

    def mine(self, ref: Any) -> Any:
        """This shard's own array."""
        return ref

    def meet(self, worker: jax.Array, workers: int, *, everybody: bool = False) -> None:
        """Called once by every worker after its part; worker 0 returns when all workers of all shards have called.

        With `everybody` all workers wait for that and then see what peers wrote; all must be on the GPU together.
        """
        if self.shards == 1:
            return
        finished = pl.get_global(plgpu.SemaphoreType.REGULAR)
        told = pl.get_global(plgpu.SemaphoreType.REGULAR)
        pl.semaphore_signal(finished, 1)

        @pl.when(worker == 0)
        def _():
            _wait(finished, workers)

            @pl.loop(0, self.shards)
            def _(peer):
                pl.semaphore_signal(told, 1, device_id={self.axis: peer})

            if not everybody:
                _wait(told, self.shards)

        if everybody:
            _wait(told, self.shards)
            _see_what_peers_wrote()


def _wait(counter: Any, value: int) -> None:
    polls = lax.while_loop(
        lambda polls: (pl.semaphore_read(counter) < value) & (polls < MOST_POLLS), lambda polls: polls + 1, jnp.int32(0)
    )
    pl.when(polls >= MOST_POLLS)(_trap)


@plgpu.inline_mgpu()
def _trap(_):
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "trap;", "", has_side_effects=True)


@plgpu.inline_mgpu()
def _see_what_peers_wrote(_):
    # Counters are read by ordinary loads, rows by bulk copies: another path to memory, ordered only by this.
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.proxy.async;", "", has_side_effects=True)


@dataclasses.dataclass(frozen=True)
class Share:
    """One worker's tokens: `count` from `first` on."""

    first: jax.Array
    count: jax.Array


def share_of(worker: jax.Array, workers: int, tokens: int) -> Share:
    """Consecutive tokens, as even as whole tokens allow."""
    most = -(-tokens // workers)
    first = worker * most
    return Share(first, jnp.clip(tokens - first, 0, most))


def find_place(place: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(peer, row) of a place in [S, rows]."""
    return lax.div(place, jnp.int32(rows)), lax.rem(place, jnp.int32(rows))


def row_layout(width: int, dtype: Any) -> Any:
    """A row over the threads of a warpgroup, 16 bytes at a time where the width allows it."""
    most = 16 // jnp.dtype(dtype).itemsize
    vector = next(length for length in (8, 4, 2) if length <= most and width % (length * WARPGROUP) == 0)
    return plgpu.Layout.WG_STRIDED((width,), vec_size=vector)


def slots_that_fit(wanted: int, row_bytes: int) -> int:
    """Rows of a worker's ring: as many as wanted, or as shared memory holds."""
    return min(wanted, MOST_SLOTS, SHARED_BYTES // row_bytes)


def launch_kernel(
    name: str,
    body: Callable[..., None],
    *operands: jax.Array,
    out: jax.ShapeDtypeStruct,
    blocks: int,
    groups: int,
    slots: int,
    **static: Any,
) -> jax.Array:
    """Runs body(*refs, **static) over `blocks` blocks of `groups` warpgroups; refs: operands, out, ring, loaded.

    ring: shared memory for `slots` rows of each warpgroup; loaded: a barrier for each. The output varies as the first
    operand does.
    """
    kernel = call.traced_once(_make_kernel, name, body, out, blocks, groups, slots, tuple(static.items()))
    return call.vary_alike(kernel(*operands), operands[0])[0]


def _make_kernel(name, body, out, blocks, groups, slots, static):
    return plgpu.kernel(
        functools.partial(body, **dict(static)),
        out_type=out,
        grid=(blocks,),
        grid_names=("blocks",),
        num_threads=groups,
        thread_name="group",
        kernel_name=name,
        scratch_types=[
            plgpu.SMEM((groups, slots, out.shape[1]), out.dtype),
            plgpu.Barrier(num_barriers=groups * slots),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
