"""What the kernels compile to for Hopper, and what importing and calling them costs: no GPU is needed to see it."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from ep_jax_kernels import call
from jax.sharding import PartitionSpec

from tests.kernels.numpy_tensor import require_triton

ROOT = Path(__file__).parent.parent.parent
SHARED_BYTES = 227 * 1024  # of a Hopper multiprocessor, at most, for one program


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What the compiler made of each launch: some kernels are launched twice, for output and gradient."""
    require_triton()
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "JAX_PLATFORMS": "cpu"}
    environ.pop("TRITON_INTERPRET", None)
    command = (sys.executable, "-m", "tests.kernels.hopper_compiler")
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def instructions(compiled, kernel):
    """Counts by instruction, of each launch of a kernel."""
    found = [record["instructions"] for record in compiled if record["kernel"] == kernel]
    assert found
    return found


def test_every_kernel_fits_and_spills_nothing(compiled):
    assert {record["kernel"] for record in compiled} == {
        "gather_rows_kernel",
        "spread_rows_kernel",
        "combine_rows_kernel",
        "combine_rows_gradient_kernel",
        "grouped_matmul_kernel",
        "grouped_weight_gradient_kernel",
        "swiglu_kernel",
        "swiglu_gradient_kernel",
    }
    for record in compiled:
        assert record["shared_bytes"] <= SHARED_BYTES, record
        assert record["stack_bytes"] == 0, record
        assert not [name for name in record["instructions"] if ".local" in name], record


@pytest.mark.parametrize(
    "kernel",
    [
        "gather_rows_kernel",
        "spread_rows_kernel",
        "combine_rows_kernel",
        "combine_rows_gradient_kernel",
        "swiglu_kernel",
        "swiglu_gradient_kernel",
    ],
)
def test_rows_move_16_bytes_at_a_time(compiled, kernel):
    """Narrower accesses are for indices and weights: 4 bytes each, never the 2 bytes of a row's element."""
    for counts in instructions(compiled, kernel):
        assert not [name for name in counts if name.endswith((".b16", ".b8"))], counts
        for access, least in (("ld.global", 2), ("st.global", 1)):
            wide = [name for name in counts if name.startswith(access) and name.endswith(".v4.b32")]
            assert sum(counts[name] for name in wide) >= least, counts


@pytest.mark.parametrize("kernel", ["grouped_matmul_kernel", "grouped_weight_gradient_kernel"])
def test_products_use_hopper_matrix_instructions_fed_by_asynchronous_copies(compiled, kernel):
    for counts in instructions(compiled, kernel):
        assert counts["wgmma.mma_async"] > 0
        assert counts["cp.async.cg"] > 0  # the form that copies 16 bytes
        assert "cp.async.ca" not in counts
        assert {name for name in counts if name.startswith("st.global")} == {"st.global.v4.b32"}


def test_importing_the_operations_imports_neither_triton_nor_jax_triton():
    code = (
        "import sys, ep_jax_kernels.gather_rows.op, ep_jax_kernels.combine_rows.op, ep_jax_kernels.grouped_mlp.op;"
        "print([name for name in ('triton', 'jax_triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_outputs_vary_over_the_mesh_axes_of_the_inputs(monkeypatch):
    """jax-triton's outputs vary over nothing, which JAX would refuse to give back as a shard's own."""
    fake = types.ModuleType("jax_triton")
    fake.triton_call = lambda *_, out_shape, **__: jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_shape)
    monkeypatch.setitem(sys.modules, "jax_triton", fake)
    mesh = jax.make_mesh((2, 4), ("fsdp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    seen = []

    def local(sharded, whole):
        outs = call.triton_call(
            *(sharded, whole), kernel=None, out_shape=[jax.typeof(whole)] * 2, programs=1, num_warps=4
        )
        alone = call.triton_call(whole, kernel=None, out_shape=jax.typeof(whole), programs=1, num_warps=4)
        seen.extend(sorted(jax.typeof(out).manual_axis_type.varying) for out in (*outs, alone))
        return outs[0]

    split = PartitionSpec("ep")
    jax.eval_shape(
        jax.shard_map(local, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split), jnp.ones(8), jnp.ones(3)
    )
    assert seen == [["ep"], ["ep"], []]
