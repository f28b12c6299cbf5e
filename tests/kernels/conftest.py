"""The kernels' JAX side, with Triton's interpreter in the place of jax-triton."""

import importlib
import sys
import types

import pytest

from tests.kernels import numpy_tensor

KERNELS = ("gather_rows", "spread_rows", "combine_rows", "grouped_matmul", "swiglu", "grouped_mlp")


@pytest.fixture(scope="module")
def ops():
    """The op modules by name, their kernels interpreted."""
    numpy_tensor.require_triton()
    fake = types.ModuleType("jax_triton")
    fake.triton_call = numpy_tensor.interpreted_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, "jax_triton", fake)
        interpreter = importlib.import_module("triton.runtime.interpreter")
        patch.setattr(interpreter, "_patch_lang_tensor", numpy_tensor.patch_lang_tensor(interpreter._patch_lang_tensor))
        for name in KERNELS[:-1]:  # grouped_mlp has none of its own
            importlib.import_module(f"ep_jax_kernels.{name}.kernel")
        yield types.SimpleNamespace(**{name: importlib.import_module(f"ep_jax_kernels.{name}.op") for name in KERNELS})
