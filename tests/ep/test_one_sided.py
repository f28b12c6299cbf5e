"""The rowwise transport as it runs on GPUs, its movements in plain JAX, and what `auto` becomes.

Kept rows, values and gradients against the NumPy oracle; rows that nobody writes are NaN, as memory on a GPU may be.
How often GPUs wait for each other is counted in the program that is lowered for them. Letters as in rowwise_gpu.py.
"""

import collections
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.rowwise import op, reference
from jax.sharding import AxisType, PartitionSpec

from ep_jax.ep import EPConfig, choice, layer, routed_experts_local
from ep_jax.ep.agreed import Receivers
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.routes import Routes
from ep_jax.ep.rowwise_gpu import RowwiseGPU, tell_all
from ep_jax.ep.settings import dropless
from ep_jax.fields import ConfigError
from ep_jax.model.transformer import EXCHANGE_NAMES
from tests.ep import ep_cases
from tests.ep.ep_cases import Sizes, problem
from tests.programs import inlined


@pytest.fixture
def one_sided(monkeypatch):
    """Makes the layer build the GPU's transport, with movements in plain JAX that leave unput rows NaN."""
    put_rows = reference.put_rows

    def poisoned(rows_TH, place_TK, num_rows, axis):
        put_N = reference.source_of_rows(place_TK, num_rows, axis) >= 0
        return jnp.where(put_N[:, None], put_rows(rows_TH, place_TK, num_rows, axis), jnp.nan)

    monkeypatch.setattr(reference, "put_rows", poisoned)
    monkeypatch.setitem(layer.TRANSPORTS, "rowwise", lambda *args: RowwiseGPU(*args, launches=op.PLAIN))


