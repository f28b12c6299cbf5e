"""One of several processes with one GPU each: a PUT and a GET against plain JAX, or the refusal, as one JSON line.

`python -m tests.gpu.rowwise_process RANK COUNT PORT [anyway]`; with `anyway` it does not ask whether processes are
refused. On 2 H200 (JAX 0.11.2, NCCL 2.28.9) that ended at the first call in "NCCL operation
ncclGetPeerDevicePointer(win_, 0, peer.value(), &peer_addr) failed: unhandled system error". Letters: T tokens of a
shard, K choices, N rows of a shard's buffer, H width.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

T, K, H = 512, 4, 1024
N = T * K + 128


def main(rank: int, count: int, port: int, *, anyway: bool) -> None:
    jax.distributed.initialize(f"localhost:{port}", count, rank, local_device_ids=[rank])
    from ep_jax_kernels.rowwise.exchange import check_devices
    from ep_jax_kernels.rowwise.op import KERNELS, PLAIN, RouteMap, get, put

    try:
        check_devices(jax.devices())
    except NotImplementedError as refusal:
        if not anyway:
            print(json.dumps({"rank": rank, "refused": str(refusal)}), flush=True)
            return

    mesh = jax.make_mesh((count,), ("ep",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("ep")
    split = NamedSharding(mesh, spec)
    rng = np.random.default_rng(0)
    places = rng.permutation(count * N)[: count * T * K].reshape(-1, K).astype(np.int32)
    rows = rng.standard_normal((count * T, H)).astype(jnp.bfloat16)
    arguments = [jax.make_array_from_callback(x.shape, split, lambda index, x=x: x[index]) for x in (rows, places)]

    def step(how):
        def local(rows, places):
            return get(put(rows, RouteMap(places), N, how), RouteMap(places), how)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))

    kernels, plain = step(KERNELS), step(PLAIN)
    differ = jax.jit(lambda one, right: jnp.sum(one != right))
    wrong = [int(differ(kernels(*arguments), plain(*arguments))) for _ in range(20)]
    print(json.dumps({"rank": rank, "devices": jax.device_count(), "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), anyway="anyway" in sys.argv[4:])
