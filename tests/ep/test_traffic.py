"""The formula of `ep_jax.ep.traffic` against what is in the programs: kinds, counts and bytes of every collective.

Bytes are read from the StableHLO that is lowered for GPUs; the CPU program, which the compiler has been through, must
have the same kinds and numbers where the CPU runs the real operations. Nothing is run.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from ep_jax.ep import EPConfig, routed_experts_local
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.layer import make_transport
from ep_jax.ep.traffic import Widths, collectives, one_sided_bytes, traffic
from tests.ep import ep_cases

SHARDS, TOKENS, CHOICES, EXPERTS, WIDTH, HIDDEN = 4, 16, 3, 20, 8, 6
SHAPE = LayerShape(SHARDS, EXPERTS, CHOICES, TOKENS)
CASES = [
    EPConfig(transport="pooled_wave", waves=3),
    EPConfig(transport="pooled_wave", order="weight", receive="pool", premix=4),
    EPConfig(transport="pooled_wave", slots="token", waves=2),
    EPConfig(transport="pooled_wave", slots="token", order="weight", receive="pool", premix=2),
    EPConfig(transport="fixed_cell", waves=2, premix=2),
    EPConfig(transport="ragged", waves=2, updates_per_cell=3),
    EPConfig(transport="ragged", agreed="tail", premix=2),
    EPConfig(transport="rowwise", waves=2),
    EPConfig(transport="ring", agreed="water_fill"),
    EPConfig(transport="dense"),
]
KIND = r"all_to_all|all_gather|reduce_scatter|all_reduce|collective_permute|collective_broadcast|ragged_all_to_all"
ITEMSIZE = {"i1": 1, "i8": 1, "i32": 4, "bf16": 2, "f32": 4}


def case_name(settings: EPConfig) -> str:
    return f"{settings.transport}-{settings.slots}-W{settings.waves}-premix{settings.premix}"


def layer(settings: EPConfig):
    """(rows, weights, w_gate_up, w_down, ids, valid, V) -> (out, fates) on a mesh of SHARDS devices."""
    mesh = jax.make_mesh((SHARDS,), ("ep",), devices=jax.devices()[:SHARDS], axis_types=(jax.sharding.AxisType.Auto,))
    split = PartitionSpec("ep")

    def local(rows, weights, w_gate_up, w_down, ids, valid, total):
        arrays = (rows, ids, weights, valid, w_gate_up, w_down)
        out, drops = routed_experts_local(*arrays, sequence_length=8, settings=settings, valid_in_group=total)
        return out, drops.fate_TK

    return jax.shard_map(local, mesh=mesh, in_specs=(split,) * 6 + (PartitionSpec(),), out_specs=split)


def gradient(settings: EPConfig):
    """Forward and backward pass for a given gradient of the output."""

    def step(d_out, *arrays):
        floats, rest = arrays[:4], arrays[4:]
        out, pull, fate = jax.vjp(lambda *floats: layer(settings)(*floats, *rest), *floats, has_aux=True)
        return out, pull(d_out), fate

    return step


def arguments(dtype=jnp.bfloat16):
    shape, tokens = jax.ShapeDtypeStruct, SHARDS * TOKENS
    return (
        shape((tokens, WIDTH), dtype),
        shape((tokens, CHOICES), jnp.float32),
        shape((EXPERTS, WIDTH, 2 * HIDDEN), dtype),
        shape((EXPERTS, HIDDEN, WIDTH), dtype),
        shape((tokens, CHOICES), jnp.int32),
        shape((tokens,), jnp.bool),
        shape((), jnp.int32),
    )


@functools.cache
def traced(settings: EPConfig, backward: bool, dtype=jnp.bfloat16):
    given = arguments(dtype)
    if not backward:
        return jax.jit(layer(settings)).trace(*given)
    return jax.jit(gradient(settings)).trace(given[0], *given)


def in_stablehlo(text: str) -> collections.Counter:
    """How often each (kind, operand bytes) occurs. Only the first operand counts: the buffer that is read."""
    found = re.findall(rf'(?:"stablehlo\.|custom_call @)({KIND})"?\(.*?: \(tensor<([^>]*)>', text, flags=re.DOTALL)
    counts = collections.Counter()
    for kind, tensor in found:
        *sizes, element = tensor.split("x")
        elements = functools.reduce(lambda product, size: product * int(size), sizes, 1)
        counts[kind, elements * ITEMSIZE[element]] += 1
    assert sum(counts.values()) == len(re.findall(rf'(?:"stablehlo\.|custom_call @)(?:{KIND})"?\(', text))
    return counts


def in_formula(settings: EPConfig, backward: bool, itemsize: int = 2) -> collections.Counter:
    found = collectives(settings, SHAPE, Widths(WIDTH, HIDDEN, itemsize))
    counts = collections.Counter()
    for collective in (*found.forward, *(found.backward if backward else ())):
        counts[collective.kind, collective.operand_bytes] += collective.count
    return counts


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("settings", CASES, ids=case_name)
def test_programs_for_gpus_have_exactly_these_collectives(settings, backward):
    text = traced(settings, backward).lower(lowering_platforms=("cuda",)).as_text()
    assert in_stablehlo(text) == in_formula(settings, backward)


@pytest.mark.parametrize("settings", CASES[:4:3] + CASES[5:7], ids=case_name)
def test_bytes_follow_the_dtype(settings):
    text = traced(settings, True, jnp.float32).lower(lowering_platforms=("cuda",)).as_text()
    assert in_stablehlo(text) == in_formula(settings, True, itemsize=4)


@pytest.mark.parametrize("settings", [s for s in CASES if s.transport not in ("ragged", "rowwise")], ids=case_name)
def test_the_compiler_adds_and_removes_none(settings):
    text = traced(settings, True).lower().compile(compiler_options=ep_cases.QUICK).as_text()
    found = re.findall(r" (all-to-all|all-gather|reduce-scatter|all-reduce|collective-permute)(?:-start)?\(", text)
    wanted = collections.Counter()
    for (kind, _), count in in_formula(settings, backward=True).items():
        wanted[kind.replace("_", "-")] += count
    assert collections.Counter(found) == wanted


def test_an_added_collective_would_be_found():
    settings = CASES[0]

    def more(*arrays):
        out, fate = layer(settings)(*arrays)
        mesh = jax.make_mesh(
            (SHARDS,), ("ep",), devices=jax.devices()[:SHARDS], axis_types=(jax.sharding.AxisType.Auto,)
        )
        split = PartitionSpec("ep")
        moved = jax.shard_map(lambda x: jax.lax.ppermute(x, "ep", [(0, 1)]), mesh=mesh, in_specs=split, out_specs=split)
        return moved(out), fate

    text = jax.jit(more).trace(*arguments()).lower(lowering_platforms=("cuda",)).as_text()
    assert in_stablehlo(text) - in_formula(settings, False) == {("collective_permute", TOKENS * WIDTH * 2): 1}


# --- bytes that leave a device, by hand -------------------------------------------------------------------------------

HERO = LayerShape(num_shards=64, num_experts=384, experts_per_token=8, tokens=4096)


def test_pooled_wave_by_hand():
    # P = 1.15 * 8 * 4096 / 64 = 588.8 -> 589 slots; their ids and flags fit one lane each, 589 / 512 -> 2 header rows.
    found = traffic(EPConfig(), HERO, Widths(512, 256))
    assert found == (2 * 63 * 591 * 1024, 2 * 63 * 591 * 1024)


def test_slots_of_tokens_by_hand():
    # A shard has 6 of 384 experts, so 0.1194 of tokens with 8 choices choose it; 1.15 times that is 140.6 -> 141 of
    # 1024. Of 4096 tokens 564 slots of up to 6 assignments, 8 bytes each. 6 flags fit one lane: 2 header rows.
    told = 63 * 564 * 6 * 8
    found = traffic(EPConfig(slots="token"), HERO, Widths(512, 256))
    assert found == (63 * (564 + 566) * 1024 + told, 63 * (564 + 566) * 1024 + told)
    # 2 shards of 32 experts: nearly every token chooses both, and P is all 4,096 instead of 1.15 * 4 * 4096.
    pair = LayerShape(num_shards=2, num_experts=64, experts_per_token=8, tokens=4096)
    rows = [traffic(EPConfig(slots=slots), pair, Widths(2048, 256)).forward_bytes for slots in ("assignment", "token")]
    assert 0.215 < rows[1] / rows[0] < 0.225


def test_rows_past_what_is_accepted_do_not_travel():
    """38 rows a destination at 0.5, in buffers of 40."""
    settings, shape = EPConfig(transport="ragged", receiver_factor=0.5), LayerShape(8, 48, 3, 25)
    assert make_transport(settings, shape).receivers.rows(0) == 40
    counts = 7 * 48 * 4
    assert traffic(settings, shape, Widths(8, 256)) == (2 * 38 * 7 // 8 * 16 + counts, 2 * 38 * 7 // 8 * 16)


def test_ragged_and_rowwise_move_balanced_rows():
    # 8 * 4096 rows arrive at a shard, 63 / 64 of them from elsewhere; the counts are 63 times 384 numbers.
    rows = 8 * 4096 * 63 // 64 * 1024
    assert traffic(EPConfig(transport="ragged"), HERO, Widths(512, 256)) == (2 * rows + 63 * 384 * 4, 2 * rows)
    # With the counts each assignment's expert, rank and weight; back the gradients of the weights of 1.15 * 8 * 4096
    # rows, rounded up to a multiple of 8.
    told, weights = 63 * (384 + 2 * 8 * 4096) * 4, 63 * 37_688 * 4
    assert traffic(EPConfig(transport="rowwise"), HERO, Widths(512, 256)) == (2 * rows + told, 2 * rows + weights)
    assert one_sided_bytes(EPConfig(transport="rowwise"), HERO, Widths(512, 256)) == 2 * rows
    # A shard of 6 of 384 experts is met by 0.955 of the rows of 8 choices that it is sent: not worth it.
    assert HERO.crossing_share(6) == pytest.approx(0.955, abs=1e-3)
    # Half the rows can be accepted, and half of them travel.
    settings = EPConfig(transport="ragged", receiver_factor=0.5)
    assert traffic(settings, HERO, Widths(512, 256)).backward_bytes == rows


def test_rows_that_cross_once_per_peer():
    """2 shards of 2 experts and 2 choices: of 6 pairs of experts one lies here, one there and four on both."""
    shape = LayerShape(num_shards=2, num_experts=4, experts_per_token=2, tokens=600)
    widths = Widths(256, 64)
    # 1,200 assignments, 600 of them to the other shard; 5 of 6 tokens go there, 100 of them with both choices.
    assert shape.crossing_share(2) == pytest.approx(500 / 600)
    assert one_sided_bytes(EPConfig(transport="rowwise"), shape, widths) == 2 * 600 * 512  # saves too little
    # 3 choices always meet both shards: 600 rows instead of 900. A wave of one expert has no two choices to join.
    shape = LayerShape(num_shards=2, num_experts=4, experts_per_token=3, tokens=600)
    assert one_sided_bytes(EPConfig(transport="rowwise"), shape, widths) == 2 * 600 * 512
    assert one_sided_bytes(EPConfig(transport="rowwise", waves=2), shape, widths) == (900 + 600) * 512


def test_premix_adds_its_exchanges():
    # Two exchanges of bfloat16 rows, one of ids and weights, one of fates forward; 3/4 of each leaves a device.
    plain, mixed = (traffic(EPConfig(premix=premix), HERO, Widths(512, 256)) for premix in (1, 4))
    rows, routes, fates = 4096 * 1024 * 3 // 4, 4096 * 2 * 8 * 4 * 3 // 4, 4096 * 8 * 3 // 4
    assert mixed.forward_bytes - plain.forward_bytes == 2 * rows + routes + fates
    assert mixed.backward_bytes - plain.backward_bytes == 2 * rows + routes


def test_one_shard_sends_nothing():
    alone = LayerShape(num_shards=1, num_experts=6, experts_per_token=2, tokens=16)
    for transport in ("pooled_wave", "fixed_cell", "ragged", "rowwise", "ring", "dense"):
        assert traffic(EPConfig(transport=transport), alone, Widths(8, 6)) == (0, 0)
