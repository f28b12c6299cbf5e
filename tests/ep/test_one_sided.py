"""The rowwise transport as it runs on GPUs, its movements in plain JAX, and what `auto` becomes.

Kept rows, values and gradients against the NumPy oracle; rows that nobody writes are NaN, as memory on a GPU may be.
Letters as in rowwise_gpu.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.rowwise import op, reference

from ep_jax.ep import EPConfig, choice, layer
from ep_jax.ep.rowwise_gpu import RowwiseGPU
from ep_jax.fields import ConfigError
from tests.ep import ep_cases
from tests.ep.ep_cases import Sizes, problem


@pytest.fixture
def one_sided(monkeypatch):
    """Makes the layer build the GPU's transport, with movements in plain JAX that leave unput rows NaN."""
    put_rows = reference.put_rows

    def poisoned(rows_TH, place_TK, num_rows, axis):
        put_N = reference.source_of_rows(place_TK, num_rows, axis) >= 0
        return jnp.where(put_N[:, None], put_rows(rows_TH, place_TK, num_rows, axis), jnp.nan)

    monkeypatch.setattr(reference, "put_rows", poisoned)
    monkeypatch.setitem(layer.TRANSPORTS, "rowwise", lambda *args: RowwiseGPU(*args, how=op.PLAIN))


SIZES = Sizes(tokens=32, sequence_length=16, experts=8, choices=3, width=16, hidden=8)
CASES = [
    ((1, 2, 4), EPConfig(transport="rowwise", receiver_factor=0.7, agreed="round_robin")),
    ((1, 2, 4), EPConfig(transport="rowwise", receiver_factor=0.6, agreed="tail", rescale=True)),
    ((2, 2, 2), EPConfig(transport="rowwise", receiver_factor=0.8, agreed="water_fill", waves=3, premix=2)),
    ((1, 1, 8), EPConfig(transport="rowwise", receiver_factor=8.0, waves=1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'x'.join(map(str, case[0]))}-{case[1].agreed}")
def test_equals_the_oracle(one_sided, case):
    (replica, fsdp, ep), settings = case
    step = ep_cases.program(settings, ep_cases.mesh_of(replica, fsdp, ep), SIZES.sequence_length)
    dropped = 0
    for seed, routing in enumerate(ep_cases.ROUTINGS):
        given = problem(routing, SIZES, seed)
        wanted = ep_cases.oracle(given, settings, ep, SIZES.sequence_length)
        ep_cases.check_answer(step(*given), wanted)
        dropped += int((wanted.fate == ep_cases.RECEIVER).sum())
    assert (dropped > 0) == (settings.receiver_factor < 1)


@dataclasses.dataclass
class Device:
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    compute_capability: str = "9.0"


@pytest.fixture
def with_kernels(monkeypatch):
    monkeypatch.setattr(choice.implementations, "why_no_kernels", lambda: "")


def test_auto_is_rowwise_where_gpus_reach_each_other(with_kernels):
    settings, note = choice.definite(EPConfig(transport="auto"), [Device()] * 8, 3072, jnp.bfloat16)
    assert (settings.transport, note) == ("rowwise", "ep.transport = auto: rowwise")


@pytest.mark.parametrize(
    ("settings", "devices", "width", "reason"),
    [
        (dict(), [Device(compute_capability="8.0", device_kind="NVIDIA A100")], 3072, "NVIDIA A100"),
        (dict(), [Device()] * 16, 3072, "16 GPUs: at most 8"),
        (dict(), [Device()], 100, "rows of 100"),
        (dict(kernels="xla"), [Device()], 3072, "ep.kernels = 'xla'"),
        (dict(emulated_shards=16), [Device()], 3072, "ep.emulated_shards = 16"),
    ],
)
def test_auto_is_pooled_wave_where_something_lacks_and_says_what(with_kernels, settings, devices, width, reason):
    found, note = choice.definite(EPConfig(transport="auto", **settings), devices, width, jnp.bfloat16)
    assert found == EPConfig(transport="pooled_wave", **settings)
    assert note.startswith("ep.transport = auto: pooled_wave, as rowwise cannot run: ")
    assert reason in note
    if "emulated_shards" not in settings:
        with pytest.raises(ConfigError, match="ep.transport = 'rowwise': .*; allowed here are pooled_wave"):
            choice.definite(EPConfig(transport="rowwise", **settings), devices, width, jnp.bfloat16)


def test_auto_on_a_cpu():
    settings, note = choice.definite(EPConfig(transport="auto"), jax.devices(), 3072, jnp.bfloat16)
    assert settings.transport == "pooled_wave"
    assert "for NVIDIA GPUs" in note
    rowwise = EPConfig(transport="rowwise")
    assert choice.definite(rowwise, jax.devices(), 10, jnp.float32) == (rowwise, "")


def test_the_layer_takes_auto():
    given = problem(ep_cases.uniform, SIZES)
    mesh = ep_cases.mesh_of(1, 1, 8)
    step = ep_cases.program(EPConfig(transport="auto"), mesh, SIZES.sequence_length)
    other = ep_cases.program(EPConfig(transport="pooled_wave"), mesh, SIZES.sequence_length)
    (_, (found, _)), _ = step(*given)
    (_, (right, _)), _ = other(*given)
    np.testing.assert_array_equal(found, right)
