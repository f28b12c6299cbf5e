"""The one-sided movements without a GPU: kernels in the interpreter, plain movements, lowering for CUDA.

The interpreter knows no peers. A stand-in lays all shards' buffers out as one array, so a kernel's loops, ring and
order of copies are the real ones, with the race detector on; the exchange itself (barrier, counters, addresses) is
run by tests/gpu/test_gpu_rowwise.py only. Letters: S shards, T tokens of a shard, K choices, N rows of a shard's
buffer, H width.
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.rowwise import op
from ep_jax_kernels.rowwise.exchange import check_devices
from ep_jax_kernels.rowwise.get import GetLaunch, fan_in_maps, get_kernel
from ep_jax_kernels.rowwise.op import KERNELS, PLAIN, Movements
from ep_jax_kernels.rowwise.put import PutLaunch, fan_out_maps, put_kernel
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

S, N, H = 3, 24, 256
AXES = ("replica", "fsdp", "ep")


class StackedPeers:
    """All shards' buffers in one array, [S, ...], on one device."""

    HERE = 1

    def array_of(self, ref, peer):
        return ref.at[peer]

    def here(self):
        return self.HERE

    def mine(self, ref):
        return ref.at[self.HERE]

    def meet(self, worker, workers, *, everybody=False):
        pass


def places_of(rng, tokens, choices, share_of_none):
    """int32 [T,K]: distinct places in [S,N], some -1."""
    places = rng.permutation(S * N)[: tokens * choices].reshape(tokens, choices)
    return np.where(rng.random(places.shape) < share_of_none, -1, places).astype(np.int32)


def interpret(body, out, blocks, groups, scratch, *operands, detect_races=True):
    """The output as float32, with unwritten memory as NaN; fails when the interpreter saw a race."""
    interpreter.reset_gpu_interpret_mode_state()
    kernel = plgpu.kernel(
        body,
        out_type=out,
        grid=(blocks,),
        grid_names=("blocks",),
        num_threads=groups,
        thread_name="group",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams(detect_races=detect_races, uninitialized_memory="nan"),
    )
    result = np.asarray(jax.jit(kernel)(*operands).astype(jnp.float32))
    assert not (detect_races and interpreter.get_races().races_found)
    return result


