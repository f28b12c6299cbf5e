"""Rows sent in e4m3 (ep.payload): equal to the oracle on rows that NumPy rounded, forward and backward, with drops.

The derivative goes straight through the rounding, so the oracle's answer is the layer's own at rounded rows, while the
router sees the rows as they are. Rows that e4m3 holds exactly must give what the compute type gives.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from ep_jax.ep import EPConfig, payload, reference_values, routed_experts
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.payload import Float8Rows
from ep_jax.ep.pooled_wave import PooledWave
from ep_jax.ep.reference import KEPT, RECEIVER, SENDER
from ep_jax.ep.settings import PAYLOADS, TRANSPORTS
from ep_jax.ep.traffic import Widths, traffic
from ep_jax.fields import ConfigError
from ep_jax.planning import links
from ep_jax.planning.memory import memory, wave_rows
from ep_jax.planning.sizes import Sizes as PlannedSizes
from tests.ep import ep_cases, test_collectives, test_poison, test_traffic
from tests.ep.ep_cases import Sizes, mesh_of, problem
from tests.train.tiny_run import tiny_config

E4M3 = ml_dtypes.float8_e4m3fn
SIZES = Sizes()
TIGHT = dict(sender_factor=0.8, receiver_factor=0.75)
CASES = {
    "expert": ((1, 1, 8), dict(**TIGHT, waves=2, order="weight", rescale=True)),
    "pool": ((1, 2, 4), dict(**TIGHT, waves=3, receive="pool", schedule="overlapped", premix=2)),
}


def settings_of(case: str, payload: str = "float8_e4m3") -> EPConfig:
    return EPConfig(payload=payload, **CASES[case][1])


@functools.cache
def step_of(case: str, payload: str):
    return ep_cases.program(settings_of(case, payload), mesh_of(*CASES[case][0]), SIZES.sequence_length)


def rounded(rows):
    """Rows as they arrive, in their dtype; division by the scale in float32, as the header's is."""
    wide = np.asarray(rows, np.float32)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    scale = np.where(largest == 0, np.float32(1), largest * np.float32(1 / 448))
    return ((wide * (np.float32(1) / scale)).astype(E4M3).astype(np.float32) * scale).astype(rows.dtype)


def oracle(given, settings, shards):
    """`ep_cases.oracle` whose experts see rounded rows; its router doesn't."""
    forward = lambda rows, *rest, **options: reference_values.forward(narrow(rows), *rest, **options)  # noqa: E731
    gradients = lambda rows, *rest, **options: reference_values.gradients(narrow(rows), *rest, **options)  # noqa: E731
    narrow = lambda rows: rounded(rows.astype(given.rows.dtype)).astype(np.float64)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep_cases, "reference_values", types.SimpleNamespace(forward=forward, gradients=gradients))
        return ep_cases.oracle(given, settings, shards, SIZES.sequence_length)


# --- values, gradients, fates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle_on_rounded_rows(case):
    (*_, shards), settings, step = CASES[case][0], settings_of(case), step_of(case, "float8_e4m3")
    seen = np.zeros(4, np.int64)
    for seed, routing in enumerate(ep_cases.ROUTINGS):
        given = problem(routing, SIZES, seed)
        given.rows[5] = 0
        given.rows[6] *= 1e-30
        result, wanted = step(*given), oracle(given, settings, shards)
        ep_cases.check_answer(result, wanted)
        seen += np.bincount(wanted.fate.reshape(-1), minlength=4)
        # Nothing that is decided or counted looks at the rows' type, and the difference would be seen.
        (_, (out, report)), _ = step_of(case, "compute")(*given)
        ep_cases.check_same_bits(result[0][1][1], report)
        if given.valid.any():
            error = np.linalg.norm(result[0][1][0] - out) / np.linalg.norm(out)
            assert 5e-3 < error < 6e-2
    assert min(seen[KEPT], seen[SENDER], seen[RECEIVER]) > 0


def test_bfloat16_rows_too():
    given = problem(ep_cases.by_document, SIZES, dtype=jnp.bfloat16)
    result = step_of("expert", "float8_e4m3")(*given)
    assert result[0][1][0].dtype == jnp.bfloat16
    assert [gradient.dtype for gradient in result[1]] == [x.dtype for x in given[:5]]
    bound = 3 * 2.0**-8  # as test_transports has it without float8: the oracle knows the rounding to e4m3
    ep_cases.check_answer(result, oracle(given, settings_of("expert"), 8), bound, bound)


