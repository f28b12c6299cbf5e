"""The benchmark's own logic: calls told apart by their kernels, wrong layers refused, limits of what was accepted."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ep_jax.ep import EPConfig
from ep_jax.fields import ConfigError
from ep_jax.profiling import Event
from ep_jax.traces.file import write_step
from ep_jax.traces.synthetic import generate
from tools.bench import layer
from tools.bench.__main__ import main, parse
from tools.bench.ceilings import Ceilings, fastest_copy
from tools.bench.check import check, relative_error
from tools.bench.layers import label, settings_of
from tools.bench.shapes import SHAPES, routing
from tools.bench.timing import Times, calls_of, is_kernel, kind_of, spans_ms

TOY = SHAPES["toy"]
RATES = Ceilings(matmul_flops=1e9, matmul_forward_flops=5e8, link_bytes=1e6, copy_bytes=1e9)


def kernel(device: int, start_ms: float, ms: float, name: str = "gemm") -> Event:
    plane = f"/device:GPU:{device}"
    return Event(plane=plane, line="Stream #1", name=name, start_ns=start_ms * 1e6, duration_ns=ms * 1e6, stats={})


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def problem(mesh):
    return layer.make_problem(TOY, mesh, "skewed", jnp.dtype("float32"))


@pytest.fixture(scope="module")
def local():
    return layer.protocol_layer(EPConfig(sender_factor=1.05, receiver_factor=1.05), TOY.sequence_length)


@pytest.fixture(scope="module")
def result(problem, local):
    return layer.run_layer(problem, local, iterations=2)


def test_calls_are_told_apart_by_counting_kernels_and_last_as_long_as_their_slowest_device():
    first = [kernel(0, 0, 2, "gemm"), kernel(0, 1, 4, "copy"), kernel(0, 5.5, 3, "gemm"), kernel(0, 6, 1, "copy")]
    second = [kernel(1, 0.5, 7, "gemm"), kernel(1, 1, 1, "copy"), kernel(1, 8, 1, "copy"), kernel(1, 30, 0.5, "gemm")]
    told = calls_of(first[::-1] + second, 2)
    assert spans_ms(told) == [7.0, 22.5]
    assert told["/device:GPU:0"] == [first[:2], first[2:]]
    assert calls_of(first + second, 3) is None  # not a whole number of kernels
    assert calls_of([*first[:3], kernel(0, 6, 1, "gemm")], 2) is None  # not the same ones
    assert calls_of([], 1) is None


def test_spread_is_of_the_calls():
    times = Times(tuple(float(i) for i in range(1, 12)), "device")
    assert (times.median, times.low, times.high) == (6.0, 2.0, 10.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_SendRecv", "exchange"),
        ("nvjet_sm90_tst_256x128", "matmul"),
        ("grouped_weight_gradient_kernel", "matmul"),
        ("weight_gradient_mosaic_gpu_kernel", "matmul"),
        ("input_concatenate_fusion", "copy"),
        ("MemcpyD2D", "copy"),
        ("input_scatter_fusion", "gather"),
        ("loop_add_fusion", "elementwise"),
        ("stream_executor::gpu::MultiGpuBarrierWithNcclKernelImpl(long, ncclWindow_vidmem*)", "barrier"),
    ],
)
def test_kernels_are_sorted_by_name(name, kind):
    assert kind_of(name) == kind


def test_a_device_to_device_copy_counts_as_a_kernel():
    assert is_kernel(dataclasses.replace(kernel(0, 0, 1, "MemcpyD2D"), line="Stream #14(MemcpyD2D)"))
    assert not is_kernel(dataclasses.replace(kernel(0, 0, 1), line="XLA Ops"))


def test_the_copy_ceiling_is_the_fastest_copy_and_says_which():
    rate, name = fastest_copy(2)
    assert rate > 1e8
    assert name in ("device-to-device copy", "x + 1 of int32", "2 x of float32")


def test_routings_are_what_they_say():
    for kind in ("uniform", "skewed", "balanced"):
        ids, weights = routing(kind, TOY, 2)
        assert ids.shape == weights.shape == (2 * TOY.tokens, TOY.choices)
        assert all(len(set(row)) == TOY.choices for row in ids.tolist())
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
        counts = np.bincount(ids.ravel(), minlength=TOY.experts)
        assert (np.ptp(counts) == 0) == (kind == "balanced")


def test_documents_have_tastes_of_their_own_and_experts_are_equally_popular():
    ids, weights = routing("document", TOY, 2)
    assert ids.shape == weights.shape == (2 * TOY.tokens, TOY.choices)
    assert all(len(set(row)) == TOY.choices for row in ids.tolist())
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    counts_GE = np.array([np.bincount(rows.ravel(), minlength=TOY.experts) for rows in ids.reshape(8, -1)])
    most_of_document = counts_GE.max(axis=1) / counts_GE.mean(axis=1)  # 1 if experts were equally popular
    assert (most_of_document > 2).all()
    assert counts_GE.sum(axis=0).max() / counts_GE.sum(axis=0).mean() < 1.5


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A trace of two steps, two layers, 2 shards of 96 tokens of which 90 are valid, and its steps."""
    folder = tmp_path_factory.mktemp("trace")
    sizes = {"shards": 2, "rows_per_shard": 3, "sequence_length": 32, "num_layers": 2, "steps": 2}
    steps = list(generate("uniform", num_experts=16, experts_per_token=4, padding_fraction=2 / 32, **sizes))
    for step in steps:
        write_step(folder, step)
    return folder, steps


