"""quantize_rows and restore_rows under Triton's interpreter against NumPy, and what they compile to for Hopper.

The interpreter rounds neither to e4m3 nor to bfloat16 right, so `ml_dtypes` does it; that the real kernel uses the
GPU's own conversion is read from its code. Rows: zeros, tiny numbers, one huge value, NaN, infinities, ties; indices -1
and past the last row.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ep_jax_kernels.quantize_rows import op, reference
from jax.sharding import AxisType

from ep_jax.ep import EPConfig, implementations, routed_experts
from kernels.quantize_rows.tune_cases import quantize_cases
from kernels.tune import relative_error
from tests.kernels import numpy_tensor
from tools.bench.shapes import SHAPES

E4M3 = ml_dtypes.float8_e4m3fn
LEAST = np.float32(2.0**-126)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kernels(ops):
    """The operations, their kernels interpreted, with the hardware's conversions from and to e4m3 and to bfloat16."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    convert = interpreter._convert_float

    def converted(values, source, target, rounding):
        if target == language.float8e4nv:
            wide = values if source == language.float32 else convert(values, source, language.float32, rounding)
            return np.clip(wide.view(np.float32), -448, 448).astype(E4M3).view(np.uint8)
        if target == language.bfloat16:
            assert source == language.float32
            return values.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        if source == language.float8e4nv:
            assert target == language.float32
            return values.view(E4M3).astype(np.float32)
        return convert(values, source, target, rounding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", converted)
        importlib.import_module("ep_jax_kernels.quantize_rows.kernel")
        yield op


def adversarial(dtype, width, seed=0):
    """float32 rows that `dtype` holds exactly, those of interest first."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(24, width)) * np.exp2(rng.integers(-10, 10, (24, 1)).astype(np.float64))
    small, large = (2.0**-14, 6e4) if dtype == jnp.float16 else (2.0**-126, 3e38)
    rows[0] = 0
    rows[1], rows[1, 0] = -0.0, -small
    rows[2, 3] = large
    rows[3, 2] = np.nan
    rows[4, 1], rows[5, width - 1] = np.inf, -np.inf
    rows[6], rows[6, 0] = 0, np.nan
    rows[7] = np.r_[448, rng.integers(-448, 449, width - 1)]  # many ties
    rows[8] = small * rng.integers(0, 3, width)
    rows[9] = -large
    return rows.astype(dtype).astype(np.float32)


def quantized(rows, index):
    """Row by row: (e4m3 bits, scales)."""
    bits, scales = np.zeros((len(index), rows.shape[1]), np.uint8), np.ones(len(index), np.float32)
    for m, source in enumerate(index):
        if not 0 <= source < len(rows):
            continue
        largest = np.abs(rows[source]).max()
        if not np.isfinite(largest):
            scales[m] = np.nan
        elif largest > 0:
            scales[m] = max(largest * np.float32(1 / 448), LEAST)
        bits[m] = (rows[source] * (np.float32(1) / scales[m])).astype(E4M3).view(np.uint8)
    return bits, scales


def check_quantized(found, rows, index):
    """Bits and scales, and by the definition alone how near the rows come back."""
    bits, scales = (np.asarray(x) for x in found)
    wanted_bits, wanted_scales = quantized(rows, index)
    good = np.isfinite(wanted_scales)
    np.testing.assert_array_equal(scales, wanted_scales)
    np.testing.assert_array_equal(bits.view(np.uint8)[good], wanted_bits[good])
    back = bits.astype(np.float64) * scales.astype(np.float64)[:, None]
    for m, source in enumerate(index):
        if not 0 <= source < len(rows):
            assert (bits.view(np.uint8)[m] == 0).all()
            assert scales[m] == 1
        elif not np.isfinite(rows[source]).all():
            assert np.isnan(back[m]).all()  # nothing is hidden
        else:
            row = rows[source].astype(np.float64)
            assert (np.abs(back[m] - row) <= np.maximum(np.abs(row) * 2.0**-4, scales[m] * 2.0**-10) * (1 + 1e-6)).all()


INDEX = np.r_[-1, np.arange(24), 7, 7, 24, 10**6, -1, 0].astype(np.int32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("width", [16, 48, 80])
def test_bits_and_scales(kernels, dtype, width):
    rows = adversarial(dtype, width)
    given = jnp.asarray(rows, dtype), jnp.asarray(INDEX)
    check_quantized(kernels.quantize_rows(*given), rows, INDEX)
    check_quantized(jax.jit(reference.quantize_rows)(*given), rows, INDEX)


@pytest.mark.parametrize("launch", op.QUANTIZE_CANDIDATES, ids=str)
def test_every_candidate_quantizes(kernels, launch):
    rows = adversarial(jnp.float32, 144)
    check_quantized(kernels.quantize_rows(jnp.asarray(rows), jnp.asarray(INDEX), launch), rows, INDEX)


@pytest.mark.parametrize("launch", op.RESTORE_CANDIDATES, ids=str)
def test_rows_come_back_and_nothing_unused_is_seen(kernels, launch):
    rng = np.random.default_rng(1)
    width, num_rows = 1040, 23
    bits = rng.integers(0, 256, (num_rows, width), np.uint8)  # all 256 patterns, the two of NaN among them
    index = np.r_[-1, rng.permutation(num_rows - 1), num_rows + 3, -1].astype(np.int32)  # one row is not read
    bits[~np.isin(np.arange(num_rows), index)] = 0x7F
    scale = np.exp2(rng.integers(-20, 20, len(index))).astype(np.float32)
    scale[4] = np.nan  # a row that was not finite
    scale[(index < 0) | (index >= num_rows)] = np.nan
    wanted = np.zeros((len(index), width))
    for m, source in enumerate(index):
        if 0 <= source < num_rows:
            wanted[m] = bits[source].view(E4M3).astype(np.float64) * scale[m]
    given = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e4m3fn), jnp.asarray(index), jnp.asarray(scale)
    for restore in (lambda *given: kernels.restore_rows(*given, launch), reference.restore_rows):
        for dtype in (jnp.float32, jnp.bfloat16):
            found = restore(*given, dtype)
            assert found.dtype == dtype
            np.testing.assert_array_equal(np.asarray(found, np.float32), wanted.astype(dtype).astype(np.float32))


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [(24, "bfloat16", "multiples of 16"), (16400, "bfloat16", "at most 16384"), (16, "int8", "2 or 4 bytes")],
)
def test_other_rows_are_refused(width, dtype, message):
    index = jnp.zeros(3, jnp.int32)
    with pytest.raises(NotImplementedError, match=message):
        op.quantize_rows(jnp.zeros((4, width), dtype), index)
    with pytest.raises(NotImplementedError, match=message):
        op.restore_rows(jnp.zeros((4, width), jnp.float8_e4m3fn), index, jnp.ones(3), jnp.dtype(dtype))


def test_layer_with_kernels_equals_layer_by_xla(kernels, monkeypatch):
    """A float8 layer with drops on four devices and its gradients; tests/ep holds the one by XLA against the oracle."""
    import jax_triton

    ran, lock = set(), threading.Lock()  # the interpreter has one state for all threads

    def run(*arrays, **given):
        with lock:
            ran.add(given["kernel"].__name__)
            return numpy_tensor.interpreted_call(*map(jnp.asarray, arrays), **given)

    def call(*arrays, out_shape, **given):
        return jax.pure_callback(lambda *values: run(*values, out_shape=out_shape, **given), out_shape, *arrays)

    monkeypatch.setattr(jax_triton, "triton_call", call)
    monkeypatch.setattr(implementations, "why_no_kernels", lambda: "")
    rng = np.random.default_rng(0)
    tokens, choices, experts, width, hidden = 32, 3, 4, 16, 8
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    ids = jnp.asarray(np.argsort(rng.gumbel(size=(tokens, experts)) + rng.normal(size=experts))[:, :choices], jnp.int32)
    valid, d_out = jnp.asarray(rng.random(tokens) < 0.9), normal(tokens, width)
    given = (
        normal(tokens, width),
        normal(tokens, choices),
        normal(experts, width, 2 * hidden),
        normal(experts, hidden, width),
    )
    axes = ("replica", "fsdp", "ep")
    mesh = jax.make_mesh((1, 2, 2), axes, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:4])

    def layer(by):
        settings = EPConfig(payload="float8_e4m3", sender_factor=0.9, receiver_factor=0.9, waves=2, kernels=by)

        def objective(rows, weights, *matrices):
            out, report = routed_experts(
                rows, ids, weights, valid, *matrices, sequence_length=8, mesh=mesh, settings=settings
            )
            return jnp.sum(out * d_out), (out, report)

        return jax.device_get(jax.jit(jax.value_and_grad(objective, (0, 1, 2, 3), has_aux=True))(*given))

    ((_, (right, right_report)), right_gradients) = layer("xla")
    assert not ran
    ((_, (found, report)), gradients) = layer("auto")
    assert {"quantize_rows_kernel", "restore_rows_kernel", "gather_rows_kernel", "combine_rows_kernel"} <= ran
    assert len(np.unique(report.fate_TK)) > 2, "nothing was dropped"
    jax.tree.map(np.testing.assert_array_equal, report, right_report)
    for one, other in zip((found, *gradients), (right, *right_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


def test_the_tuners_launches_equal_their_references(kernels):
    cases = list(quantize_cases(SHAPES["toy"], ()))
    assert [case.name for case in cases] == ["quantize", "restore"]
    for case in cases:
        way = case.ways["triton"]
        found, wanted = way.run(way.launches[0])(*case.arguments), case.reference(*case.arguments)
        assert relative_error(found, wanted, case.owned) == 0
        assert relative_error(case.baseline(*case.baseline_arguments), wanted, case.owned) == 0


COMPILE = """
import functools, sys, types, jax, jax.numpy as jnp
from tests.kernels import hopper_compiler
hopper_compiler.TYPES["float8_e4m3fn"] = "*fp8e4nv"
hopper_compiler.INSTRUCTIONS += r"|cvt\\.[\\w.]*e4m3x2[\\w.]*|div\\.rn[\\w.]*"
sys.modules["jax_triton"] = types.SimpleNamespace(triton_call=hopper_compiler.compile_call)
from ep_jax_kernels.quantize_rows import op
shape = jax.ShapeDtypeStruct
index, width = shape((8192,), jnp.int32), 3088  # of a multiple of 16 and of no block
jax.eval_shape(op.quantize_rows, shape((4096, width), jnp.bfloat16), index)
restore = functools.partial(op.restore_rows, dtype=jnp.bfloat16)
jax.eval_shape(restore, shape((4096, width), jnp.float8_e4m3fn), index, shape((8192,), jnp.float32))
"""


def test_compiled_kernels_convert_in_hardware_with_wide_accesses(tmp_path):
    """One conversion instruction for two elements, and no narrow access but those of indices and scales."""
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environ.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    quantize, restore = [json.loads(line) for line in done.stdout.splitlines()]
    assert (quantize["kernel"], restore["kernel"]) == ("quantize_rows_kernel", "restore_rows_kernel")
    for record, conversion in ((quantize, "cvt.rn.satfinite.e4m3x2.f32"), (restore, "cvt.rn.f16x2.e4m3x2")):
        counts = record["instructions"]
        assert record["stack_bytes"] == 0
        assert counts[conversion] > 0, counts
        assert not [name for name in counts if ".local" in name], counts
        assert not [name for name in counts if name.startswith(("ld", "st")) and name.endswith((".b16", ".b8"))], counts
    assert quantize["instructions"]["ld.global.v4.b32"] >= 2
    assert quantize["instructions"]["div.rn.f32"] == 1  # a row's, not an element's
    assert restore["instructions"]["st.global.v4.b32"] >= 2
