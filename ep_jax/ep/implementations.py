"""Which code computes an operation: a GPU kernel where it runs, else XLA.

The kernels (folder kernels/, installed as `ep_jax_kernels`) need an NVIDIA GPU and jax-triton. Where both are there,
`ep.kernels = "auto"` takes them. A kernel refuses what it does not do with NotImplementedError; only that falls through
to XLA, and is logged once. The choice is made when an operation is traced; its derivative belongs to what was chosen.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

import jax
from ep_jax_kernels.call import unless_refused

_wanted: ContextVar[str] = ContextVar("kernels", default="auto")


@contextlib.contextmanager
def using(kernels: str) -> Generator[None]:
    """What is traced inside uses `kernels`, "auto" or "xla", and so do its derivatives, whenever they are traced."""
    token = _wanted.set(kernels)
    try:
        yield
    finally:
        _wanted.reset(token)


def chosen() -> str:
    """ "triton" or "xla", for what is traced now."""
    return "triton" if runs(_wanted.get()) else "xla"


def runs(kernels: str) -> bool:
    """Whether `ep.kernels` = kernels means the GPU kernels here."""
    return kernels == "auto" and not why_no_kernels()


def why_no_kernels() -> str:
    """Why the GPU kernels cannot be used here; empty where they can."""
    if jax.default_backend() != "gpu" or "NVIDIA" not in jax.devices()[0].device_kind:
        return f"kernels are for NVIDIA GPUs, this is {jax.devices()[0].device_kind}"
    return _missing_package()


@functools.cache
def _missing_package() -> str:
    installed = importlib.util.find_spec("jax_triton") is not None
    return "" if installed else "jax_triton not installed (pip install 'ep-jax[cuda]')"


def first(operation: str, kernel: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
    """kernel(*arguments) where kernels are chosen and it takes these arguments, else plain(*arguments)."""
    if chosen() == "triton":
        return unless_refused(f"{operation} by XLA", kernel, plain, *arguments)
    return plain(*arguments)


def describe(kernels: str) -> str:
    """For the start of a run: which code computes rows and experts, and why."""
    if kernels == "xla":
        return "XLA (ep.kernels = 'xla')"
    reason = why_no_kernels()
    return f"XLA; {reason}" if reason else "Triton kernels where they apply, else XLA"