@pytest.mark.parametrize("case", CASES)
def test_rows_that_e4m3_holds_give_what_the_compute_type_gives(case):
    given = problem(ep_cases.by_document, SIZES)
    rng = np.random.default_rng(0)
    exact = rng.choice(np.arange(-448, 449, dtype=np.float32).astype(E4M3), given.rows.shape).astype(np.float32)
    exact[:, 0] = 448
    given = given._replace(rows=exact * np.exp2(rng.integers(-12, -8, (len(exact), 1))).astype(np.float32))
    np.testing.assert_array_equal(rounded(given.rows), given.rows)
    check_alike(step_of(case, "float8_e4m3")(*given), step_of(case, "compute")(*given))


def check_alike(result, wanted):
    """Asserts equal bits of reports with drops of both stages, and of numbers all but the order of fused sums."""
    ((_, (out, report)), gradients), ((_, (right, right_report)), right_gradients) = result, wanted
    ep_cases.check_same_bits(report, right_report)
    assert min(int(report.sender), int(report.receiver)) > 0
    for name, one, other in zip(
        ("out", *ep_cases.GRADIENTS), (out, *gradients), (right, *right_gradients), strict=True
    ):
        ep_cases.check_close(name, one, other, 1e-6)


def test_error_of_a_layer_on_normal_rows(record_property):
    """bfloat16, normal rows: the number in the docs. e4m3 has 3 bits: half a step is 2^-4 of a value at most."""
    sizes = Sizes(width=64, hidden=32)
    given = problem(ep_cases.uniform, sizes, dtype=jnp.bfloat16)
    scaled = {
        name: (getattr(given, name).astype(np.float32) * 0.4).astype(jnp.bfloat16) for name in ("w_gate_up", "w_down")
    }
    given = given._replace(**scaled)
    results = {}
    for name in PAYLOADS:
        settings = EPConfig(payload=name, sender_factor=8.0, receiver_factor=8.0)
        results[name] = ep_cases.program(settings, mesh_of(1, 1, 8), sizes.sequence_length)(*given)
    (_, (out, _)), gradients = results["compute"]
    (_, (out8, report)), gradients8 = results["float8_e4m3"]
    assert int(report.sender) + int(report.receiver) == 0
    errors = {"rows": relative(rounded(given.rows), given.rows), "out": relative(out8, out)}
    errors |= {
        f"d_{name}": relative(x, y) for name, x, y in zip(ep_cases.GRADIENTS, gradients8, gradients, strict=True)
    }
    for name, error in errors.items():
        record_property(name, error)
        print(f"{name}: {error:.4f}")
    assert 0.02 < errors["rows"] < 0.03
    assert errors["out"] < 0.05
    assert max(errors.values()) < 0.08