SIZES = Sizes(tokens=32, sequence_length=16, experts=8, choices=3, width=16, hidden=8)
CASES = [
    ((1, 2, 4), EPConfig(transport="rowwise", receiver_factor=0.7, agreed="round_robin")),
    ((1, 2, 4), EPConfig(transport="rowwise", receiver_factor=0.6, agreed="tail", rescale=True)),
    ((2, 2, 2), EPConfig(transport="rowwise", receiver_factor=0.8, agreed="water_fill", waves=3, premix=2)),
    ((1, 1, 8), EPConfig(transport="rowwise", receiver_factor=8.0, waves=1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'x'.join(map(str, case[0]))}-{case[1].agreed}")
def test_equals_the_oracle(one_sided, case):
    (replica, fsdp, ep), settings = case
    step = ep_cases.program(settings, ep_cases.mesh_of(replica, fsdp, ep), SIZES.sequence_length)
    dropped = 0
    for seed, routing in enumerate(ep_cases.ROUTINGS):
        given = problem(routing, SIZES, seed)
        wanted = ep_cases.oracle(given, settings, ep, SIZES.sequence_length)
        ep_cases.check_answer(step(*given), wanted)
        dropped += int((wanted.fate == ep_cases.RECEIVER).sum())
    assert (dropped > 0) == (settings.receiver_factor < 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'x'.join(map(str, case[0]))}-{case[1].agreed}")
def test_equals_the_oracle_with_rows_that_cross_once(monkeypatch, case):
    """The plan's maps for fans, moved by plain JAX; rows that nobody puts and sums that nobody reads are NaN."""
    used = set()

    def put_rows(rows_TH, place_TK, fan_out, num_rows, axis, launch):
        used.add("fan out")
        sent_NH = reference.put_rows(rows_TH, fan_out.send_TK, num_rows, axis)
        copied_NH = sent_NH[jnp.maximum(fan_out.copy_N, 0)]
        put_NH = jnp.where((fan_out.copy_N >= 0)[:, None], copied_NH, sent_NH)
        put_N = reference.source_of_rows(place_TK, num_rows, axis) >= 0
        return jnp.where(put_N[:, None], put_NH, jnp.nan)

    def get_sum(rows_NH, place_TK, fan_in, axis, launch):
        used.add("fan in")
        here_AK, choices = fan_in.partial_AK, place_TK.shape[1]
        terms_AKH = jnp.where((here_AK >= 0)[..., None], rows_NH[jnp.maximum(here_AK, 0)], 0)
        sums_AH = jnp.where((here_AK >= 0).any(axis=1)[:, None], terms_AKH.sum(axis=1), jnp.nan)
        own_TH = reference.get_sum(rows_NH, fan_in.place_TJ[:, :choices], axis)
        return own_TH + reference.get_sum(sums_AH, fan_in.place_TJ[:, choices:], axis)

    monkeypatch.setattr(op, "put_rows", put_rows)
    monkeypatch.setattr(op, "get_sum", get_sum)
    monkeypatch.setattr(op, "check_rows", lambda *args: None)
    monkeypatch.setitem(layer.TRANSPORTS, "rowwise", lambda *args: RowwiseGPU(*args, launches=op.FANS))
    test_equals_the_oracle(None, case)
    assert used == {"fan out", "fan in"}


def test_movements_are_chosen_by_shape_and_by_wave():
    """Fans where a token is likely to meet a peer again: two shards, or eight and many choices."""

    def chosen(shards, experts, choices, waves=1):
        transport = RowwiseGPU(EPConfig(transport="rowwise", waves=waves), LayerShape(shards, experts, choices, 64))
        return transport.how(transport.receivers.group), transport.how(transport.shape.local_experts)

    assert chosen(2, 16, 4) == chosen(8, 384, 8) == (op.FANS, op.FANS)
    assert chosen(8, 16, 4) == chosen(1, 16, 4) == chosen(64, 384, 8) == (op.KERNELS, op.KERNELS)
    assert chosen(2, 16, 4, waves=8) == (op.KERNELS, op.FANS)


# --- how often the GPUs of a layer wait for each other ----------------------------------------------------------------

SHAPE = LayerShape(num_shards=4, num_experts=20, experts_per_token=3, tokens=16)


def waits(monkeypatch, settings: EPConfig, how: op.Movements, *, backward: bool, policy=None) -> collections.Counter:
    """Of one layer lowered for GPUs: collectives by (kind, operand bytes), kernels by name, barriers before them."""
    monkeypatch.setitem(layer.TRANSPORTS, "rowwise", lambda *args: RowwiseGPU(*args, launches=how))
    shards, hidden = SHAPE.num_shards, 8
    mesh = jax.make_mesh((shards,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])

    def local(rows, weights, w_gate_up, w_down, ids, valid, total, d_out):
        def run(rows, weights, w_gate_up, w_down):
            arrays = (rows, ids, weights, valid, w_gate_up, w_down)
            out, drops = routed_experts_local(*arrays, sequence_length=8, settings=settings, valid_in_group=total)
            return out * out, drops.fate_TK  # in a model too the layer's result is needed for what comes after it

        run = run if policy is None else jax.checkpoint(run, policy=policy)
        if not backward:
            return run(rows, weights, w_gate_up, w_down)
        out, pull, fate = jax.vjp(run, rows, weights, w_gate_up, w_down, has_aux=True)
        return out, fate, *pull(d_out)

    tokens, width, of = shards * SHAPE.tokens, 256, jax.ShapeDtypeStruct
    rows = of((tokens, width), jnp.bfloat16)
    arguments = (
        rows,
        of((tokens, SHAPE.experts_per_token), jnp.float32),
        of((SHAPE.num_experts, width, 2 * hidden), jnp.bfloat16),
        of((SHAPE.num_experts, hidden, width), jnp.bfloat16),
        of((tokens, SHAPE.experts_per_token), jnp.int32),
        of((tokens,), jnp.bool),
        of((), jnp.int32),
        rows,
    )
    split, whole = PartitionSpec("ep"), PartitionSpec()
    step = jax.shard_map(local, mesh=mesh, in_specs=(split,) * 6 + (whole, split), out_specs=split)
    text = inlined(jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text())
    kinds = r"all_to_all|all_gather|reduce_scatter|all_reduce|collective_permute|collective_broadcast"
    found = collections.Counter()
    for kind, tensor in re.findall(rf'"stablehlo\.({kinds})".*?: \(tensor<([^>]*)>', text, flags=re.DOTALL):
        found[kind, 4 * math.prod(map(int, tensor.split("x")[:-1]))] += 1  # all are of int32 or float32
        assert tensor.endswith(("i32", "f32"))
    assert sum(found.values()) == len(re.findall(rf'"?stablehlo\.(?:{kinds})', text))
    for call in re.findall(r"custom_call @mosaic_gpu_v2.*", text):
        (name,) = set(re.findall(r"rowwise_(\w+)_mosaic_gpu", call))
        found[name] += 1
        found["barrier"] += "uses_xla_collective_metadata = true" in call
        assert "skip_device_barrier = false" in call
    return found


@pytest.mark.parametrize("how", [op.KERNELS, op.FANS], ids=["plain", "fans"])
@pytest.mark.parametrize("waves", [1, 2])
def test_gpus_wait_for_each_other_this_often(monkeypatch, waves, how):
    """One exchange before rows move, one barrier a movement, one exchange of the weights' gradients; no more."""
    settings = EPConfig(transport="rowwise", waves=waves, rescale=waves == 2)
    told = ("all_gather", 4 * (SHAPE.num_experts + 2 * SHAPE.assignments))
    d_weights = ("all_gather", 4 * waves * Receivers(settings, SHAPE).rows(0))
    sums = {"sum": 1} if how.get.fan_in else {}
    forward = collections.Counter({told: 1, "put": waves, "get": 1, "barrier": waves + 1} | sums)
    assert waits(monkeypatch, settings, how, backward=False) == forward
    backward = collections.Counter({d_weights: 1, "put": 1, "get": waves, "barrier": waves + 1})
    backward["sum"] += waves * len(sums)
    assert waits(monkeypatch, settings, how, backward=True) == forward + backward


@pytest.mark.parametrize("how", [op.KERNELS, op.FANS], ids=["plain", "fans"])
def test_remat_repeats_no_exchange(monkeypatch, how):
    """Where a remat policy keeps what was exchanged, the backward pass gathers and moves nothing again."""
    settings = EPConfig(transport="rowwise", waves=2, rescale=True)
    policy = jax.checkpoint_policies.save_only_these_names(*EXCHANGE_NAMES)
    usual = waits(monkeypatch, settings, how, backward=True)
    assert waits(monkeypatch, settings, how, backward=True, policy=policy) == usual


def test_all_shards_are_told_the_same():
    """Ids, ranks and the bits of weights of everybody, as they are known where they come from."""
    given = problem(ep_cases.by_document, SIZES)
    shards, mesh = 8, ep_cases.mesh_of(1, 1, 8)

    def local(ids, weights, valid):
        routes = Routes(ids, weights, valid, jnp.int32(0), SIZES.sequence_length)
        return jax.tree.map(lambda array: array[None], tell_all(routes, SIZES.experts))

    spec = PartitionSpec(("replica", "fsdp", "ep"))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    told = [np.asarray(array) for array in step(given.ids, given.extra_weights, given.valid)]
    ids = np.where(given.valid[:, None], given.ids, -1).reshape(shards, SIZES.tokens, SIZES.choices)
    ranks, counts = np.full(ids.shape, -1), np.zeros((shards, SIZES.experts), int)
    for source, token, k in np.ndindex(ids.shape):
        if (expert := ids[source, token, k]) >= 0:
            ranks[source, token, k] = counts[source, expert]
            counts[source, expert] += 1
    for shard in range(shards):
        np.testing.assert_array_equal(told[0][shard], counts)
        np.testing.assert_array_equal(told[1][shard], ids)
        np.testing.assert_array_equal(told[2][shard][ids >= 0], ranks[ids >= 0])
        np.testing.assert_array_equal(told[3][shard], given.extra_weights.reshape(ids.shape))


def test_too_many_tokens_for_one_number_are_refused():
    shapes = (((2**27, 1), jnp.int32), ((2**27, 1), jnp.float32), ((2**27,), jnp.bool), ((), jnp.int32))
    routes = Routes(*(jax.ShapeDtypeStruct(*shape) for shape in shapes), sequence_length=8)
    with pytest.raises(NotImplementedError, match="16 experts x 134217728 tokens"):
        jax.eval_shape(lambda routes: tell_all(routes, 16), routes)


# --- what `auto` becomes ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Device:
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    compute_capability: str = "9.0"


@pytest.fixture
def with_kernels(monkeypatch):
    monkeypatch.setattr(choice.implementations, "why_no_kernels", lambda: "")


def test_auto_is_rowwise_where_gpus_reach_each_other(with_kernels):
    settings, note = choice.definite(EPConfig(transport="auto"), 8, [Device()] * 8, 3072, jnp.bfloat16, 8)
    assert (settings.transport, note) == ("rowwise", "ep.transport = auto: rowwise")


@pytest.mark.parametrize(
    ("settings", "devices", "width", "reason"),
    [
        (dict(), [Device(compute_capability="8.0", device_kind="NVIDIA A100")], 3072, "NVIDIA A100"),
        (dict(), [Device()] * 16, 3072, "16 GPUs: at most 8"),
        (dict(), [Device()], 100, "rows of 100"),
        (dict(kernels="xla"), [Device()], 3072, "ep.kernels = 'xla'"),
        (dict(emulated_shards=16), [Device()], 3072, "ep.emulated_shards = 16"),
    ],
)
def test_auto_is_pooled_wave_where_something_lacks_and_says_what(with_kernels, settings, devices, width, reason):
    found, note = choice.definite(EPConfig(transport="auto", **settings), 2, devices, width, jnp.bfloat16, 8)
    assert found == EPConfig(transport="pooled_wave", **settings)
    assert note.startswith("ep.transport = auto: pooled_wave, as rowwise cannot run: ")
    assert reason in note
    if "emulated_shards" not in settings:
        with pytest.raises(ConfigError, match="ep.transport = 'rowwise': .*; allowed here are auto, pooled_wave"):
            choice.definite(EPConfig(transport="rowwise", **settings), 2, devices, width, jnp.bfloat16, 8)


def test_auto_is_dense_where_nothing_travels_and_kernels_multiply(with_kernels):
    auto = EPConfig(transport="auto", waves=2, rescale=True)
    settings, note = choice.definite(auto, 1, [Device()] * 8, 3072, jnp.bfloat16, 8)
    assert settings == dropless(settings) == EPConfig(transport="dense", rescale=True)
    assert note.startswith("ep.transport = auto: dense")
    for other in (EPConfig(transport="auto", kernels="xla"), EPConfig(transport="auto", emulated_shards=8)):
        settings, note = choice.definite(other, 1, [Device()], 3072, jnp.bfloat16, 8)
        assert settings.transport == "pooled_wave"
        assert note.startswith("ep.transport = auto: pooled_wave")


def test_auto_on_a_cpu():
    settings, note = choice.definite(EPConfig(transport="auto"), 8, jax.devices(), 3072, jnp.bfloat16, 8)
    assert settings.transport == "pooled_wave"
    assert "for NVIDIA GPUs" in note
    rowwise = EPConfig(transport="rowwise")
    assert choice.definite(rowwise, 8, jax.devices(), 10, jnp.float32, 8) == (rowwise, "")


def test_the_layer_takes_auto():
    given = problem(ep_cases.uniform, SIZES)
    mesh = ep_cases.mesh_of(1, 1, 8)
    step = ep_cases.program(EPConfig(transport="auto"), mesh, SIZES.sequence_length)
    other = ep_cases.program(EPConfig(transport="pooled_wave"), mesh, SIZES.sequence_length)
    (_, (found, _)), _ = step(*given)
    (_, (right, _)), _ = other(*given)
    np.testing.assert_array_equal(found, right)
