"""A program with Mosaic kernels has the same key in JAX's compilation cache in every process that lowers it first."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The text that a kernel is compiled from, locations and names of Python objects included, is part of the key.
PROGRAM = """
import jax, jax.numpy as jnp
from jax._src import cache_key
from ep_jax_kernels.gather_rows import reference
from ep_jax_kernels.grouped_matmul.tiles import ragged_groups
from ep_jax_kernels.grouped_matmul_mgpu import op as products
from ep_jax_kernels.weight_gradient_mgpu import op as gradients

gradients.gather_rows = reference.gather_rows

def both(rows, weights, d_out, sizes):
    groups = ragged_groups(sizes)
    return products.product(rows, weights, groups), gradients.weight_product(rows, d_out, groups, jnp.bfloat16)

shapes = [((1024, 512), jnp.bfloat16), ((8, 512, 512), jnp.bfloat16), ((1024, 512), jnp.bfloat16), ((8,), jnp.int32)]
traced = jax.jit(both).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
assert str(module).count("@mosaic_gpu_v2") == 2
print(cache_key._canonicalize_ir(module, False).hex())
"""


def test_two_processes_agree_on_the_key():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    results = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    (first, _), (second, _) = results
    assert first == second
    assert len(first) > 10_000
