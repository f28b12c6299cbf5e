"""One-sided movements on real GPUs against plain JAX, bit by bit: nothing may be seen too early or too late.

Run on a machine with at least two GPUs: `python -m pytest -m gpu tests/gpu/test_gpu_rowwise.py`, or with `-k fan` for
launches that send a row to a peer once. Weights are powers of two and experts are factors of two, so every product is
exact and only the order of sums counts. Letters: S shards, L layers, T tokens of a shard, K choices, N rows of a
shard's buffer, H width.
"""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.rowwise.get import GetLaunch
from ep_jax_kernels.rowwise.op import FANS, KERNELS, PLAIN, Movements, collect, dispatch, dispatch_weights, route_map
from ep_jax_kernels.rowwise.put import PutLaunch
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep_jax.ep import EPConfig, layer, routed_experts, rowwise_gpu
from ep_jax.mesh import MeshConfig
from ep_jax.mesh import make_mesh as configured_mesh

pytestmark = pytest.mark.gpu

L, T, K, H = 3, 1024, 4, 1024
AXES = ("replica", "fsdp", "ep")
ITERATIONS = 200
# Rings that wrap often, grids smaller and larger than the GPU.
SMALL = Movements(put=PutLaunch(blocks=7, slots=3, ahead=2), get=GetLaunch(blocks=5, groups=2, slots=5))
LARGE = Movements(put=PutLaunch(blocks=700, groups=2, slots=2, ahead=1), get=GetLaunch(blocks=600, slots=4))
FAN_OUT = Movements(put=FANS.put)
SMALL_FAN_OUT = Movements(put=PutLaunch(blocks=5, slots=3, ahead=2, fan_out=True))


def make_mesh(fsdp, ep):
    return jax.make_mesh((1, fsdp, ep), AXES, axis_types=(AxisType.Auto,) * 3)


def random_places(rng, groups, shards, num_rows):
    """[groups*S*T, K]: rows of an ep group, each given once at most, a tenth of the places -1."""
    places = [rng.permutation(shards * num_rows)[: shards * T * K] for _ in range(groups)]
    places = np.concatenate(places).reshape(-1, K).astype(np.int32)
    return np.where(rng.random(places.shape) < 0.1, -1, places)


def experts(how, rows_TH, weights_TK, places_TK, held_N):
    """[T,H]: the sum of each token's rows times 2 times their weights."""
    places_STK = lax.all_gather(places_TK, "ep")
    places = route_map(places_TK, places_STK, held_N.size, how)
    arrived_NH = dispatch(rows_TH, places, held_N.size, how)
    weights_N = dispatch_weights(weights_TK, lax.all_gather(weights_TK, "ep"), places_TK, places_STK, held_N.size, "ep")
    weighted_NH = arrived_NH.astype(jnp.float32) * 2 * weights_N[:, None]
    return collect(jnp.where(held_N[:, None], weighted_NH, jnp.nan).astype(arrived_NH.dtype), places, how)


def held(places_TK, num_rows):
    """bool [N]: rows of this shard's buffer that somebody puts."""
    everybody = lax.all_gather(places_TK, "ep", tiled=True).reshape(-1)
    here = everybody - lax.axis_index("ep") * num_rows
    here = jnp.where((here < 0) | (here >= num_rows), num_rows, here)
    return jnp.zeros(num_rows, bool).at[here].set(True, mode="drop")


def scanned_layers(how, num_rows, rows_TH, weights_LTK, places_LTK):
    """[T,H] after L layers in a scan with remat; a row that nobody put becomes NaN at the expert."""

    @jax.checkpoint
    def one_layer(rows_TH, scanned):
        weights_TK, places_TK, held_N = scanned
        return experts(how, rows_TH, weights_TK, places_TK, held_N), None

    held_LN = jnp.stack([held(places_TK, num_rows) for places_TK in places_LTK])
    return lax.scan(one_layer, rows_TH, (weights_LTK, places_LTK, held_LN))[0]


def make_step(how, mesh, num_rows):
    """(rows, weights, places) -> (out, gradients of rows and weights)."""

    def local(rows_TH, weights_LTK, places_LTK):
        out_TH, pull = jax.vjp(lambda *a: scanned_layers(how, num_rows, *a, places_LTK), rows_TH, weights_LTK)
        return (out_TH, *pull(rows_TH))

    by_layer = PartitionSpec(None, AXES)
    specs = (PartitionSpec(AXES), by_layer, by_layer)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(specs[0], specs[0], by_layer)))


