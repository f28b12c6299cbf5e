"""The one-sided movements lowered for CUDA, what they keep for the backward pass, and what they refuse; nothing runs.

Letters as in test_rowwise.py.
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import pytest
from ep_jax_kernels import call
from ep_jax_kernels.rowwise import op, put
from ep_jax_kernels.rowwise.exchange import check_devices
from ep_jax_kernels.rowwise.get import GetLaunch
from ep_jax_kernels.rowwise.op import KERNELS, PLAIN, Movements, RouteMap
from ep_jax_kernels.rowwise.put import PutLaunch
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tests.programs import inlined

AXES = ("replica", "fsdp", "ep")


@functools.cache
def lowered(ep, how):
    """The CUDA program of a layer's four movements on an abstract mesh of 2 * ep devices."""
    tokens, choices, num_rows, width = 64, 4, 512, 3072
    mesh = AbstractMesh((1, 2, ep), AXES, axis_types=(AxisType.Auto,) * 3)

    def local(rows, places):
        route = (
            RouteMap(places) if how is KERNELS else op.route_map(places, lax.all_gather(places, "ep"), num_rows, how)
        )
        out, pull = jax.vjp(lambda rows: op.collect(op.dispatch(rows, route, num_rows, how), route, how), rows)
        return out, *pull(rows)

    spec, devices = PartitionSpec(AXES), 2 * ep
    arguments = [
        jax.ShapeDtypeStruct((devices * tokens, last), dtype)
        for last, dtype in ((width, jnp.bfloat16), (choices, jnp.int32))
    ]
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    return inlined(step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("ep", [2, 64])
def test_lowers_for_cuda(ep):
    """Four kernels behind a barrier each; rows move by bulk copies without descriptors, nothing by collectives."""
    text = lowered(ep, KERNELS)
    assert text.count("@mosaic_gpu_v2") == 4
    assert text.count("uses_xla_collective_metadata = true") == 4
    assert text.count("skip_device_barrier = false") == 4
    assert "cp.async.bulk.global.shared::cta" in text
    assert "cp.async.bulk.shared::cta.global" in text
    assert "cp.async.bulk.tensor" not in text
    assert "stablehlo.all_gather" not in text


@pytest.mark.parametrize("ep", [1, 2])
def test_no_launch_asks_for_nvshmem(ep):
    """XLA has none; what a kernel needs of its peers comes with the call, and alone it needs nothing."""
    text = lowered(ep, op.FANS)
    assert "nvshmem" not in text
    assert text.count("uses_xla_collective_metadata = true") == (0 if ep == 1 else 4)


def test_layers_share_their_kernels():
    """Mosaic compiles a kernel once for each text, which names the layer where the kernel is not a function."""
    mesh, how = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]), op.FANS

    def local(rows, places):
        def layers(rows):
            for layer in range(3):
                with jax.named_scope(f"layer_{layer}"):
                    route = op.route_map(places, lax.all_gather(places, "ep"), 64, how)
                    rows = op.collect(op.dispatch(rows, route, 64, how), route, how)
            return rows

        out, pull = jax.vjp(layers, rows)
        return out, *pull(rows)

    spec = PartitionSpec("ep")
    arguments = (jax.ShapeDtypeStruct((32, 256), jnp.bfloat16), jax.ShapeDtypeStruct((32, 4), jnp.int32))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert len(set(re.findall(r'kernel_hash = "([^"]*)"', text))) == 3  # PUT, GET and the sum before it
    assert inlined(text).count("@mosaic_gpu_v2") == 3 * 6


def test_nothing_is_unrolled_over_peers():
    assert abs(len(lowered(2, KERNELS)) - len(lowered(64, KERNELS))) < 2000


def test_long_rows_cross_without_fan_in():
    """A token's rows and its peers' sums would not fit into shared memory together; rows alone do."""
    mesh = AbstractMesh((8,), ("ep",), axis_types=(AxisType.Auto,))

    def local(rows, places):
        route = op.route_map(places, lax.all_gather(places, "ep"), len(rows), op.FANS)
        return op.collect(rows, route, op.FANS)

    spec = PartitionSpec("ep")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    kernels = {}
    for width in (3072, 8192):
        arguments = jax.ShapeDtypeStruct((512, width), jnp.bfloat16), jax.ShapeDtypeStruct((64, 8), jnp.int32)
        text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        kernels[width] = set(re.findall(r"rowwise_(\w+)_mosaic_gpu", text))
    assert kernels == {3072: {"get", "sum"}, 8192: {"get"}}


