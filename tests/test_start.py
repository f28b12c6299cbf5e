"""What `launch.start` refuses once it knows the devices."""

import pytest

from ep_jax import launch, xla_flags
from ep_jax.fields import ConfigError
from tests.train.tiny_run import tiny_config


def test_a_gpu_that_jax_does_not_find_is_refused(monkeypatch):
    """JAX goes on with the CPU after a warning; a run that was meant for a GPU must not."""
    monkeypatch.setattr(xla_flags, "default_platform", lambda: "gpu")
    monkeypatch.setattr(xla_flags, "prepare", lambda *_, **__: ())
    with pytest.raises(ConfigError, match="^devices: JAX should have found a gpu and runs on the CPU") as error:
        launch.start(tiny_config())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("platform", "scan", "parts", "transport", "preset"),
    [
        ("cpu", "true", "1", "ragged", "cpu"),
        ("gpu", "true", "1", "pooled_wave", "gpu_scan"),
        ("gpu", "true", "2", "pooled_wave", "gpu"),
        ("gpu", "false", "1", "pooled_wave", "gpu"),
        ("gpu", "true", "1", "ragged", "gpu_ragged"),
    ],
)
def test_loops_are_pipelined_only_where_layers_are_the_one_loop(platform, scan, parts, transport, preset):
    config = tiny_config(model__scan=scan, train__accumulation=parts, ep__transport=transport)
    assert launch.preset_of(config, platform) == preset


@pytest.mark.parametrize(
    ("changes", "preset"),
    [
        ({}, "gpu_in_order"),
        ({"transport": "auto"}, "gpu"),
        ({"emulated_shards": "8"}, "gpu"),
        ({"transport": "rowwise"}, "gpu"),
        ({"slots": "assignment"}, "gpu"),
        ({"waves": "2"}, "gpu_in_order"),
        ({"waves": "2", "schedule": "overlapped"}, "gpu"),
    ],
    ids=str,
)
def test_short_exchanges_stay_in_order(changes, preset):
    settings = {"transport": "pooled_wave", "slots": "token", "waves": "1"} | changes
    config = tiny_config(model__scan="false", **{f"ep__{name}": value for name, value in settings.items()})
    assert launch.preset_of(config, "gpu") == preset
    assert launch.preset_of(config, "cpu") == "cpu"
