"""What the compiler is given: collectives counted, waves ordered by data, no scatter-add of rows, phases named.

Counts are of one device's program. Nothing is run; most tests stop at StableHLO.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ep_jax.ep import EPConfig, routed_experts, routed_experts_local
from ep_jax.ep.settings import TRANSPORTS
from ep_jax.mesh import AXES
from ep_jax.model.transformer import EXCHANGE_NAMES, PRODUCT_NAMES
from tests.ep import ep_cases
from tests.ep.ep_cases import Sizes, mesh_of, problem
from tests.programs import float_scatter_adds

SIZES = Sizes()
GIVEN = problem(ep_cases.uniform, SIZES)
KEEP_EXCHANGES = jax.checkpoint_policies.save_only_these_names(*EXCHANGE_NAMES)
REMATS = {
    "none": lambda layer: layer,
    "exchanges": functools.partial(jax.checkpoint, policy=KEEP_EXCHANGES),
    "full": jax.checkpoint,
}


def layer_of(**settings):
    return ep_cases.layer(EPConfig(**settings), mesh_of(1, 2, 4), SIZES.sequence_length)


def gradient_of(layer, remat: str = "none"):
    return jax.value_and_grad(REMATS[remat](layer), argnums=tuple(range(5)), has_aux=True)


def stablehlo(function, platform: str = "cpu") -> str:
    return jax.jit(function).trace(*GIVEN).lower(lowering_platforms=(platform,)).as_text()


def compiled(function) -> str:
    """HLO text of the CPU program."""
    return jax.jit(function, compiler_options=ep_cases.QUICK).lower(*GIVEN).compile().as_text()


@functools.cache
def waves_of(transport: str, schedule: str):
    """The compiled layer in 3 waves (2 of them where experts, 4 a shard, are the unit) with factors that drop."""
    layer = layer_of(transport=transport, waves=3, schedule=schedule, sender_factor=0.8, receiver_factor=0.8)
    return jax.jit(layer, compiler_options=ep_cases.QUICK).lower(*GIVEN).compile()


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("waves", [1, 3])
def test_two_all_to_alls_a_wave(waves, schedule):
    layer = layer_of(waves=waves, schedule=schedule)
    counts = [stablehlo(layer).count("stablehlo.all_to_all")]
    counts += [stablehlo(gradient_of(layer, remat)).count("stablehlo.all_to_all") for remat in REMATS]
    assert counts == [2 * waves, 4 * waves, 4 * waves, 6 * waves]


@pytest.mark.parametrize("waves", [1, 3])
def test_slots_of_tokens_add_one_all_to_all_each_way(waves):
    """It carries ids and weights forward, the weights' gradients back, for all waves."""
    layer = layer_of(waves=waves, slots="token")
    counts = [stablehlo(layer).count("stablehlo.all_to_all")]
    counts += [stablehlo(gradient_of(layer, remat)).count("stablehlo.all_to_all") for remat in REMATS]
    assert counts == [1 + 2 * waves, 2 + 4 * waves, 2 + 4 * waves, 3 + 6 * waves]


def test_kept_exchanges_spare_slots_of_tokens_the_same_products():
    """A weight's gradient comes from inside the experts: their results are not computed again for it."""
    counts = [
        stablehlo(gradient_of(layer_of(slots=slots), "exchanges")).count("stablehlo.dot_general")
        for slots in ("assignment", "token")
    ]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("settings", "names", "kept"),
    [
        # The slots' rows that arrived, the weights of the experts' 448 rows, one row a token; no result of an expert.
        (dict(slots="token"), EXCHANGE_NAMES, ["384,8", "448", "128,8"]),
        # What came back, with a header row for each of 4 peers and 8 devices, instead of its sum: the scale's gradient.
        (dict(slots="token", rescale=True), EXCHANGE_NAMES, ["384,8", "448", "32,14,8"]),
        # The experts' inputs and weights, their first products (in blocks), one row a token.
        (dict(transport="dense"), (*EXCHANGE_NAMES, *PRODUCT_NAMES), ["384,8", "384", "176,8,12", "128,8"]),
    ],
    ids=["token", "token-rescaled", "dense"],
)
def test_what_is_kept_of_rows(capsys, settings, names, kept):
    layer, policy = layer_of(**settings), jax.checkpoint_policies.save_only_these_names(*names)
    # What follows a layer needs its rows.
    block = jax.checkpoint(lambda *floats: jnp.sin(layer(*floats, *GIVEN[5:])[0]), policy=policy)
    print_saved_residuals(lambda *floats: jnp.sum(block(*floats)), *GIVEN[:5])
    found = re.findall(r"^f32\[([\d,]+)\] output of shard_map", capsys.readouterr().out, flags=re.MULTILINE)
    assert sorted(found) == sorted(kept)


