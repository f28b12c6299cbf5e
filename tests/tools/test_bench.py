"""The benchmark's own logic: calls told apart by pauses, wrong layers refused, limits of what was accepted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ep_jax.ep import EPConfig
from ep_jax.fields import ConfigError
from ep_jax.profiling import Event
from tools.bench import layer
from tools.bench.__main__ import parse, variants
from tools.bench.ceilings import Ceilings
from tools.bench.shapes import SHAPES, routing
from tools.bench.timing import Times, call_spans, kind_of

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
def result(problem):
    return layer.run_layer(problem, EPConfig(sender_factor=1.05, receiver_factor=1.05), iterations=2)


def test_a_call_is_what_lies_between_pauses_and_lasts_as_long_as_its_slowest_device():
    events = [
        kernel(0, 0, 2),
        kernel(0, 1, 4),
        kernel(0, 30, 3),
        kernel(1, 0.5, 7),
        kernel(1, 30, 1),
        kernel(1, 32, 0.5),
    ]
    assert call_spans(events, 2) == [7.0, 3.0]
    assert call_spans(events, 3) is None
    assert call_spans([], 1) is None


def test_spread_is_of_the_calls():
    times = Times(tuple(float(i) for i in range(1, 12)), "device", {}, {})
    assert (times.median, times.low, times.high) == (6.0, 2.0, 10.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_SendRecv", "exchange"),
        ("nvjet_sm90_tst_256x128", "matmul"),
        ("input_concatenate_fusion", "copy"),
        ("input_scatter_fusion", "gather"),
        ("loop_add_fusion", "elementwise"),
    ],
)
def test_kernels_are_sorted_by_name(name, kind):
    assert kind_of(name) == kind


def test_routings_are_what_they_say():
    for kind in ("uniform", "skewed", "balanced"):
        ids, weights = routing(kind, TOY, 2)
        assert ids.shape == weights.shape == (2 * TOY.tokens, TOY.choices)
        assert all(len(set(row)) == TOY.choices for row in ids.tolist())
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
        counts = np.bincount(ids.ravel(), minlength=TOY.experts)
        assert (np.ptp(counts) == 0) == (kind == "balanced")


def test_a_layer_is_checked_and_its_drops_counted(result):
    assert result.error < 1e-5
    assert result.gradient_error < 1e-5
    assert 0 < result.dropped < 0.3
    assert len(result.both.ms) == 2
    assert result.both.source == "host"


def test_a_wrong_value_or_gradient_is_refused(problem, result):
    forward, gradients = layer.compile_layer(problem, result.settings)
    inputs = (*problem.inputs, problem.ids_TK)
    out, fates = forward(*inputs)
    d_rows, d_weights, *_ = gradients(*inputs, problem.d_out_TH)
    fates = np.asarray(fates)
    layer.check(problem, fates, out, d_rows, d_weights)
    with pytest.raises(ArithmeticError, match="output"):
        layer.check(problem, fates, out * 1.01, d_rows, d_weights)
    with pytest.raises(ArithmeticError, match="gradient of rows"):
        layer.check(problem, fates, out, jnp.roll(d_rows, 1, axis=0), d_weights)
    with pytest.raises(ArithmeticError, match="gradient of combine weights"):
        layer.check(problem, fates, out, d_rows, d_weights * 1.01)


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
    np.testing.assert_allclose(layer.limit_ms(result, problem, RATES, backward=False), expected, rtol=1e-9)
    expected = 1e3 * (3 * flops / 1e9 + 4 * moved / 1e6)
    np.testing.assert_allclose(layer.limit_ms(result, problem, RATES, backward=True), expected, rtol=1e-9)


def test_variants_do_not_repeat_what_a_transport_does_not_use():
    arguments = parse(
        ["layer", "--shapes", "toy", "--transport", "pooled_wave,ragged", "--sender", "1,2", "--waves", "1"]
    )
    assert [s.transport for s in variants(arguments)] == ["pooled_wave", "pooled_wave", "ragged"]
    arguments = parse(["waves", "--shapes", "toy", "--waves", "1,2"])
    assert [(s.waves, s.schedule) for s in variants(arguments)] == [
        (1, "sequential"),
        (2, "sequential"),
        (2, "overlapped"),
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["layer", "--shapes", "D"], "--shapes D: allowed are A, B, C"),
        (["layer", "--sender", "1,x"], "--sender 1,x: expected numbers"),
    ],
)
def test_a_wrong_command_is_one_line(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(argv)


def test_committed_results_say_command_devices_and_spread(pytestconfig):
    files = sorted((pytestconfig.rootpath / "benchmarks").glob("*_20261130.json"))
    assert files
    for file in files:
        content = json.loads(file.read_text())
        assert content["commands"]
        assert content["devices"]["versions"]["jax"]
        for row in content["results"]:
            both = row["forward_backward"]
            assert both["iterations"] >= 20
            assert both["p10_ms"] <= both["median_ms"] <= both["p90_ms"]