def test_blocks_that_wait_for_each_other_fit_on_the_gpu(monkeypatch):
    """All blocks of a PUT with fan-out wait half-way, so there are fewer than multiprocessors."""
    made = []
    monkeypatch.setattr(put, "launch_kernel", lambda *args, **options: made.append(options["blocks"]))
    for multiprocessors in (132, 78):
        monkeypatch.setattr(call, "multiprocessors", lambda count=multiprocessors: count)
        for fan_out in (put.FanOut(jnp.zeros((8, 2), jnp.int32), jnp.zeros(16, jnp.int32)), None):
            rows, places = jnp.zeros((8, 256), jnp.bfloat16), jnp.zeros((8, 2), jnp.int32)
            jax.vmap(lambda _: put.put_rows(rows, places, fan_out, 16, "ep", op.FANS.put), axis_name="ep")(jnp.zeros(2))  # noqa: B023
    assert made == [96, 96, 42, 96]


def test_the_backward_pass_keeps_only_the_maps_it_reads():
    mesh, choices = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]), 3

    def local(rows, places):
        route = op.route_map(places, lax.all_gather(places, "ep"), 64, op.FANS)
        _, pull = jax.vjp(lambda rows: op.dispatch(rows, route, 64, PLAIN), rows)
        _, pull_sum = jax.vjp(lambda rows: op.collect(rows, route, PLAIN), jnp.zeros((64, 256), rows.dtype))
        kept.extend([sorted({leaf.size for leaf in jax.tree.leaves(one)}) for one in (pull, pull_sum)])
        return rows

    kept: list[list[int]] = []
    spec = PartitionSpec("ep")
    arguments = jax.ShapeDtypeStruct((32, 256), jnp.bfloat16), jax.ShapeDtypeStruct((32, choices), jnp.int32)
    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)).trace(*arguments)
    tokens, peers = 32 // 4, 3
    places = tokens * choices
    assert kept[0] == sorted({places, peers * places, tokens * (choices + peers)})
    assert kept[1] == sorted({places, 64})


def test_fans_lower_for_cuda():
    """Two PUTs, two GETs, and a sum on the peers' side before each GET, which no peer touches."""
    text = lowered(2, Movements(put=PutLaunch(fan_out=True), get=GetLaunch(fan_in=True)))
    assert text.count("uses_xla_collective_metadata = true") == 4
    assert text.count("uses_xla_collective_metadata = false") == 2
    assert text.count('"stablehlo.all_gather"') == 1  # this test's own, of the places


def test_errors():
    """A wrong call is a ValueError, rows that kernels cannot move a NotImplementedError; both before compilation."""
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("ep")

    def trace(function, *shapes):
        arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)).trace(*arguments)

    rows, places, weights = ((8, 256), jnp.bfloat16), ((8, 2), jnp.int32), ((8, 2), jnp.float32)
    put = lambda how, num_rows=16: lambda rows, places: op.put(rows, RouteMap(places), num_rows, how)  # noqa: E731
    with pytest.raises(ValueError, match="place_TK is float32"):
        trace(put(PLAIN), rows, weights)
    with pytest.raises(ValueError, match="rows_TH has shape"):
        trace(put(PLAIN), ((6, 256), jnp.bfloat16), places)
    with pytest.raises(ValueError, match="fewer than 2"):
        trace(put(PLAIN, 2**30), rows, places)
    with pytest.raises(NotImplementedError, match="rows of 200 bfloat16"):
        trace(put(KERNELS), ((8, 200), jnp.bfloat16), places)
    with pytest.raises(NotImplementedError, match="rows of int32"):
        trace(put(KERNELS), ((8, 256), jnp.int32), places)
    many = Movements(put=PutLaunch(), get=GetLaunch())
    with pytest.raises(NotImplementedError, match="32 rows of 16384 bytes"):
        trace(
            lambda rows, places: op.get(rows, RouteMap(places), many), ((8, 8192), jnp.bfloat16), ((8, 32), jnp.int32)
        )


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
