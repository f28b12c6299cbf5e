"""`tools.bench train` end to end on a tiny model: figures that agree, phases, compilations, refusals."""

import contextlib
import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ep_jax.config import load
from ep_jax.fields import ConfigError
from tests.train.tiny_run import settings
from tools.bench.train import compile_step, main


@contextlib.contextmanager
def kept_programs():
    """JAX's cache as it was afterwards; within, what compiles in a hurry is kept too, and compiles in a hurry."""
    restored = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in restored} | {"jax_disable_most_optimizations": False}
    try:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What the file says of 4 steps, 2 traced ones, and an empty compilation cache."""
    folder = tmp_path_factory.mktemp("bench_train")
    (folder / "corpus").mkdir()
    for number in range(40):
        (folder / "corpus" / f"{number}.txt").write_text(f"text {number} is learnt " * 20)
    names = {"data.source": "text", "data.path": str(folder / "corpus"), "data.cache_dir": str(folder / "tokens")}
    names |= {"train.compilation_cache": str(folder / "programs"), "run_dir": str(folder / "run")}
    overrides = settings((1, 2, 4), model__num_layers=1, ep__sender_factor=1.0, ep__receiver_factor=1.0) | names
    argv = [word for name, value in overrides.items() for word in (f"--{name}", value)]
    with kept_programs():
        assert main(["--steps", "4", "--profile", "2", "--out", str(folder / "out.json"), *argv]) == 0
    assert not (folder / "run").exists()  # a benchmark leaves no run behind
    content = json.loads((folder / "out.json").read_text())
    assert content["commands"][0].startswith("python -m tools.bench train --steps 4")
    assert content["devices"]["used_devices"] == 8
    return content["results"][0]


def test_speed_is_tokens_over_the_median_step(result):
    times = result["step_ms"]
    assert times["iterations"] == 4
    assert times["p10_ms"] <= times["median_ms"] <= times["p90_ms"]
    assert 0 < result["tokens_per_step"] <= 8 * 16
    speed = result["tokens_per_step"] / times["median_ms"] * 1e3
    assert result["tokens_per_second"] == pytest.approx(speed, rel=1e-3)
    assert result["mfu"] is None  # the peak of a CPU is unknown
    assert 0 < result["drop_rate"] < 1
    assert 0 < result["loss"] < 6


def test_start_up_says_what_compiling_took(result):
    startup = result["startup"]
    assert startup["compilation_of_the_step"]["cache"] == "miss"
    assert 0 < startup["compilation_of_the_step"]["compiling_s"] < startup["all_programs"]["compiling_s"]
    assert startup["all_programs"]["programs"] >= 2
    assert startup["before_compiling_s"] > 0


def test_a_program_is_compiled_and_then_read_from_the_cache(tmp_path):
    found = []
    with kept_programs():
        for folder in ("", str(tmp_path), str(tmp_path)):
            jax.config.update("jax_compilation_cache_dir", folder or None)
            compilation_cache.reset_cache()
            jax.clear_caches()
            compiled, compilation = compile_step(jax.jit(lambda x, y: x @ y), jnp.ones((2, 3)), jnp.ones((3, 2)))
            found.append(compilation["cache"])
            assert (compiled(jnp.ones((2, 3)), jnp.ones((3, 2))) == 3).all()
    assert found == ["off", "miss", "hit"]


def test_every_phase_of_the_model_is_in_the_table(result):
    phases = result["phases"]["by_phase_ms"]
    wanted = {"attention", "router", "latent", "shared_experts", "dispatch", "experts", "combine", "loss", "optimizer"}
    assert wanted <= phases.keys()
    assert {"forward", "backward"} <= phases["experts"].keys()
    assert {"all-gather", "all-to-all", "reduce-scatter"} <= result["phases"]["collectives_ms"].keys()
    total = sum(sum(passes.values()) for passes in phases.values()) + sum(result["phases"]["collectives_ms"].values())
    assert result["phases"]["step_ms"] == pytest.approx(total, rel=1e-2)
    assert sum(phases["no scope"].values()) < 0.2 * total
    assert result["phases"]["idle_ms"] is None


def test_memory_of_the_step_and_the_configuration_are_there(result):
    memory = result["memory_of_the_step"]
    assert memory["peak_gib"] >= memory["temporary_gib"] > 0
    assert result["peak_memory_gib"] is None
    assert "model_dim = 32" in result["config"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps 0: allowed is an integer of at least 1"),
        (["--profile", "x"], "--profile x: allowed is an integer of at least 0"),
        (["--train.step", "3"], "train.step"),
    ],
)
def test_a_wrong_command_is_one_line(argv, message):
    with pytest.raises(ConfigError, match=message):
        main(argv)


def test_the_cache_is_off_unless_asked_for():
    assert load(None).train.compilation_cache == ""
