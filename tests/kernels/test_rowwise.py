"""The one-sided movements without a GPU: kernels in the interpreter, and plain movements.

The interpreter knows no peers, so a stand-in makes them: one launch has the blocks of all shards, all running at once,
and their buffers lie in one array. A kernel's loops, ring and order of copies are the real ones, with the race detector
on; counters and addresses of the exchange itself are run by tests/gpu/test_gpu_rowwise.py only. Letters: S shards,
T tokens of a shard, K choices, N rows of a shard's buffer, H width, J rows that GET adds up.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.rowwise import op
from ep_jax_kernels.rowwise.get import fan_in_maps, get_kernel
from ep_jax_kernels.rowwise.op import PLAIN, RouteMap
from ep_jax_kernels.rowwise.put import fan_out_maps, put_kernel
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

H = 256
AXES = ("replica", "fsdp", "ep")
COMMIT = 1 << 20  # stands for a commit where the interpreter sees a wait for that many groups


@dataclasses.dataclass(frozen=True)
class StackedPeers:
    """Peers inside a launch of all shards, whose arrays are [S, ...]."""

    met: tuple[Any, ...]  # a barrier along each axis of the launch; passing both, a worker has met all others
    alone: bool = False  # a launch that reaches into no peer

    def array_of(self, ref, peer):
        return self.mine(ref) if self.alone else ref.at[peer]

    def here(self):
        return lax.axis_index("shards")

    def mine(self, ref):
        return ref.at[self.here()]

    def meet(self, worker, workers, *, everybody=False):
        if everybody:
            for met in self.met:
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)


@pytest.fixture(autouse=True)
def groups_of_copies(monkeypatch):
    """Lets the interpreter wait for groups of copies, as a GPU does; by itself it takes every copy for a group."""
    issue, wait = GPUSharedMemory.add_copy_smem_to_gmem_clocks, GPUSharedMemory.wait_smem_to_gmem
    issued, ends = collections.Counter(), collections.defaultdict(list)  # by worker: copies, copies at each group's end

    def count_and_issue(self, thread, *clocks):
        issued[thread] += 1
        issue(self, thread, *clocks)

    def wait_for_groups(self, thread, n, wait_read_only):
        if n == COMMIT:
            ends[thread].append(issued[thread])
        else:
            complete = ends[thread][-n - 1] if n < len(ends[thread]) else 0
            wait(self, thread, issued[thread] - complete, wait_read_only)

    monkeypatch.setattr(GPUSharedMemory, "add_copy_smem_to_gmem_clocks", count_and_issue)
    monkeypatch.setattr(GPUSharedMemory, "wait_smem_to_gmem", wait_for_groups)
    monkeypatch.setattr(plgpu, "commit_smem_to_gmem_group", functools.partial(plgpu.wait_smem_to_gmem, COMMIT))


def interpret(body, out, shards, blocks, groups, slots, *operands):
    """The output as float32, with unwritten memory as NaN; fails when the interpreter saw a race.

    body(peers, *refs) runs in all workers of all shards at once.
    """
    interpreter.reset_gpu_interpret_mode_state()
    kernel = plgpu.kernel(
        lambda *refs: body(StackedPeers(refs[-2:]), *refs[:-2]),
        out_type=jax.ShapeDtypeStruct(out, jnp.bfloat16),
        cluster=(shards, blocks),
        cluster_names=("shards", "blocks"),
        num_threads=groups,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((groups, slots, H), jnp.bfloat16),
            plgpu.Barrier(num_barriers=groups * slots),
            plgpu.ClusterBarrier(collective_axes=("shards",), num_arrivals=groups),
            plgpu.ClusterBarrier(collective_axes=("blocks",), num_arrivals=groups),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
    )
    result = np.asarray(jax.jit(kernel)(*operands).astype(jnp.float32))
    assert not interpreter.get_races().races_found
    return result


def interpret_put(rows_STH, maps, num_rows, blocks, groups, slots, ahead):
    """[S,N,H]; maps are places [S,T,K] and, with fan-out, copies [S,N]."""
    (shards, tokens, width), choices = rows_STH.shape, maps[0].shape[2]

    def body(peers, rows, *refs):
        *maps, out, ring, loaded = refs
        put_kernel(
            *map(peers.mine, (rows, *maps)),
            out,
            ring,
            loaded,
            peers=peers,
            tokens=tokens,
            choices=choices,
            num_rows=num_rows,
            ahead=ahead,
        )

    flat = [array.reshape(shards, -1) for array in maps]
    return interpret(body, (shards, num_rows, width), shards, blocks, groups, slots, rows_STH, *flat)


def interpret_get(buffers_SNH, places_STJ, blocks, groups, slots, partial_SAH=None, *, sums=0, alone=False):
    """[S,T,H]; the last `sums` places are in partial_SAH, and a shard `alone` reads its own buffer only."""
    shards, tokens, _ = places_STJ.shape

    def body(peers, rows, places, *refs):
        *partial, out, ring, loaded = refs
        get_kernel(
            rows,
            peers.mine(places),
            *partial,
            peers.mine(out),
            ring,
            loaded,
            peers=dataclasses.replace(peers, alone=alone),
            sums=sums,
            skip_empty=alone,
        )

    operands = [buffers_SNH, places_STJ.reshape(shards, -1)] + ([] if partial_SAH is None else [partial_SAH])
    return interpret(body, (shards, tokens, buffers_SNH.shape[2]), shards, blocks, groups, slots, *operands)


def places_of(rng, shards, tokens, choices, num_rows, share_of_none):
    """int32 [S,T,K]: distinct places in [S,N], some -1."""
    places = rng.permutation(shards * num_rows)[: shards * tokens * choices].reshape(shards, tokens, choices)
    return np.where(rng.random(places.shape) < share_of_none, -1, places).astype(np.int32)


def bfloat16(rng, *shape):
    return rng.normal(size=shape).astype(jnp.bfloat16)


def put_by_loops(rows_STH, places_STK, num_rows):
    """[S,N,H], NaN where nobody puts."""
    shards, _, width = rows_STH.shape
    wanted = np.full((shards * num_rows, width), np.nan, np.float32)
    for source, token, choice in np.ndindex(places_STK.shape):
        if (place := places_STK[source, token, choice]) >= 0:
            wanted[place] = rows_STH[source, token].astype(np.float32)
    return wanted.reshape(shards, num_rows, width)


def sum_by_loops(buffers_SNH, places_STK):
    """float64 [S,T,H]."""
    rows, wanted = buffers_SNH.reshape(-1, buffers_SNH.shape[2]), np.zeros((*places_STK.shape[:2], H))
    for source, token, choice in np.ndindex(places_STK.shape):
        if (place := places_STK[source, token, choice]) >= 0:
            wanted[source, token] += rows[place].astype(np.float64)
    return wanted


def make_maps(function, places_STK, num_rows):
    """What every shard computes from all places, each array [S*..., ...]."""
    shards, spec = len(places_STK), PartitionSpec("ep")

    def local(places_1TK):
        return function(lax.all_gather(places_1TK[0], "ep"), num_rows=num_rows, axis="ep")

    step = jax.jit(jax.shard_map(local, mesh=mesh_of(shards), in_specs=spec, out_specs=spec))
    return [np.asarray(array) for array in step(places_STK)]


def mesh_of(shards):
    return jax.make_mesh((shards,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])


@pytest.mark.parametrize(
    ("shards", "tokens", "choices", "blocks", "groups", "slots", "ahead", "none"),
    [
        (3, 11, 2, 2, 1, 3, 2, 0.0),
        (2, 11, 2, 2, 2, 4, 1, 0.3),
        (3, 9, 2, 2, 2, 3, 2, 0.1),
        (2, 5, 3, 8, 1, 2, 2, 0.2),
        (4, 6, 1, 1, 1, 1, 1, 0.0),
    ],
)
def test_put_kernel(shards, tokens, choices, blocks, groups, slots, ahead, none):
    """Uneven shares, blocks without tokens, rings that wrap; only rows with a place are written."""
    rng, num_rows = np.random.default_rng(tokens), tokens * choices + 2
    places, rows = places_of(rng, shards, tokens, choices, num_rows, none), bfloat16(rng, shards, tokens, H)
    found = interpret_put(rows, [places], num_rows, blocks, groups, slots, ahead)
    np.testing.assert_array_equal(found, put_by_loops(rows, places, num_rows))


@pytest.mark.parametrize(
    ("shards", "blocks", "groups", "slots", "ahead"),
    [(2, 2, 2, 3, 2), (2, 1, 1, 4, 2), (4, 2, 1, 2, 1), (8, 1, 1, 3, 2)],
)
def test_put_with_fan_out(shards, blocks, groups, slots, ahead):
    """The same rows in the same places: each crosses to a peer once, and the peer copies it, after all have come."""
    tokens, choices, num_rows = 5, 6, 36
    rng = np.random.default_rng(shards)
    places, rows = places_of(rng, shards, tokens, choices, num_rows, 0.2), bfloat16(rng, shards, tokens, H)
    send, copies = make_maps(fan_out_maps, places, num_rows)
    send, copies = send.reshape(places.shape), copies.reshape(shards, num_rows)
    assert (copies >= 0).any()
    found = interpret_put(rows, [send, copies], num_rows, blocks, groups, slots, ahead)
    np.testing.assert_array_equal(found, put_by_loops(rows, places, num_rows))


def test_the_race_detector_sees_copies_that_do_not_wait(monkeypatch):
    """Of fan-out without its meeting: the detector covers rows that a peer writes."""
    shards, tokens, choices, num_rows = 2, 7, 5, 40
    rng = np.random.default_rng(shards)
    places, rows = places_of(rng, shards, tokens, choices, num_rows, 0.2), bfloat16(rng, shards, tokens, H)
    send, copies = make_maps(fan_out_maps, places, num_rows)
    monkeypatch.setattr(StackedPeers, "meet", lambda *args, **options: None)
    maps = [send.reshape(places.shape), copies.reshape(shards, -1)]

    def race_is_seen():
        try:
            interpret_put(rows, maps, num_rows, 1, 1, 4, 2)
        except AssertionError as error:
            return "races_found" in str(error)
        return False

    # Shards are threads: on a busy machine one may be done before the other begins, and nothing has met.
    assert any(race_is_seen() for _ in range(10))


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_fan_out_maps(shards):
    """Every row is sent to a peer once, and what is sent and what is copied are together all places."""
    tokens, choices, num_rows = 12, 5, 70
    places = places_of(np.random.default_rng(0), shards, tokens, choices, num_rows, 0.2)
    send, copies = make_maps(fan_out_maps, places, num_rows)
    send = send.reshape(places.shape)
    found, wanted = np.full((2, shards * num_rows, 2), -1)
    for source, token, choice in np.ndindex(places.shape):
        if places[source, token, choice] >= 0:
            wanted[places[source, token, choice]] = source, token
        if send[source, token, choice] >= 0:
            found[send[source, token, choice]] = source, token
        peers = send[source, token][send[source, token] >= 0] // num_rows
        away = peers[peers != source]
        assert len(set(away)) == len(away)
    assert (found < wanted).any()
    for peer in range(shards):
        mine, copy = found[peer * num_rows :][:num_rows], copies[peer * num_rows :][:num_rows]
        assert (mine[copy >= 0] == -1).all()
        mine[copy >= 0] = mine[copy[copy >= 0]]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("shards", "tokens", "choices", "blocks", "groups", "slots", "none"),
    [(3, 11, 2, 2, 1, 3, 0.0), (2, 9, 3, 2, 2, 4, 0.3), (4, 4, 1, 6, 1, 1, 0.2)],
)
def test_get_kernel(shards, tokens, choices, blocks, groups, slots, none):
    """Rows without a place are NaN, and never reach a sum."""
    rng, num_rows = np.random.default_rng(tokens), tokens * choices + 2
    places = places_of(rng, shards, tokens, choices, num_rows, none)
    buffers = bfloat16(rng, shards * num_rows, H)
    buffers[np.setdiff1d(np.arange(shards * num_rows), places)] = np.nan
    buffers = buffers.reshape(shards, num_rows, H)
    found = interpret_get(buffers, places, blocks, groups, slots)
    np.testing.assert_allclose(found, sum_by_loops(buffers, places), rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(found[(places < 0).all(axis=2)], 0)


@pytest.mark.parametrize(("shards", "blocks", "groups", "slots"), [(2, 2, 2, 5), (4, 2, 1, 9), (8, 1, 1, 11)])
def test_get_with_fan_in(shards, blocks, groups, slots):
    """Sums that peers make, then own rows and those sums; a peer's token without a row there stays unwritten."""
    tokens, choices, num_rows = 3, 4, 16
    rng = np.random.default_rng(shards)
    places = places_of(rng, shards, tokens, choices, num_rows, 0.3)
    places[1, 2] = -1
    buffers = bfloat16(rng, shards * num_rows, H)
    buffers[np.setdiff1d(np.arange(shards * num_rows), places)] = np.nan
    buffers = buffers.reshape(shards, num_rows, H)
    here, together = make_maps(fan_in_maps, places, num_rows)
    here, together = here.reshape(shards, -1, choices), together.reshape(shards, tokens, -1)
    partial = interpret_get(buffers, here, blocks, groups, slots, alone=True)
    np.testing.assert_array_equal(np.isnan(partial).any(axis=2), (here < 0).all(axis=2))
    partial = partial.astype(jnp.bfloat16)
    found = interpret_get(buffers, together, blocks, groups, slots, partial, sums=shards - 1)
    # A bfloat16 is off by 2^-9 of it at most; a token has few peers whose sums are rounded once more.
    np.testing.assert_allclose(found, sum_by_loops(buffers, places), rtol=2**-8, atol=2**-5)
    np.testing.assert_array_equal(found[1, 2], 0)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_fan_in_maps(shards):
    """Own rows and the peers' sums are together all rows of a token; what no token has here is in no sum."""
    tokens, choices, num_rows = 12, 5, 70
    places_STK = places_of(np.random.default_rng(0), shards, tokens, choices, num_rows, 0.2)
    here, together = make_maps(fan_in_maps, places_STK, num_rows)
    assert here.shape == (shards * (shards - 1) * tokens, choices)
    assert together.shape == (shards * tokens, choices + shards - 1)
    for row, wanted in enumerate(places_STK.reshape(-1, choices)):
        own, sums = together[row, :choices], together[row, choices:]
        assert (own[own >= 0] // num_rows == row // tokens).all()
        found = list(own[own >= 0])
        for place in sums[sums >= 0]:
            peer = place // ((shards - 1) * tokens)
            assert peer != row // tokens
            assert (here[place] >= 0).any()
            found += [peer * num_rows + one for one in here[place] if one >= 0]
        assert sorted(found) == sorted(wanted[wanted >= 0])


def test_plain_movements_and_derivatives():
    """Against NumPy loops: places dropped, weights 0, NaN in every row and weight without a place, both ways."""
    shards, tokens, choices, num_rows, width = 4, 6, 3, 23, 8
    rng = np.random.default_rng(1)
    places = places_of(rng, shards, tokens, choices, num_rows, 0.3).reshape(-1, choices)
    held = np.zeros(shards * num_rows, bool)
    held[places[places >= 0]] = True
    rows, d_out = (rng.normal(size=(len(places), width)).astype(np.float32) for _ in range(2))
    results, d_arrived = (
        np.where(held[:, None], rng.normal(size=(held.size, width)), np.nan).astype(np.float32) for _ in range(2)
    )
    d_weights = np.where(held, rng.normal(size=held.size), np.nan).astype(np.float32)
    weights = np.where(rng.random(places.shape) < 0.2, 0, rng.random(places.shape))
    weights = np.where(places < 0, np.nan, weights).astype(np.float32)

    def local(rows, results, weights, places, d_arrived, d_out, d_weights):
        everybody = [lax.all_gather(array, "ep") for array in (places, weights)]
        route = RouteMap(places)
        arrived, pull_dispatch = jax.vjp(lambda rows: op.dispatch(rows, route, num_rows, PLAIN), rows)
        out, pull_collect = jax.vjp(lambda results: op.collect(results, route, PLAIN), results)
        row_weights, pull_weights = jax.vjp(
            lambda weights: op.dispatch_weights(weights, everybody[1], places, everybody[0], num_rows, "ep"), weights
        )
        return arrived, out, row_weights, *pull_dispatch(d_arrived), *pull_collect(d_out), *pull_weights(d_weights)

    spec = PartitionSpec("ep")
    step = jax.jit(jax.shard_map(local, mesh=mesh_of(shards), in_specs=spec, out_specs=spec))
    found = [np.asarray(array) for array in step(rows, results, weights, places, d_arrived, d_out, d_weights)]
    wanted = [np.zeros(array.shape) for array in (results, rows, d_weights, rows, results, weights)]
    for token, choice in np.ndindex(places.shape):
        if (place := places[token, choice]) >= 0:
            wanted[0][place] = rows[token]
            wanted[1][token] += results[place]
            wanted[2][place] = weights[token, choice]
            wanted[3][token] += d_arrived[place]
            wanted[4][place] = d_out[token]
            wanted[5][token, choice] = d_weights[place]
    for index, (one, right) in enumerate(zip(found, wanted, strict=True)):
        check = np.testing.assert_allclose if index in (1, 3) else np.testing.assert_array_equal
        check(one, right.astype(np.float32), **({"rtol": 1e-5, "atol": 1e-5} if index in (1, 3) else {}))