def test_kept_exchanges_spare_an_emulated_group_the_same_decision():
    layer = layer_of(emulated_shards=8, rescale=True, sender_factor=0.8, receiver_factor=0.8)
    texts = [stablehlo(gradient_of(layer, remat)) for remat in ("none", "exchanges")]
    # Of integers: the weights of experts are gathered again.
    for operation in (r'"stablehlo\.all_gather".*: \(tensor<[^>]*i32>\)', r'"stablehlo\.scatter"'):
        counts = [len(re.findall(operation, text)) for text in texts]
        assert counts[0] == counts[1] > 0


def test_the_compiler_keeps_that_number():
    layer = layer_of(waves=1)
    for remat, wanted in (("exchanges", 4), ("full", 6)):
        assert len(all_to_alls(entry(compiled(gradient_of(layer, remat))))) == wanted


@pytest.mark.parametrize(("remat", "wanted"), [("none", 8), ("exchanges", 8), ("full", 12)])
def test_ragged_is_the_real_operation_on_cuda_only(remat, wanted):
    step = gradient_of(layer_of(transport="ragged", waves=2), remat)
    assert stablehlo(step, "cuda").count("@ragged_all_to_all") == wanted
    assert "ragged_all_to_all" not in stablehlo(step, "cpu")


def test_ragged_gathers_nothing_but_counts_on_cuda():
    text = stablehlo(layer_of(transport="ragged", waves=2), "cuda")
    gathers = re.findall(r'"stablehlo\.all_gather".*: \((tensor<[^>]*>)\)', text)
    assert gathers == [f"tensor<1x{SIZES.experts}xi32>"]
    assert "stablehlo.all_to_all" not in text


def test_dense_gathers_narrow_and_reduces_wide():
    given = problem(ep_cases.uniform, SIZES, dtype=jnp.bfloat16)
    text = jax.jit(gradient_of(layer_of(transport="dense"))).lower(*given).as_text()
    gathered = re.findall(r'"stablehlo\.all_gather".*: \(tensor<[^>]*x(\w+)>\)', text)
    reduced = re.findall(r'"stablehlo\.reduce_scatter"\(.*?\}\) : \(tensor<[^>]*x(\w+)>\)', text, flags=re.DOTALL)
    assert set(gathered) == {"bf16"}
    assert reduced == ["f32", "f32"]


# --- in which order ---------------------------------------------------------------------------------------------------


def entry(hlo_text: str) -> dict[str, str]:
    """Name -> instruction text of the entry computation of a compiled program."""
    body = hlo_text[hlo_text.index("\nENTRY ") :].split("\n}")[0]
    return dict(re.findall(r"^  (?:ROOT )?(%[\w.-]+) = (.*)$", body, flags=re.MULTILINE))


def all_to_alls(instructions: dict[str, str], kinds: str = "all-to-all") -> list[str]:
    return [name for name, text in instructions.items() if re.search(rf" (?:{kinds})\(", text)]


def longest_chain(instructions: dict[str, str], kinds: str) -> int:
    """The largest number of exchanges each of which needs the result of the one before."""
    exchanges = set(all_to_alls(instructions, kinds))

    @functools.cache
    def depth(name: str) -> int:
        operands = re.search(r" [\w-]+\((%[^)]*)\)", instructions[name])
        names = re.findall(r"%[\w.-]+", operands.group(1)) if operands else []
        return max(map(depth, names), default=0) + (name in exchanges)

    return max(map(depth, instructions))


# A gather of counts comes first where acceptance is agreed. `ragged` and `rowwise` are emulated here: an exchange is a
# gather, and as `rowwise` gathers all rows once for all waves, its waves are a chain of returns.
CHAINS = {
    "pooled_wave": {"sequential": 2 * 3, "overlapped": 2},
    "fixed_cell": {"sequential": 2 * 3, "overlapped": 2},
    "ragged": {"sequential": 1 + 2 * 2, "overlapped": 1 + 2},
    "rowwise": {"sequential": 2 + 2, "overlapped": 2 + 1},
}


@pytest.mark.parametrize("transport", CHAINS)
def test_sequential_waves_wait_for_each_other_and_overlapped_do_not(transport):
    chains = {}
    for schedule in ("sequential", "overlapped"):
        instructions = entry(waves_of(transport, schedule).as_text())
        chains[schedule] = longest_chain(instructions, "all-to-all|all-gather")
        if transport in ("pooled_wave", "fixed_cell"):
            assert len(all_to_alls(instructions)) == 6
    assert chains == CHAINS[transport]


@pytest.mark.parametrize("transport", CHAINS)
def test_schedules_keep_the_same_and_compute_the_same(transport):
    (_, (out, report)), (_, (other, other_report)) = (
        waves_of(transport, schedule)(*GIVEN) for schedule in ("sequential", "overlapped")
    )
    ep_cases.check_same_bits(report, other_report)
    assert int(report.sender) + int(report.receiver) > 0
    ep_cases.check_close("out", out, other, 1e-6)