@pytest.mark.parametrize(
    ("tokens", "choices", "blocks", "groups", "slots", "ahead", "none", "direct"),
    [
        (11, 2, 2, 1, 3, 2, 0.0, False),
        (11, 2, 2, 2, 4, 1, 0.3, False),
        (11, 2, 2, 2, 3, 2, 0.1, True),
        (5, 3, 8, 1, 2, 2, 0.2, True),
        (6, 1, 1, 1, 1, 1, 0.0, False),
    ],
)
def test_put_kernel(tokens, choices, blocks, groups, slots, ahead, none, direct):
    """Uneven shares, blocks without tokens, rings that wrap; only rows with a place are written."""
    rng = np.random.default_rng(tokens)
    places, rows = places_of(rng, tokens, choices, none), bfloat16(rng, tokens, H)
    body = functools.partial(
        put_kernel,
        peers=StackedPeers(),
        tokens=tokens,
        choices=choices,
        num_rows=N,
        blocks=blocks,
        ahead=ahead,
        direct=direct,
    )
    scratch = [plgpu.SMEM((groups, slots, H), jnp.bfloat16), plgpu.Barrier(num_barriers=groups * slots)]
    found = interpret(
        body, jax.ShapeDtypeStruct((S, N, H), jnp.bfloat16), blocks, groups, scratch, rows, places.reshape(-1)
    )
    wanted = np.full((S, N, H), np.nan, np.float32)
    for token in range(tokens):
        for place in places[token]:
            if place >= 0:
                wanted[place // N, place % N] = rows[token].astype(np.float32)
    np.testing.assert_array_equal(found, wanted)


def test_put_kernel_copies_within_the_buffer():
    """Fan-out's second phase, by one worker: rows of the own buffer to other rows of it, after the rows that came."""
    tokens, choices, slots = 9, 2, 4
    rng = np.random.default_rng(0)
    places, rows = places_of(rng, tokens, choices, 0.0), bfloat16(rng, tokens, H)
    arrived = np.sort(places[places // N == StackedPeers.HERE] % N)
    copies = np.full(N, -1, np.int32)
    empty = np.setdiff1d(np.arange(N), arrived)[:7]
    copies[empty] = rng.choice(arrived, empty.size)
    body = functools.partial(
        put_kernel, peers=StackedPeers(), tokens=tokens, choices=choices, num_rows=N, blocks=1, ahead=2, direct=False
    )
    scratch = [plgpu.SMEM((1, slots, H), jnp.bfloat16), plgpu.Barrier(num_barriers=slots)]
    out = jax.ShapeDtypeStruct((S, N, H), jnp.bfloat16)
    # The interpreter counts copies, not groups of copies: of turns that copy nothing it would report races.
    found = interpret(body, out, 1, 1, scratch, rows, places.reshape(-1), copies, detect_races=False)
    found = found.reshape(S * N, H)
    wanted = np.full((S * N, H), np.nan, np.float32)
    wanted[places.reshape(-1)] = np.repeat(rows.astype(np.float32), choices, axis=0)
    mine = wanted[StackedPeers.HERE * N :][:N]
    mine[empty] = mine[copies[empty]]
    np.testing.assert_array_equal(found, wanted)


def test_fan_out_maps():
    """Every row is sent to a peer once, and what is sent and what is copied are together all places."""
    shards, tokens, choices, num_rows = 4, 12, 5, 70
    rng = np.random.default_rng(0)
    places = rng.permutation(shards * num_rows)[: shards * tokens * choices].reshape(shards, tokens, choices)
    places = np.where(rng.random(places.shape) < 0.2, -1, places).astype(np.int32)
    mesh = jax.make_mesh((shards,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    maps = jax.jit(
        jax.shard_map(
            functools.partial(fan_out_maps, num_rows=num_rows, axis="ep"),
            mesh=mesh,
            in_specs=PartitionSpec("ep"),
            out_specs=PartitionSpec("ep"),
        )
    )
    send, copies = (np.asarray(x) for x in maps(places.reshape(-1, choices)))
    send = send.reshape(places.shape)
    found, wanted = np.full((2, shards * num_rows, 2), -1)
    for source in range(shards):
        for token in range(tokens):
            for choice in range(choices):
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


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("tokens", "choices", "blocks", "groups", "slots", "none"),
    [(11, 2, 2, 1, 3, 0.0), (9, 3, 2, 2, 4, 0.3), (4, 1, 6, 1, 1, 0.2)],
)
def test_get_kernel(tokens, choices, blocks, groups, slots, none, weighted):
    """Rows without a place and weights without a row are NaN, and never reach a sum."""
    rng = np.random.default_rng(tokens)
    places, buffers = places_of(rng, tokens, choices, none), bfloat16(rng, S * N, H)
    buffers[np.setdiff1d(np.arange(S * N), places)] = np.nan
    weights = np.where(places < 0, np.nan, rng.random(places.shape)).astype(np.float32)
    body = functools.partial(
        get_kernel,
        peers=StackedPeers(),
        sizes=(choices, choices),
        weighted=weighted,
        skip_empty=False,
        blocks=blocks,
        groups=groups,
    )
    scratch = [plgpu.SMEM((groups, slots, H), jnp.bfloat16), plgpu.Barrier(num_barriers=groups * slots)]
    operands = [buffers.reshape(S, N, H), places.reshape(-1)] + ([weights.reshape(-1)] if weighted else [])
    found = interpret(body, jax.ShapeDtypeStruct((tokens, H), jnp.bfloat16), blocks, groups, scratch, *operands)
    wanted = np.zeros((tokens, H))
    for token in range(tokens):
        for choice, place in enumerate(places[token]):
            if place >= 0:
                wanted[token] += (weights[token, choice] if weighted else 1.0) * buffers[place].astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(found[(places < 0).all(axis=1)], 0)


@pytest.mark.parametrize(("blocks", "groups", "slots", "skip_empty"), [(2, 1, 5, False), (3, 2, 4, True)])
def test_get_kernel_adds_sums_of_peers(blocks, groups, slots, skip_empty):
    """Fan-in: rows with weights and rows of a second array without; tokens without any stay unwritten if asked."""
    tokens, choices, sums = 7, 2, 2
    rng = np.random.default_rng(0)
    places, partial_places = places_of(rng, tokens, choices, 0.3), places_of(rng, tokens, sums, 0.3)
    places[2], partial_places[2] = -1, -1
    buffers, partials = bfloat16(rng, S * N, H), bfloat16(rng, S * N, H)
    weights = rng.random(places.shape).astype(np.float32)
    body = functools.partial(
        get_kernel,
        peers=StackedPeers(),
        sizes=(choices, choices + sums),
        weighted=True,
        skip_empty=skip_empty,
        blocks=blocks,
        groups=groups,
    )
    scratch = [plgpu.SMEM((groups, slots, H), jnp.bfloat16), plgpu.Barrier(num_barriers=groups * slots)]
    all_places = np.concatenate([places, partial_places], axis=1)
    operands = [buffers.reshape(S, N, H), all_places.reshape(-1), weights.reshape(-1), partials.reshape(S, N, H)]
    found = interpret(body, jax.ShapeDtypeStruct((tokens, H), jnp.bfloat16), blocks, groups, scratch, *operands)
    wanted = np.zeros((tokens, H))
    for token in range(tokens):
        for choice, place in enumerate(places[token]):
            wanted[token] += (weights[token, choice] * buffers[place].astype(np.float64)) if place >= 0 else 0
        for place in partial_places[token]:
            wanted[token] += partials[place].astype(np.float64) if place >= 0 else 0
    if skip_empty:
        wanted[2] = np.nan
    np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=2**-9)


def test_fan_in_maps():
    """Own rows and the peers' sums are together all rows of a token; what no token has here is in no sum."""
    shards, tokens, choices, num_rows = 4, 12, 5, 70
    rng = np.random.default_rng(0)
    places = rng.permutation(shards * num_rows)[: shards * tokens * choices].reshape(-1, choices)
    places = np.where(rng.random(places.shape) < 0.2, -1, places).astype(np.int32)
    mesh = jax.make_mesh((shards,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    spec = PartitionSpec("ep")
    maps = jax.jit(
        jax.shard_map(
            functools.partial(fan_in_maps, num_rows=num_rows, axis="ep"), mesh=mesh, in_specs=spec, out_specs=spec
        )
    )
    here, together = (np.asarray(x) for x in maps(places))
    assert here.shape == (shards * (shards - 1) * tokens, choices)
    assert together.shape == (shards * tokens, choices + shards - 1)
    for row, wanted in enumerate(places):
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
    """Against NumPy loops; NaN in every row and weight without a place, and a weight of 0 that has a gradient."""
    shards, tokens, choices, num_rows, width = 4, 6, 3, 23, 8
    rng = np.random.default_rng(0)
    places = rng.permutation(shards * num_rows)[: shards * tokens * choices].reshape(-1, choices)
    places = np.where(rng.random(places.shape) < 0.2, -1, places).astype(np.int32)
    held = np.zeros((shards * num_rows, 1), bool)
    held[places[places >= 0]] = True
    rows, d_out = (rng.normal(size=(shards * tokens, width)).astype(np.float32) for _ in range(2))
    results, d_arrived = (
        np.where(held, rng.normal(size=(shards * num_rows, width)), np.nan).astype(np.float32) for _ in range(2)
    )
    weights = np.where(places < 0, np.nan, rng.random(places.shape)).astype(np.float32)
    weights[1] = np.where(places[1] < 0, np.nan, 0)
    mesh = jax.make_mesh((shards,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])

    def local(rows, results, weights, places, d_arrived, d_out):
        arrived, pull_dispatch = jax.vjp(lambda rows: op.dispatch(rows, places, num_rows, PLAIN), rows)
        out, pull_combine = jax.vjp(
            lambda results, weights: op.combine(results, weights, places, PLAIN), results, weights
        )
        return arrived, out, *pull_dispatch(d_arrived), *pull_combine(d_out)

    spec = PartitionSpec("ep")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    found = [np.asarray(x) for x in step(rows, results, weights, places, d_arrived, d_out)]

    wanted = [
        np.zeros(x.shape) for x in (results, rows, rows, results, weights)
    ]  # arrived, out, d_rows, d_results, d_weights
    for token in range(len(places)):
        for choice, place in enumerate(places[token]):
            if place >= 0:
                result, weight = results[place].astype(np.float64), weights[token, choice].astype(np.float64)
                wanted[0][place] = rows[token]
                wanted[1][token] += weight * result
                wanted[2][token] += d_arrived[place]
                wanted[3][place] = weight * d_out[token]
                wanted[4][token, choice] = d_out[token] @ result
    assert np.abs(wanted[4][1]).max() > 0.1  # the weights of token 1 are 0
    for one, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-5)


def test_collect_and_dispatch_weights():
    """Rows weighted by the experts: plain sums whose gradients are the output's, and weights that travel on their own.

    Places are dropped, weights 0, rows that nobody put NaN in both directions.
    """
    shards, tokens, choices, num_rows, width = 4, 6, 3, 23, 8
    rng = np.random.default_rng(1)
    places = rng.permutation(shards * num_rows)[: shards * tokens * choices].reshape(-1, choices)
    places = np.where(rng.random(places.shape) < 0.3, -1, places).astype(np.int32)
    held = np.zeros(shards * num_rows, bool)
    held[places[places >= 0]] = True
    results = np.where(held[:, None], rng.normal(size=(held.size, width)), np.nan).astype(np.float32)
    d_weights = np.where(held, rng.normal(size=held.size), np.nan).astype(np.float32)
    d_out = rng.normal(size=(shards * tokens, width)).astype(np.float32)
    weights = np.where(rng.random(places.shape) < 0.2, 0, rng.random(places.shape))
    weights = np.where(places < 0, np.nan, weights).astype(np.float32)
    mesh = jax.make_mesh((shards,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])

    def local(results, weights, places, d_out, d_weights):
        out, pull_collect = jax.vjp(lambda results: op.collect(results, places, PLAIN), results)
        row_weights, pull_weights = jax.vjp(
            lambda weights: op.dispatch_weights(weights, places, num_rows, PLAIN), weights
        )
        return out, row_weights, *pull_collect(d_out), *pull_weights(d_weights)

    spec = PartitionSpec("ep")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    out, row_weights, d_results, back = (np.asarray(x) for x in step(results, weights, places, d_out, d_weights))
    wanted_out, wanted_back = np.zeros(d_out.shape), np.zeros(weights.shape)
    for token in range(len(places)):
        for choice, place in enumerate(places[token]):
            if place >= 0:
                wanted_out[token] += results[place].astype(np.float64)
                wanted_back[token, choice] = d_weights[place]
                assert row_weights[place] == weights[token, choice]
                np.testing.assert_array_equal(d_results[place], d_out[token])
    np.testing.assert_allclose(out, wanted_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(back, wanted_back.astype(np.float32))
    np.testing.assert_array_equal(row_weights[~held], 0)


@functools.cache
def lowered(ep, how):
    """The CUDA program of a layer's four movements on an abstract mesh of 2 * ep devices."""
    tokens, choices, num_rows, width = 64, 4, 512, 3072
    mesh = AbstractMesh((1, 2, ep), AXES, axis_types=(AxisType.Auto,) * 3)

    def local(rows, weights, places):
        def layer(rows, weights):
            return op.combine(op.dispatch(rows, places, num_rows, how), weights, places, how)

        out, pull = jax.vjp(layer, rows, weights)
        return out, *pull(rows)

    spec, devices = PartitionSpec(AXES), 2 * ep
    arguments = [
        jax.ShapeDtypeStruct((devices * tokens, *shape), dtype)
        for shape, dtype in (((width,), jnp.bfloat16), ((choices,), jnp.float32), ((choices,), jnp.int32))
    ]
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    return step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("ep", [2, 64])
def test_lowers_for_cuda(ep):
    """Four kernels; rows move by bulk copies without descriptors, and only numbers cross in collectives."""
    text = lowered(ep, KERNELS)
    assert text.count("@mosaic_gpu_v2") == 4
    assert text.count("uses_xla_collective_metadata = true") == 4
    assert text.count("skip_device_barrier = false") == 4
    assert "cp.async.bulk.global.shared::cta" in text
    assert "cp.async.bulk.shared::cta.global" in text
    assert "cp.async.bulk.tensor" not in text
    gathered = [
        list(map(int, shape.split("x")))
        for shape in re.findall(r'"stablehlo.all_gather".*?-> tensor<([\dx]+)x\w', text)
    ]
    assert len(gathered) == 3  # places and weights to the rows, gradients of weights back
    assert all(len(shape) < 2 or shape[-1] < 3072 for shape in gathered)


def test_nothing_is_unrolled_over_peers():
    assert abs(len(lowered(2, KERNELS)) - len(lowered(64, KERNELS))) < 2000


def test_fans_lower_for_cuda():
    """Two PUTs, two GETs, and a sum on the peers' side before each GET, which no peer touches."""
    text = lowered(2, Movements(put=PutLaunch(fan_out=True), get=GetLaunch(fan_in=True)))
    assert text.count("uses_xla_collective_metadata = true") == 4
    assert text.count("uses_xla_collective_metadata = false") == 2


def test_errors():
    """A wrong call is a ValueError, rows that kernels cannot move a NotImplementedError; both before compilation."""
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("ep")

    def trace(function, *shapes):
        arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)).trace(*arguments)

    rows, places, weights = ((8, 256), jnp.bfloat16), ((8, 2), jnp.int32), ((8, 2), jnp.float32)
    put = lambda how, num_rows=16: lambda rows, places: op.put(rows, places, num_rows, how)  # noqa: E731
    with pytest.raises(ValueError, match="place_TK is float32"):
        trace(put(PLAIN), rows, weights)
    with pytest.raises(ValueError, match="rows_TH has shape"):
        trace(put(PLAIN), ((6, 256), jnp.bfloat16), places)
    with pytest.raises(ValueError, match="fewer than 2"):
        trace(put(PLAIN, 2**30), rows, places)
    with pytest.raises(ValueError, match="weights_TK has shape"):
        trace(lambda rows, weights, places: op.get(rows, weights, places, PLAIN), rows, ((8, 3), jnp.float32), places)
    with pytest.raises(NotImplementedError, match="rows of 200 bfloat16"):
        trace(put(KERNELS), ((8, 200), jnp.bfloat16), places)
    with pytest.raises(NotImplementedError, match="rows of int32"):
        trace(put(KERNELS), ((8, 256), jnp.int32), places)
    many = Movements(put=PutLaunch(), get=GetLaunch())
    with pytest.raises(NotImplementedError, match="32 rows of 16384 bytes"):
        trace(lambda rows, places: op.get(rows, None, places, many), ((8, 8192), jnp.bfloat16), ((8, 32), jnp.int32))


def test_devices_are_refused_by_what_they_lack(monkeypatch):
    h200 = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    a100 = types.SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
    check_devices([h200] * 8)
    for devices, reason in (
        (jax.devices(), "on cpu: need NVIDIA GPUs"),
        ([h200, a100], "on NVIDIA A100: need"),
        ([h200] * 9, "mesh of 9 GPUs: at most 8"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            check_devices(devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="with 2 processes: ncclGetPeerDevicePointer failed"):
        check_devices([h200] * 2)


def bfloat16(rng, *shape):
    return rng.normal(size=shape).astype(jnp.bfloat16)
