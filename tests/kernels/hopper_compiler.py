"""Compiles the default launch of every kernel for Hopper, without a GPU, and prints what came out as JSON.

`python -m tests.kernels.hopper_compiler`, in a process of its own: Triton either compiles or interprets. jax-triton is
replaced by a call that compiles for the shapes it is given, as the real one does, with pointers of 16 bytes alignment.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INSTRUCTIONS = r"wgmma\.mma_async|cp\.async\.c[ag]|(?:ld|st)\.global[\w.:]*|(?:ld|st)\.local"


def compile_call(*arrays, kernel, out_shape, grid, num_warps, num_stages, **constants):
    """Has the signature of jax_triton.triton_call."""
    del grid
    arrays = [*arrays, *jax.tree.leaves(out_shape)]
    names = kernel.arg_names
    assert set(names[len(arrays) :]) == set(constants), (names, sorted(constants))
    signature = {name: TYPES[str(array.dtype)] for name, array in zip(names, arrays, strict=False)}
    source = ASTSource(
        kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in range(len(arrays))},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    [stack_bytes] = re.findall(r"STACK:(\d+)", usage.stdout + usage.stderr)
    record = {
        "kernel": kernel.__name__,
        "instructions": Counter(re.findall(INSTRUCTIONS, built.asm["ptx"])),
        "shared_bytes": built.metadata.shared,
        "stack_bytes": int(stack_bytes),
    }
    print(json.dumps(record), flush=True)
    return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_shape)


def main():
    fake = types.ModuleType("jax_triton")
    fake.triton_call = compile_call
    sys.modules["jax_triton"] = fake
    from ep_jax_kernels.combine_rows.op import combine_rows
    from ep_jax_kernels.gather_rows.op import gather_rows
    from ep_jax_kernels.grouped_matmul.tiles import ragged_groups
    from ep_jax_kernels.grouped_mlp.op import Methods, grouped_mlp
    from ep_jax_kernels.spread_rows.op import spread_rows

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def integers(*sizes):
        return shape(*sizes, dtype=jnp.int32)

    mlp = functools.partial(grouped_mlp, methods=Methods(warp_specialized=False))

    def gradients(rows, weights, place, assignment, x, w_gate_up, w_down, sizes, row_weights):
        combined, pull = jax.vjp(lambda r, w: combine_rows(r, w, place, assignment, r.dtype), rows, weights)
        out, pull_mlp = jax.vjp(lambda *given: mlp(*given, ragged_groups(sizes)), x, w_gate_up, w_down)
        *weighted, pull_weighted = jax.vjp(
            lambda *given: mlp(*given[:3], ragged_groups(sizes), given[3]), x, w_gate_up, w_down, row_weights
        )
        return pull(combined), pull_mlp(out), pull_weighted(*weighted)

    width = 3080  # a payload row with a header: a multiple of 8 elements, not of any block
    jax.eval_shape(gather_rows, shape(4096, width), integers(8192))
    jax.eval_shape(spread_rows, shape(4096, width), integers(8192), integers(4096, 4))
    jax.eval_shape(
        gradients,
        *(shape(8192, width), shape(2048, 4, dtype=jnp.float32), integers(2048, 4), integers(8192)),
        *(shape(8192, 3072), shape(8, 3072, 6144), shape(8, 3072, 3072), integers(8), shape(8192, dtype=jnp.float32)),
    )


if __name__ == "__main__":
    main()
