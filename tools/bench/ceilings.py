"""What the machine can do, measured in the same run as what is compared with it.

matmul: the experts' three products, forward and backward, as batched matrix products on balanced rows, in one program;
the kernels of the products alone. link: bytes that leave a GPU per second in one all-to-all of the layer's size, as
its kernel runs. copy: bytes read plus written per second by the fastest of several plain copies.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tools.bench.shapes import Shape
from tools.bench.timing import Times, measure

MATMULS = r"nvjet|gemm|cutlass|xmma"  # what XLA multiplies matrices with; SwiGLU between the products is not counted
EXCHANGES = r"(?i)nccl"  # without the copy into memory that NCCL shares, where XLA makes one
COPY_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates of this machine at one layer shape."""

    matmul_flops: float  # per second and device, forward and backward together
    matmul_forward_flops: float
    link_bytes: float  # per second that leave a device; 0 on one device
    copy_bytes: float  # per second, read plus written
    copy_by: str = ""  # which copy was the fastest

    def limit_ms(self, flops: float, off_device_bytes: float, *, backward: bool) -> float:
        """Time of `flops` at the matmul rate plus bytes at the link rate: nothing overlapped, nothing else done."""
        rate = self.matmul_flops if backward else self.matmul_forward_flops
        return 1e3 * (flops / rate + (off_device_bytes / self.link_bytes if off_device_bytes else 0.0))

    def as_json(self) -> dict[str, float | str]:
        return {
            "matmul_tflops": round(self.matmul_flops / 1e12, 1),
            "matmul_forward_tflops": round(self.matmul_forward_flops / 1e12, 1),
            "link_gb_per_s": round(self.link_bytes / 1e9, 1),
            "copy_tb_per_s": round(self.copy_bytes / 1e12, 3),
            "copy_by": self.copy_by,
        }


def ceilings(shape: Shape, mesh: Mesh, dtype: jnp.dtype, iterations: int) -> Ceilings:
    """Measures all of them on the mesh's devices."""
    forward, both = matmul_times(shape, mesh.size, dtype, iterations)
    link = exchange_time(shape.rows, shape.width, mesh, dtype, iterations) if mesh.size > 1 else None
    bytes_off = shape.rows * shape.width * jnp.dtype(dtype).itemsize * (mesh.size - 1) / mesh.size
    copy_bytes, copy_by = fastest_copy(iterations)
    return Ceilings(
        matmul_flops=shape.flops(shape.rows, backward=True) / only(both, MATMULS) * 1e3,
        matmul_forward_flops=shape.flops(shape.rows, backward=False) / only(forward, MATMULS) * 1e3,
        link_bytes=bytes_off / only(link, EXCHANGES) * 1e3 if link else 0.0,
        copy_bytes=copy_bytes,
        copy_by=copy_by,
    )


def only(times: Times, names: str) -> float:
    """ms of a call in kernels of these names, where kernels are known (GPU); of the whole call elsewhere."""
    found = [ms for name, ms in times.kernels_ms.items() if re.search(names, name)]
    return sum(found) or times.median


@functools.cache
def fastest_copy(iterations: int) -> tuple[float, str]:
    """(bytes read plus written per second, how) of the fastest plain copy on one device; measured once a process.

    Elementwise kernels on one-byte elements are no ceiling: XLA gives each thread few bytes. Four-byte elements fill
    16-byte accesses, and a copy without arithmetic becomes the driver's device-to-device copy.
    """
    count = (COPY_BYTES if jax.default_backend() == "gpu" else 2**22) // 4
    copies = {
        "device-to-device copy": (jnp.copy, jnp.int32),
        "x + 1 of int32": (lambda x: x + 1, jnp.int32),
        "2 x of float32": (lambda x: 2 * x, jnp.float32),
    }
    rates = {}
    for name, (copy, dtype) in copies.items():
        source = jnp.ones(count, dtype)
        rates[name] = 2e3 * source.nbytes / measure(jax.jit(copy), source, iterations=iterations).median
    best = max(rates, key=rates.__getitem__)
    return rates[best], best


def matmul_times(shape: Shape, shards: int, dtype: jnp.dtype, iterations: int, parts: int = 1) -> tuple[Times, Times]:
    """(forward, forward and backward) of a shard's experts on balanced rows, in `parts` products in turn."""
    experts = shape.num_experts(shards) // shards
    rows = shape.rows // experts
    keys = jax.random.split(jax.random.key(0), 4)
    x, dy = (jax.random.normal(key, (experts, rows, shape.width), dtype) for key in keys[:2])
    w_in = jax.random.normal(keys[2], (experts, shape.width, 2 * shape.hidden), dtype) * shape.width**-0.5
    w_out = jax.random.normal(keys[3], (experts, shape.hidden, shape.width), dtype) * shape.hidden**-0.5

    def run(x, w_in, w_out):
        pieces = []
        for piece in jnp.array_split(x, parts, axis=1):
            gate, up = jnp.split(jnp.einsum("erh,ehf->erf", piece, w_in), 2, axis=-1)
            pieces.append(jnp.einsum("erf,efh->erh", jax.nn.silu(gate) * up, w_out))
        return jnp.concatenate(pieces, axis=1)

    def loss(x, w_in, w_out, dy):
        out = run(x, w_in, w_out)
        return jnp.sum(out.astype(jnp.float32) * dy.astype(jnp.float32)), out

    forward = measure(jax.jit(run), x, w_in, w_out, iterations=iterations)
    # With the output: the gradients alone do not need the last product of the forward pass.
    gradients = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    both = measure(gradients, x, w_in, w_out, dy, iterations=iterations)
    return forward, both


def exchange_time(rows: int, width: int, mesh: Mesh, dtype: jnp.dtype, iterations: int) -> Times:
    """One all-to-all of `rows` rows a device."""
    split = PartitionSpec("ep")
    make = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), (mesh.size * rows, width), dtype),
        out_shardings=NamedSharding(mesh, split),
    )

    def exchange(x):
        return lax.all_to_all(x.reshape(mesh.size, -1, width), "ep", 0, 0).reshape(-1, width)

    run = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=split, out_specs=split))
    return measure(run, make(), iterations=iterations)