def relative(found, wanted) -> float:
    """Norm of the difference over the norm."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# --- what is wrong stays visible, what is unused stays out ------------------------------------------------------------


@functools.cache
def forward_only():
    """Jitted (rows, ids, weights, valid, w_gate_up, w_down) -> (out, report); routes do not depend on the rows."""
    settings = EPConfig(payload="float8_e4m3", **TIGHT)
    layer = functools.partial(
        routed_experts, sequence_length=SIZES.sequence_length, mesh=mesh_of(1, 1, 8), settings=settings
    )
    return jax.jit(layer, compiler_options=ep_cases.QUICK)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_nan_and_stays_with_its_token(bad):
    given = problem(ep_cases.by_document, SIZES)
    rest = given.ids, given.extra_weights, given.valid, given.w_gate_up, given.w_down
    clean, report = forward_only()(given.rows, *rest)
    kept_T = (np.asarray(report.fate_TK) == KEPT).any(axis=1)
    assert not kept_T.all()
    spoiled = given.rows.copy()
    token = np.flatnonzero(kept_T)[3]
    spoiled[[token, np.flatnonzero(~kept_T)[0]], 2] = bad  # of one without a kept choice nothing is seen
    out, spoiled_report = forward_only()(spoiled, *rest)
    assert np.isnan(out[token]).all()
    others = np.arange(len(out)) != token
    np.testing.assert_array_equal(out[others], clean[others])
    ep_cases.check_same_bits(spoiled_report, report)


def spoil_float8_slots(monkeypatch):
    """NaN bytes and NaN scales in empty slots on both sides of the exchange, and in unused header bytes."""
    pack, unpack = payload.Float8Layout.pack, payload.Float8Layout.unpack

    def spoiled(layout, numbers, rows):
        written_X = layout.by_row(jnp.where(numbers > 0, 1, -1)) > 0
        bits = jax.lax.bitcast_convert_type(rows.bytes_XH, jnp.uint8)
        bits = jnp.where(written_X[:, None], bits, jnp.uint8(0x7F))
        scale_X = jnp.where(written_X, rows.scale_X, -jnp.inf)
        return Float8Rows(jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn), scale_X)

    def spoiled_pack(layout, numbers, rows):
        packed = pack(layout, numbers, spoiled(layout, numbers, rows))
        lane = jnp.arange(layout.header * layout.width).reshape(1, layout.header, layout.width)
        used = layout.slots * payload.SLOT_BYTES
        lanes = jnp.where(lane < used, packed[:, : layout.header], jnp.uint8(0xFF))
        return jnp.concatenate([lanes, packed[:, layout.header :]], axis=1)

    def spoiled_unpack(layout, received):
        numbers, rows = unpack(layout, received)
        return numbers, spoiled(layout, numbers, rows)

    monkeypatch.setattr(payload.Float8Layout, "pack", spoiled_pack)
    monkeypatch.setattr(payload.Float8Layout, "unpack", spoiled_unpack)


@pytest.mark.parametrize("case", CASES)
def test_garbage_in_unused_slots_changes_nothing(monkeypatch, case):
    given = [problem(routing, SIZES) for routing in (ep_cases.by_document, ep_cases.one_expert)]
    wanted = [step_of(case, "float8_e4m3")(*arrays) for arrays in given]
    spoil_float8_slots(monkeypatch)
    test_poison.spoil_tails(monkeypatch)  # and in rows past the last of a pool, and their gradients
    step = ep_cases.program(settings_of(case), mesh_of(*CASES[case][0]), SIZES.sequence_length)
    assert "0xFF800000" in step.lower(*given[0]).as_text(), "no garbage in the program"
    for arrays, right in zip(given, wanted, strict=True):
        result = step(*arrays)
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(result))
        check_alike(result, right)


@pytest.mark.parametrize(("slots", "width"), [(5, 3), (7, 8), (300, 16), (64, 512)])
def test_ids_scales_and_bytes_are_exact(slots, width):
    """Any int32 and any float32 pattern: large ids, NaN with a payload, subnormal numbers."""
    layout, rng, peers = payload.Float8Layout(slots, width), np.random.default_rng(0), 3
    rows = peers * (layout.header + slots)
    numbers = rng.integers(0, 2**31, (peers, slots), np.int32)
    scale_bits = rng.integers(0, 2**32, rows, np.uint32)
    scale_bits[-2:] = 1, 0x7FC12345
    bits = rng.integers(0, 256, (rows, width), np.uint8)

    @jax.jit
    def there_and_back(numbers, bits, scale_bits):
        as_type = jax.lax.bitcast_convert_type
        sent = layout.pack(numbers, Float8Rows(as_type(bits, jnp.float8_e4m3fn), as_type(scale_bits, jnp.float32)))
        back, arrived = layout.unpack(sent)
        return sent, back, as_type(arrived.bytes_XH, jnp.uint8), as_type(arrived.scale_X, jnp.uint32)

    sent, back, arrived, arrived_scale = there_and_back(numbers, bits, scale_bits)
    assert (sent.shape, sent.dtype) == ((peers, payload.float8_header_rows(slots, width) + slots, width), jnp.uint8)
    in_slot = np.asarray(layout.by_row(jnp.zeros(peers * slots, jnp.int32))) == 0
    np.testing.assert_array_equal(back, numbers)
    np.testing.assert_array_equal(arrived[in_slot], bits[in_slot])
    np.testing.assert_array_equal(arrived_scale[in_slot], scale_bits[in_slot])
    np.testing.assert_array_equal(layout.rows_of(jnp.arange(peers * slots)), np.flatnonzero(in_slot))


# --- what is exchanged and kept ---------------------------------------------------------------------------------------


@pytest.fixture
def bytes_counted(monkeypatch):
    monkeypatch.setitem(test_traffic.ITEMSIZE, "ui8", 1)


FLOAT8_TRAFFIC = [
    EPConfig(payload="float8_e4m3", waves=3),
    EPConfig(payload="float8_e4m3", order="weight", receive="pool", premix=4),
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("settings", FLOAT8_TRAFFIC, ids=test_traffic.case_name)
def test_programs_for_gpus_exchange_these_bytes(bytes_counted, settings, dtype):
    for backward in (False, True):
        text = test_traffic.traced(settings, backward, dtype).lower(lowering_platforms=("cuda",)).as_text()
        found = test_traffic.in_stablehlo(text)
        assert found == test_traffic.in_formula(settings, backward, jnp.dtype(dtype).itemsize)
    settings = dataclasses.replace(settings, payload="compute")
    assert found != test_traffic.in_formula(settings, True, jnp.dtype(dtype).itemsize)


def test_bytes_of_the_hero_by_hand():
    # 589 slots; an id and a scale are 8 bytes, 589 * 8 / 512 -> 10 header rows; their gradients have none, results 2.
    found = traffic(EPConfig(payload="float8_e4m3"), test_traffic.HERO, Widths(512, 256))
    back = 63 * 591 * 1024
    assert found == (63 * 599 * 512 + back, 63 * 589 * 1024 + back)


def test_nothing_is_exchanged_again():
    for waves in (1, 3):
        layer = test_collectives.layer_of(waves=waves, payload="float8_e4m3")
        programs = [layer, *(test_collectives.gradient_of(layer, remat) for remat in test_collectives.REMATS)]
        counts = [test_collectives.stablehlo(program).count("stablehlo.all_to_all") for program in programs]
        assert counts == [2 * waves, 4 * waves, 4 * waves, 6 * waves]


def test_remat_keeps_bytes(capsys):
    layer = test_collectives.REMATS["exchanges"](test_collectives.layer_of(payload="float8_e4m3"))
    print_saved_residuals(lambda *floats: layer(*floats, *test_collectives.GIVEN[5:])[0], *test_collectives.GIVEN[:5])
    exchanged = [line for line in capsys.readouterr().out.splitlines() if "output of shard_map" in line]
    kept = sorted(line.split("[")[0] for line in exchanged if not line.startswith("i32"))
    assert kept == ["f32", "u8"]  # what returned, and what was dispatched


def test_sequential_waves_wait_for_each_other():
    layer = test_collectives.layer_of(waves=3, payload="float8_e4m3", **TIGHT)
    assert test_collectives.longest_chain(test_collectives.entry(test_collectives.compiled(layer)), "all-to-all") == 6


def test_nothing_is_scatter_added_and_production_sizes_trace(monkeypatch):
    """The checks of test_collectives, for this payload."""
    monkeypatch.setattr(test_collectives, "EPConfig", functools.partial(EPConfig, payload="float8_e4m3"))
    test_collectives.test_nothing_is_scatter_added(dict(transport="pooled_wave"))
    test_collectives.test_production_sizes_trace(dict(transport="pooled_wave"))


# --- settings and the planner -----------------------------------------------------------------------------------------


def test_off_by_default_and_named():
    assert EPConfig().payload == "compute"
    assert "payload float8_e4m3" in EPConfig(payload="float8_e4m3").describe()
    assert "payload" not in EPConfig(payload="float8_e4m3", emulated_shards=8).used  # nothing is sent
    with pytest.raises(ConfigError, match=r"^ep.payload = 'int8': allowed is one of compute, float8_e4m3$"):
        EPConfig(payload="int8")


@pytest.mark.parametrize("transport", [name for name in (*TRANSPORTS, "auto") if name != "pooled_wave"])
def test_other_transports_refuse_it_in_one_line(transport):
    message = (
        rf"^ep.payload = 'float8_e4m3': transport {transport} sends .*; allowed is compute, or transport pooled_wave$"
    )
    with pytest.raises(ConfigError, match=message):
        EPConfig(transport=transport, payload="float8_e4m3")


def test_slots_of_tokens_refuse_it_in_one_line():
    message = r"^ep.slots = 'token': such rows go as they are, .* is 'float8_e4m3'; allowed is assignment, or payload"
    with pytest.raises(ConfigError, match=message):
        EPConfig(slots="token", payload="float8_e4m3")


def test_the_planner_counts_bytes():
    plans = {}
    for name in PAYLOADS:
        sizes = PlannedSizes(tiny_config((1, 2, 4), model__remat="exchanges", ep__payload=name))
        plans[name] = sizes, memory(sizes), links.layer_traffic(sizes, "ep", 8)
    (sizes, wide, wide_links), (sizes8, narrow, narrow_links) = plans.values()
    model = sizes.config.model
    rows, rows8 = (wave_rows(s.config.ep, s.shape, model.latent_dim) for s in (sizes, sizes8))
    for name, found in (("sent", rows8.sent), ("received", rows8.received)):
        assert narrow.wave[name] == found * model.latent_dim
    assert {k: v for k, v in narrow.wave.items() if k not in ("sent", "received")} == {
        k: v for k, v in wide.wave.items() if k not in ("sent", "received")
    }
    slots = PooledWave(sizes.config.ep, sizes.shape).pool_rows
    assert rows8.sent == sizes.shape.num_shards * (slots + payload.float8_header_rows(slots, model.latent_dim))
    integers = 4 * (2 * (rows8.sent - rows.sent) + rows8.received - rows.received)  # of the plan
    saved = wide.wave["received"] - narrow.wave["received"]
    assert wide.kept - narrow.kept == model.num_layers * (saved - integers)
    assert narrow_links.forward.rows.nvlink < wide_links.forward.rows.nvlink
    assert links.layer_traffic(sizes8, "fsdp", 8).total == links.layer_traffic(sizes, "fsdp", 8).total


def test_a_shape_of_one_shard_sends_nothing():
    alone = LayerShape(num_shards=1, num_experts=6, experts_per_token=2, tokens=16)
    assert traffic(EPConfig(payload="float8_e4m3"), alone, Widths(8, 6)) == (0, 0)
