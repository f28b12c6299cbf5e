"""Test session set-up: 8 CPU devices, strict rank promotion, quick compiles, a deterministic hypothesis profile.

Runs before JAX starts. A wrong device count fails the whole session: a test that quietly skips on one device proves
nothing. `pytest -m gpu` leaves the platform to JAX and runs the GPU tests; everything else runs on the CPU, with the
XLA flags of a training run on CPU devices.
"""

import os

import hypothesis
import jax
import pytest

from ep_jax import xla_flags

NUM_CPU_DEVICES = 8
# Compiling takes most of the time of the tests, and most of that goes into code for fusions by way of MLIR. XLA's older
# emitters need a third of it (a training step of tests/train with jaxlib 0.11.2: 2.7 instead of 8.2 CPU seconds).
QUICK_XLA = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"

hypothesis.settings.register_profile(
    "ep_jax",
    derandomize=True,
    database=None,
    max_examples=20,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ep_jax")


def pytest_configure(config):
    """Fixes platform, device count and strictness before any test module can start a backend."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if gpu_tests_asked_for(config):
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)  # LLVM's take longer than all that they speed up here
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_XLA}".strip()
    xla_flags.prepare("cpu")  # collectives may wait on a busy machine, and a cached program fits processes of tests too


def pytest_sessionstart(session):
    """Fails the session when the devices the tests are written for are not there."""
    devices = jax.devices()
    wanted = "gpu" if gpu_tests_asked_for(session.config) else "cpu"
    if devices[0].platform != wanted:
        pytest.exit(f"tests need {wanted} devices, JAX gives {devices[0].platform}", returncode=3)
    if wanted == "cpu" and len(devices) != NUM_CPU_DEVICES:
        pytest.exit(f"tests need {NUM_CPU_DEVICES} CPU devices, JAX gives {len(devices)}", returncode=3)


def gpu_tests_asked_for(config) -> bool:
    """True for `pytest -m gpu` (the default of pyproject.toml is `-m "not gpu"`)."""
    return config.getoption("markexpr").strip() == "gpu"
