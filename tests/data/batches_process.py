"""One of two processes of test_batches_processes.py: checks that differing data are refused, then writes its shards.

Arguments: process id, address of process 0, folder for the results.
"""

import dataclasses
import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
process, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, num_processes=2, process_id=process, initialization_timeout=30)

import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from ep_jax.data.batches import BatchStream  # noqa: E402
from ep_jax.data.config import DataConfig  # noqa: E402
from ep_jax.data.dataset import open_dataset  # noqa: E402
from ep_jax.fields import ConfigError  # noqa: E402
from ep_jax.mesh import AXES  # noqa: E402

config = DataConfig(
    source="text", path=f"{folder}/corpus", sequence_length=32, held_out_fraction=0.25, cache_dir=f"{folder}/cache"
)
train = open_dataset(config, vocab_size=259).train
mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 2), AXES)
arguments = dict(seed=5, sequences_per_step=16, accumulation=2, mesh=mesh)

try:
    BatchStream(dataclasses.replace(train, fingerprint=f"{process}"), **arguments)
    refused = ""
except ConfigError as error:
    refused = str(error)

batches = BatchStream(train, **arguments)
rows_read = batches.layout.read(batches.rows(4)).tokens.shape[:2]
iterator = batches.from_step(4)  # left open: the process must end all the same
step, batch = next(iterator)
shards = {
    f"{name}.{shard.index[1].start or 0}": np.asarray(shard.data)
    for name, array in batch._asdict().items()
    for shard in array.addressable_shards
}
np.savez(f"{folder}/{process}.npz", step=step, refused=refused, rows_read=rows_read, **shards)