@pytest.mark.parametrize("layer_number", [0, 1])
def test_a_traces_valid_tokens_come_in_order(trace, layer_number):
    folder, steps = trace
    ids, weights = routing(f"trace:{folder}" + f":{layer_number}" * layer_number, TOY, 2)
    wanted = []
    for step in steps:
        for m, s, t in np.ndindex(step.valid_MST.shape):
            if step.valid_MST[m, s, t]:
                where = (layer_number, m, s, t)
                wanted.append((step.expert_ids_NMSTK[where], step.weights_NMSTK[where]))
    assert len(wanted) == 360 > 2 * TOY.tokens == len(ids)
    np.testing.assert_array_equal(ids, [row for row, _ in wanted[: len(ids)]])
    np.testing.assert_array_equal(weights, [row for _, row in wanted[: len(ids)]])


@pytest.mark.parametrize(
    ("shape", "shards", "suffix", "message"),
    [
        ("toy", 4, "", "has 360 valid tokens; shape toy on 4 devices needs 512"),
        ("toy", 2, ":2", "has 16 experts and 4 choices in 2 layers; .* a layer below 2"),
        ("B", 2, "", "needs 128 experts and 8 choices"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(trace, shape, shards, suffix, message):
    with pytest.raises(ConfigError, match=message):
        routing(f"trace:{trace[0]}{suffix}", SHAPES[shape], shards)


def test_a_layer_is_checked_and_its_drops_counted(result):
    assert result.error < 1e-5
    assert result.gradient_error < 1e-5
    assert 0 < result.dropped < 0.3
    assert len(result.both.ms) == 2
    assert result.both.source == "host"


def test_memory_is_arguments_outputs_and_temporaries(problem, result):
    row, shards = result.as_json(), 2
    inputs = sum(x.nbytes for x in (*problem.inputs, problem.ids_TK, problem.d_out_TH)) / shards
    results = sum(x.nbytes for x in (*problem.inputs, problem.rows_TH)) / shards  # the gradients and the output
    assert result.memory.arguments == pytest.approx(inputs, abs=64)
    assert result.memory.outputs == pytest.approx(results, abs=64)
    assert result.memory.temporary > 0
    assert result.memory.peak == sum((result.memory.arguments, result.memory.outputs, result.memory.temporary))
    assert row["peak_gib"] == round(result.memory.peak / 2**30, 5)


def test_a_wrong_value_or_gradient_is_refused(problem, local):
    forward, gradients = layer.compile_layer(problem, local)
    inputs = (*problem.inputs, problem.ids_TK)
    out, fates = forward(*inputs)
    right, _ = gradients(*inputs, problem.d_out_TH)
    fates = np.asarray(fates)
    check(problem, fates, out, right)
    with pytest.raises(ArithmeticError, match="output"):
        check(problem, fates, out * 1.01, right)
    most = int(np.bincount(np.asarray(problem.ids_TK).ravel()).argmax())
    wrong = {
        "gradient of rows": (0, jnp.roll(right[0], 1, axis=0)),
        "gradient of combine weights": (1, right[1] * 1.01),
        "gradient of w_in of expert 15": (2, right[2].at[15].multiply(1.01)),
        f"gradient of w_in of expert {most}": (2, right[2].at[most, 3].set(jnp.nan)),
        f"gradient of w_out of expert {most}": (3, right[3].at[most].add(1e-3)),
    }
    for name, (index, gradient) in wrong.items():
        with pytest.raises(ArithmeticError, match=name):
            check(problem, fates, out, (*right[:index], gradient, *right[index + 1 :]))


def test_errors_are_relative_and_nothing_is_lost_in_zeros():
    want = np.array([3.0, 4.0], np.float32)
    assert relative_error(jnp.array([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(jnp.zeros(2), np.zeros(2, np.float32)) == 0
    assert relative_error(jnp.ones(2), np.zeros(2, np.float32)) == float("inf")
    assert np.isnan(relative_error(jnp.array([3.0, jnp.nan]), want))


def test_the_limit_counts_accepted_rows_of_the_most_loaded_device(problem, result):
    ids, fates = np.asarray(problem.ids_TK), result.fates
    load, off = [0, 0], [0, 0]
    for token, choice in np.ndindex(ids.shape):
        if fates[token, choice] == 0:
            source, destination = token // TOY.tokens, ids[token, choice] // 8
            load[destination] += 1
            off[source] += source != destination
    flops, moved = max(load) * 6 * TOY.width * TOY.hidden, max(off) * TOY.width * 4
    expected = 1e3 * (flops / 5e8 + 2 * moved / 1e6)
    work = layer.work_of(result, problem, backward=False)
    np.testing.assert_allclose(layer.limit_ms(work, RATES, backward=False), expected, rtol=1e-9)
    expected = 1e3 * (3 * flops / 1e9 + 4 * moved / 1e6)
    work = layer.work_of(result, problem, backward=True)
    np.testing.assert_allclose(layer.limit_ms(work, RATES, backward=True), expected, rtol=1e-9)
    met = {(token, ids[token, choice] // 8) for token, choice in np.argwhere(fates == 0)}
    once = [sum(token // TOY.tokens == source != peer for token, peer in met) for source in (0, 1)]
    assert max(once) < max(off)
    found = layer.work_of(result, problem, backward=False, once_per_peer=True)
    assert found.off_device_bytes == 2 * max(once) * TOY.width * 4
    assert work.rates(1e-4) == {  # one ten-thousandth of a millisecond
        "tflops": round(3 * flops / 1e-7 / 1e12, 1),
        "off_device_gb_per_s": round(4 * moved / 1e-7 / 1e9, 1),
    }


def test_variants_do_not_repeat_what_a_transport_does_not_use():
    arguments = parse(
        ["layer", "--shapes", "toy", "--transport", "pooled_wave,ragged", "--sender", "1,2", "--waves", "1"]
    )
    assert [s.transport for s in settings_of(arguments)] == ["pooled_wave", "pooled_wave", "ragged"]
    arguments = parse(["waves", "--shapes", "toy", "--waves", "1,2"])
    assert [(s.waves, s.schedule) for s in settings_of(arguments)] == [
        (1, "sequential"),
        (2, "sequential"),
        (2, "overlapped"),
    ]


def test_any_setting_of_the_protocol_makes_variants():
    arguments = parse(["layer", "--shapes", "toy", "--ep", "premix=1,2", "--ep", "rescale=true"])
    found = list(settings_of(arguments))
    assert [(s.premix, s.rescale) for s in found] == [(1, True), (2, True)]
    names = [name for name, _ in arguments.ep]
    assert label(found[1], names) == "pooled_wave s1.03 r1.03 premix 2 rescale True"


def test_tokens_in_slots_cross_once(tmp_path):
    out = tmp_path / "layer.json"
    argv = ["layer", "--shapes", "toy", "--devices", "2", "--ep", "slots=assignment,token", "--iterations", "2"]
    assert main([*argv, "--sender", "9", "--receiver", "9", "--dtype", "float32", "--out", str(out)]) == 0
    assignments, tokens = json.loads(out.read_text())["results"]
    assert assignments["drop_rate"] == tokens["drop_rate"] == 0
    assert max(tokens["relative_error"], tokens["relative_error_of_gradients"]) < 1e-5
    assert tokens["limit_ms"]["both"] < assignments["limit_ms"]["both"]  # fewer bytes, the same products


def test_the_stock_recipe_runs_first_and_others_are_compared_with_it(tmp_path, capsys):
    out = tmp_path / "layer.json"
    argv = ["layer", "--shapes", "toy", "--devices", "2", "--transport", "pooled_wave,stock", "--iterations", "2"]
    assert main([*argv, "--dtype", "float32", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    first, second = content["results"]
    assert first["settings"]["transport"] == "stock"
    assert "stock_ratio" not in first
    assert first["drop_rate"] == 0
    assert first["variant"] == "stock, 2 calls"
    ratio = first["forward_backward"]["median_ms"] / second["forward_backward"]["median_ms"]
    assert second["stock_ratio"] == pytest.approx(ratio, abs=0.006)
    assert content["commands"][0].startswith("python -m tools.bench layer --shapes toy")
    assert content["devices"]["used_devices"] == 2
    assert "x stock" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["layer", "--transport", "stok"], "ep.transport = 'stok'"),
        (["layer", "--routing", "random"], "--routing random: allowed are uniform"),
        (["layer", "--ep", "kernel=xla"], "--ep kernel=xla: expected NAME=VALUES"),
        (["layer", "--iterations", "0"], "--iterations 0"),
        (["layer", "--shapes", "D"], "--shapes D: allowed are A, B, C"),
        (["layer", "--sender", "1,x"], "--sender 1,x: expected numbers"),
    ],
)
def test_a_wrong_command_is_one_line(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(argv)


def test_committed_results_say_command_devices_and_spread(pytestconfig):
    rows = []
    for file in sorted((pytestconfig.rootpath / "benchmarks").glob("*.json")):
        content = json.loads(file.read_text())
        if "results" in content:
            assert content["commands"], file
            assert content["devices"]["versions"]["jax"], file
            rows += [row for row in content["results"] if "forward_backward" in row]
    assert rows
    for row in rows:
        both, is_stock = row["forward_backward"], row.get("variant", "").startswith("stock")
        assert both["iterations"] >= (5 if is_stock else 20)
        assert both["p10_ms"] <= both["median_ms"] <= both["p90_ms"]
