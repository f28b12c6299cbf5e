"""More devices than the test session has: one subprocess each for 16 and 64 virtual CPU devices.

16 devices: the real layer with values and gradients. 64 devices: the hero's shape (64 shards, 384 experts, 8 choices)
with few tokens and narrow rows; every drop is the oracle's.
"""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COMMON = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", COUNT)
import numpy as np
from ep_jax.ep import EPConfig
from ep_jax.mesh import MeshConfig, make_mesh
from tests.ep import ep_cases
assert jax.device_count() == COUNT
ep_cases.NUM_DEVICES = COUNT
"""
VALUES = """
sizes = ep_cases.Sizes(experts=32)
mesh = make_mesh(MeshConfig(replica=2, fsdp=1, ep=8))
settings = EPConfig(sender_factor=0.8, receiver_factor=0.8, waves=3, order="position", receive="pool", premix=4)
step = ep_cases.program(settings, mesh, sizes.sequence_length)
for seed, routing in enumerate((ep_cases.by_document, ep_cases.empty_shard)):
    given = ep_cases.problem(routing, sizes, seed)
    wanted = ep_cases.oracle(given, settings, 8, sizes.sequence_length)
    ep_cases.check_answer(step(*given), wanted)
    assert set(np.unique(wanted.fate)) == {0, 1, 2, 3}
"""
DROPS = """
from ep_jax.ep import reference, routed_experts
sizes = ep_cases.Sizes(tokens=16, sequence_length=8, choices=8, experts=384, width=8, hidden=1)
mesh = make_mesh(MeshConfig(replica=1, fsdp=1, ep=64))
given = ep_cases.problem(ep_cases.by_document, sizes)
arrays = (given.rows, given.ids, given.extra_weights, given.valid, given.w_gate_up, given.w_down)
for settings in (EPConfig(waves=2), EPConfig(transport="rowwise"), EPConfig(transport="ring", premix=8)):
    run = jax.jit(
        lambda *arrays: routed_experts(*arrays, sequence_length=8, mesh=mesh, settings=settings)[1],
        compiler_options=ep_cases.QUICK,
    )
    report = run(*arrays)
    split = [x.reshape(64, 16, *x.shape[1:]) for x in (given.ids, given.extra_weights, given.valid)]
    wanted = reference.fates(
        *split, num_experts=384, sequence_length=8, policy=ep_cases.policy_of(settings)
    ).fate.reshape(given.ids.shape)
    np.testing.assert_array_equal(report.fate_TK, wanted)
    counts = [np.bincount(given.ids[mask], minlength=384) for mask in ep_cases.stages(wanted)]
    np.testing.assert_array_equal(report.counts_PE, counts)
    assert int(report.sender) + int(report.receiver) > 100
"""


def run(devices: int, script: str) -> None:
    code = COMMON.replace("COUNT", str(devices)) + script
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_values_and_gradients_on_16_devices():
    run(16, VALUES)


def test_drops_on_64_devices():
    run(64, DROPS)
