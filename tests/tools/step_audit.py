"""Lowers the training step of a configuration and lists its collectives; as a command it prints them as JSON.

Run in a process of its own where it needs more devices than the tests have. Nothing is compiled or run.
"""

import collections
import json
import math
import re
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding

from ep_jax.cli import parse_args
from ep_jax.config import RunConfig
from ep_jax.data import Batch
from ep_jax.mesh import make_mesh
from ep_jax.state import state_target
from ep_jax.step import BATCH_SPEC, make_train_step

ITEMSIZE = {"i1": 1, "i32": 4, "bf16": 2, "f32": 4}
KINDS = "all_to_all|all_gather|reduce_scatter|all_reduce"


def lowered_text(config: RunConfig) -> str:
    """StableHLO of the training step; a scanned block is in it once forward and once backward."""
    mesh, parts = make_mesh(config.mesh, jax.devices()[: config.mesh.size]), config.train.accumulation
    shape = (parts, config.train.sequences_per_step // parts, config.data.sequence_length)
    kinds = Batch(*(np.int32,) * len(Batch._fields))._replace(valid=np.bool_)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    batch = jax.tree.map(lambda kind: jax.ShapeDtypeStruct(shape, kind, sharding=sharding), kinds)
    return make_train_step(config, mesh).lower(state_target(config, mesh), batch).as_text()


def audit(config: RunConfig) -> dict[str, int]:
    """ "kind axes operand-bytes" -> how often; bytes of the first operand on one device."""
    text = lowered_text(config)
    counts: collections.Counter[str] = collections.Counter()
    for start in re.finditer(rf'"stablehlo\.({KINDS})"\(', text):
        rest = text[start.start() : start.start() + 4000]
        groups = re.search(r"replica_groups = #stablehlo\.replica_group_mesh_axes<mesh = @\w+, axes = \[(.*?)\]>", rest)
        tensor = re.search(r" : \(tensor<([^>]*)>[^)]*\) ->", rest)
        assert groups, rest[:300]
        assert tensor, rest[:300]
        axes = "+".join(re.findall(r'name = "(\w+)"', groups[1]))
        *sizes, element = tensor[1].split("x")
        counts[f"{start[1]} {axes} {math.prod(map(int, sizes)) * ITEMSIZE[element]}"] += 1
    return dict(counts)


if __name__ == "__main__":
    print(json.dumps(audit(parse_args(sys.argv[1:], command="step_audit", description=__doc__ or ""))))
