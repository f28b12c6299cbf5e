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
    ("changes", "asked", "notes"),
    [
        ({"mesh__ep": "1"}, "gpu_scan", []),  # 8 rows at a time are all of them
        ({"mesh__ep": "-1"}, "gpu", []),  # not known yet
        (
            {"train__accumulation": "2"},
            "gpu",
            ["not used: train.sequences_per_device = 8, as train.accumulation = 2 is not 0"],
        ),
    ],
    ids=["one part", "unknown", "given"],
)
def test_flags_of_parts_that_follow_from_the_rows_of_a_device(monkeypatch, changes, asked, notes):
    """A mesh of numbers says how many parts there are before the flags are set."""
    settings = {"train__accumulation": "0", "train__sequences_per_device": "8", "train__sequences_per_step": "8"}
    presets, given = [], tiny_config((1, 1, 1), model__scan="true", ep__transport="pooled_wave", **(settings | changes))
    monkeypatch.setattr(xla_flags, "default_platform", lambda: "gpu")
    monkeypatch.setattr(xla_flags, "prepare", lambda preset, *_, **__: presets.append(preset) or ())
    with pytest.raises(ConfigError, match="^devices: JAX should have found a gpu"):
        launch.start(given)
    assert presets == [asked]
    assert launch.unused_accumulation(given) == notes


@pytest.mark.parametrize(
    ("changes", "preset"),
    [
        ({}, "gpu_in_order"),
        ({"transport": "auto"}, "gpu_in_order"),  # where rows cannot be written one-sided
        ({"transport": "auto", "slots": "assignment"}, "gpu"),
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
