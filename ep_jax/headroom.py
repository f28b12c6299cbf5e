"""Device memory for small arrays below a step's one large buffer, on meshes of several GPUs.

XLA gives device memory out from one end of one range (jaxlib 0.11 keeps the other end for collectives) and fills holes
first. What a program's collectives keep after its first execution then lies right above the large temporary buffer of
that execution, so that later ones must fit into the hole below it, to the byte, together with the next batch and the
last metrics. On 2 H200 a step of 87 GiB ended so in its second execution, out of memory, with 110 of 126 GiB free
(experiments/LOG.md, "Two GPUs"). Memory that is held during the first execution alone leaves the hole larger: the same
step runs then.
"""

import contextlib
from collections.abc import Generator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEADROOM_BYTES = 256 * 2**20  # of each device; a batch and the metrics of a step are a few MiB


def is_needed(mesh: Mesh) -> bool:
    """One GPU has no collectives, and other backends no such range."""
    return mesh.size > 1 and mesh.devices.flat[0].platform == "gpu"


@contextlib.contextmanager
def headroom(mesh: Mesh) -> Generator[None]:
    """Around a program's first execution, waited for inside: holds HEADROOM_BYTES of every device meanwhile."""
    if not is_needed(mesh):
        yield
        return
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    held = jax.jit(lambda: jnp.zeros((mesh.size, HEADROOM_BYTES), jnp.int8), out_shardings=split)()
    held.block_until_ready()
    try:
        yield
    finally:
        held.delete()