@pytest.mark.parametrize("transport", CHAINS)
def test_unsplit_is_the_same_where_no_capacity_binds(transport):
    results = []
    both = (dict(waves=3), dict(waves=3, schedule="overlapped"))  # elsewhere the two are compared with each other
    for settings in (dict(waves=1), *(both if transport == "pooled_wave" else both[1:])):
        layer = layer_of(transport=transport, sender_factor=1000.0, receiver_factor=1000.0, **settings)
        results.append(jax.jit(layer, compiler_options=ep_cases.QUICK)(*GIVEN)[1])
    (unsplit, report), *others = results
    assert int(report.sender) + int(report.receiver) == 0
    for out, split_report in others:
        np.testing.assert_array_equal(split_report.fate_TK, report.fate_TK)
        ep_cases.check_close("out", out, unsplit, 1e-6)


def test_phases_are_named_in_the_compiled_program():
    text = waves_of("pooled_wave", "sequential").as_text()
    names = re.findall(r'op_name="([^"]*)"', text)
    for phase in ("route", "dispatch", "experts", "combine"):
        assert any(f"/{phase}/" in name for name in names), phase
    instructions = entry(text)
    phases = [re.search(r"/(\w+)/all_to_all", instructions[name]).group(1) for name in all_to_alls(instructions)]
    assert phases == ["dispatch", "combine"] * 3


# --- no scatter-add ---------------------------------------------------------------------------------------------------

EACH = [*[dict(transport=name) for name in TRANSPORTS], dict(transport="pooled_wave", slots="token")]


@pytest.mark.parametrize("settings", EACH, ids=lambda settings: "-".join(settings.values()))
def test_nothing_is_scatter_added(settings):
    def loss(rows, weights, w_gate_up, w_down):
        out, _ = routed_experts(
            rows,
            GIVEN.ids,
            weights,
            GIVEN.valid,
            w_gate_up,
            w_down,
            sequence_length=SIZES.sequence_length,
            mesh=mesh_of(1, 2, 4),
            settings=EPConfig(**settings),
        )
        return jnp.sum(out)

    arguments = (GIVEN.rows, GIVEN.extra_weights, GIVEN.w_gate_up, GIVEN.w_down)
    gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
    assert float_scatter_adds(jax.make_jaxpr(gradient)(*arguments).jaxpr) == []


def test_a_plain_gather_would_be_found():
    loss = jax.jit(lambda rows: jnp.sum(rows[jnp.array([0, 0, 1])]))
    assert len(float_scatter_adds(jax.make_jaxpr(jax.grad(loss))(GIVEN.rows).jaxpr)) == 1


# --- production sizes -------------------------------------------------------------------------------------------------


SPLIT_ONLY = ("pooled_wave", "fixed_cell", "ragged")


@pytest.mark.parametrize("settings", EACH, ids=lambda settings: "-".join(settings.values()))
def test_production_sizes_trace(settings):
    """64 shards, buffers of more than 2^31 elements: shapes and gradients trace, and counters stay int32.

    Rows may be equal over the mesh axes other than ep; only where rows or weights are gathered do they differ.
    """
    axes = AXES if settings["transport"] in SPLIT_ONLY else ("ep",)
    shards, tokens, choices, experts, width, hidden = 64, 32768, 8, 512, 7168, 2048
    mesh = AbstractMesh((1,) * (len(axes) - 1) + (shards,), axes, axis_types=(AxisType.Auto,) * len(axes))
    everything = PartitionSpec("ep")

    def local(rows, ids, weights, valid, w_gate_up, w_down):
        out, drops = routed_experts_local(
            rows, ids, weights, valid, w_gate_up, w_down, sequence_length=4096, settings=EPConfig(**settings)
        )
        return out, drops.counts_PE[None]

    layer = jax.shard_map(local, mesh=mesh, in_specs=everything, out_specs=everything)

    def loss(*arguments):
        out, counts = layer(*arguments)
        return jnp.sum(out.astype(jnp.float32)), counts

    shapes = [
        jax.ShapeDtypeStruct((shards * tokens, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((shards * tokens, choices), jnp.int32),
        jax.ShapeDtypeStruct((shards * tokens, choices), jnp.float32),
        jax.ShapeDtypeStruct((shards * tokens,), jnp.bool),
        jax.ShapeDtypeStruct((experts, width, 2 * hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((experts, hidden, width), jnp.bfloat16),
    ]
    gradients, counts = jax.eval_shape(jax.grad(loss, argnums=(0, 2, 4, 5), has_aux=True), *shapes)
    assert [g.shape for g in gradients] == [shapes[i].shape for i in (0, 2, 4, 5)]
    assert (counts.shape, counts.dtype) == ((shards, 3, experts), jnp.int32)
    assert np.prod(shapes[0].shape) > 2**31