@pytest.mark.parametrize(
    ("fsdp", "how"),
    [(1, KERNELS), (1, FAN_OUT), (1, SMALL), (1, SMALL_FAN_OUT), (1, LARGE), (2, KERNELS)],
    ids=["default", "fan_out", "small", "small_fan_out", "large", "ep1"],
)
def test_layers_equal_plain_ones(fsdp, how):
    """Scanned layers with remat and gradients, new data and NaN in freed memory before every call."""
    devices = jax.device_count()
    assert devices >= 2, "one GPU has no peer"
    shards = devices if fsdp == 1 else 1
    mesh, num_rows = make_mesh(devices // shards, shards), T * K + 128
    rng, split = np.random.default_rng(0), NamedSharding(mesh, PartitionSpec(AXES))
    by_layer = NamedSharding(mesh, PartitionSpec(None, AXES))
    step, plain = make_step(how, mesh, num_rows), make_step(PLAIN, mesh, num_rows)
    make_rows = jax.jit(
        lambda seed: jax.random.normal(jax.random.key(seed), (devices * T, H), jnp.bfloat16), out_shardings=split
    )
    weights = 0.5 ** rng.integers(1, 4, (L, devices * T, K))
    weights = jax.device_put(np.where(rng.random(weights.shape) < 0.05, 0, weights).astype(np.float32), by_layer)
    maps = [
        jax.device_put(np.stack([random_places(rng, devices // shards, shards, num_rows) for _ in range(L)]), by_layer)
        for _ in range(4)
    ]
    poison = jax.jit(
        lambda: tuple(jnp.full((devices * num_rows, H), jnp.nan, jnp.bfloat16) for _ in range(L)),
        out_shardings=(split,) * L,
    )
    differ = jax.jit(lambda one, right: jnp.sum(one != right))
    count = ITERATIONS if how in (KERNELS, FAN_OUT) and fsdp == 1 else ITERATIONS // 10
    wrong = []
    for iteration in range(count):
        arguments = (make_rows(iteration), weights, maps[iteration % len(maps)])
        poison()
        found = step(*arguments)
        wanted = plain(*arguments)
        wrong.append((differ(found[0], wanted[0]), differ(found[1], wanted[1])))
        if iteration % 20 == 0:
            np.testing.assert_allclose(found[2], wanted[2], rtol=1e-5, atol=1e-5 * np.abs(wanted[2]).max())
    wrong = np.array([[int(part) for part in pair] for pair in wrong])
    assert not wrong.any(), f"differing elements of (out, d_rows) by iteration: {wrong[wrong.any(axis=1)][:5]}"


def test_fan_in_is_close():
    """Sums of a peer's rows are rounded once more; nothing else may differ."""
    devices = jax.device_count()
    mesh, num_rows, rng = make_mesh(1, devices), T * K + 128, np.random.default_rng(3)
    split = NamedSharding(mesh, PartitionSpec(AXES))
    spec = PartitionSpec(AXES)

    def step(how):
        def local(rows_TH, weights_TK, places_TK):
            held_N = held(places_TK, num_rows)
            out_TH, pull = jax.vjp(lambda *floats: experts(how, *floats, places_TK, held_N), rows_TH, weights_TK)
            return (out_TH, *pull(rows_TH))

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))

    for _ in range(10):
        arguments = [
            jax.device_put(array, split)
            for array in (
                rng.standard_normal((devices * T, H)).astype(jnp.bfloat16),
                rng.random((devices * T, K)).astype(np.float32),
                random_places(rng, 1, devices, num_rows),
            )
        ]
        for one, right in zip(step(FANS)(*arguments), step(PLAIN)(*arguments), strict=True):
            one, right = np.asarray(one, np.float64), np.asarray(right, np.float64)
            assert np.linalg.norm(one - right) < 3e-3 * np.linalg.norm(right)


def test_two_calls_in_one_program():
    """Two PUTs and two GETs that do not depend on each other, and a donated operand."""
    devices = jax.device_count()
    mesh, num_rows = make_mesh(1, devices), T * K + 128
    rng, split = np.random.default_rng(1), NamedSharding(mesh, PartitionSpec(AXES))
    places = [jax.device_put(random_places(rng, 1, devices, num_rows), split) for _ in range(2)]
    weights = jax.device_put(np.full((devices * T, K), 0.5, np.float32), split)

    def local(how, rows_TH, weights_TK, first_TK, second_TK):
        one = experts(how, rows_TH, weights_TK, first_TK, held(first_TK, num_rows))
        two = experts(how, rows_TH * 2, weights_TK, second_TK, held(second_TK, num_rows))
        return one, two

    def jit(how, **options):
        spec = PartitionSpec(AXES)
        return jax.jit(
            jax.shard_map(functools.partial(local, how), mesh=mesh, in_specs=spec, out_specs=spec), **options
        )

    kernels, plain = jit(KERNELS, donate_argnums=0), jit(PLAIN)
    for seed in range(ITERATIONS // 4):
        rows = jax.device_put(rng.standard_normal((devices * T, H)).astype(jnp.bfloat16), split)
        wanted = plain(rows, weights, *places)
        found = kernels(rows, weights, *places)
        for one, right in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, right, err_msg=f"call {seed}")


@pytest.mark.parametrize("how", [KERNELS, FANS], ids=["plain", "fans"])
@pytest.mark.parametrize(
    "policy", [{"receiver_factor": 0.8}, {"receiver_factor": 4.0, "waves": 2}], ids=["drops", "waves"]
)
def test_transport_equals_the_emulation(monkeypatch, policy, how):
    """A layer in float32: kept sets exactly, values and gradients closely."""
    monkeypatch.setattr(rowwise_gpu, "RowwiseGPU", functools.partial(rowwise_gpu.RowwiseGPU, launches=how))
    shards, experts, tokens, width, hidden = jax.device_count(), 16, 256, 512, 64
    rng = np.random.default_rng(2)
    mesh = configured_mesh(MeshConfig(ep=shards))
    ids = np.argsort(rng.gumbel(size=(shards * tokens, experts)) + rng.gumbel(size=experts), axis=1)[:, :K]
    ids, valid = ids.astype(np.int32), rng.random(shards * tokens) < 0.9
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    d_out, weights = normal(shards * tokens, width), rng.random((shards * tokens, K)).astype(np.float32)
    arguments = (
        normal(shards * tokens, width),
        weights,
        normal(experts, width, 2 * hidden) * width**-0.5,
        normal(experts, hidden, width) * hidden**-0.5,
    )

    # Rowwise without kernels is the emulation, which users are refused on GPUs.
    monkeypatch.setattr(layer, "definite", lambda settings, *args: (settings, ""))

    def run(kernels):
        settings = EPConfig(transport="rowwise", kernels=kernels, **policy)

        def objective(rows, weights, w_gate_up, w_down):
            out, report = routed_experts(
                rows, ids, weights, valid, w_gate_up, w_down, sequence_length=64, mesh=mesh, settings=settings
            )
            return (out * d_out).sum(), (out, report.fate_TK)

        with jax.default_matmul_precision("highest"):  # not TF32
            (_, aux), gradients = jax.jit(jax.value_and_grad(objective, (0, 1, 2, 3), has_aux=True))(*arguments)
        return [np.asarray(x) for x in (*aux, *gradients)]

    wanted, found = run("xla"), run("auto")
    np.testing.assert_array_equal(found[1], wanted[1])
    for one, right in zip(found, wanted, strict=True):
        assert np.linalg.norm(one - right) <= 2e-5 * np.linalg.norm(right)


def test_processes_with_one_gpu_each():
    """Refused today, in one line (rowwise_process.py says what was seen); when that is cured, nothing may be wrong."""
    count, port = jax.device_count(), 12_000 + os.getpid() % 20_000
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "tests.gpu.rowwise_process"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (out, errors) in enumerate(outputs):
        assert out.strip(), errors[-3000:]
        answer = json.loads(out.splitlines()[-1])
        assert answer["rank"] == rank
        refused = f"one-sided row movements with {count} processes: ncclGetPeerDevicePointer failed"
        assert answer.get("refused", "").startswith(refused) or answer.get("wrong") == [0] * 20
