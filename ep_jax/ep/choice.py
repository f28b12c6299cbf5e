"""Which transport runs: `auto` made definite, and one-sided rows refused in one line where they cannot be.

Decided once, from the devices and the rows, before anything is compiled.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ep_jax.ep import implementations
from ep_jax.ep.settings import EPConfig, dropless
from ep_jax.fields import ConfigError


def definite(
    settings: EPConfig,
    shards: int,
    devices: Sequence[jax.Device],
    width: int,
    dtype: jax.typing.DTypeLike,
    choices: int,
) -> tuple[EPConfig, str]:
    """(settings without `auto`, why: one line, empty where nothing was chosen) for routed rows of a width and dtype.

    choices: experts of a token.
    `auto` is dense where one shard holds all experts and kernels multiply its rows (XLA would multiply all of them by
    each expert), so that nothing travels and nothing drops; else rowwise where its kernels can run, else pooled_wave.
    Raises ConfigError for transport rowwise on GPUs that cannot run it; on other devices rowwise is an emulation.
    """
    if settings.transport == "auto" and holds_all(settings, shards) and implementations.runs(settings.kernels):
        note = "ep.transport = auto: dense, as every device holds all experts: nothing is sent, nothing drops"
        return dropless(settings), note
    if settings.transport == "auto":
        reason = why_not_one_sided(settings, devices, width, dtype, choices)
        transport = "pooled_wave" if reason else "rowwise"
        note = f"ep.transport = auto: {transport}" + (f", as rowwise cannot run: {reason}" if reason else "")
        return dataclasses.replace(settings, transport=transport), note
    if settings.transport == "rowwise" and devices[0].platform == "gpu" and not settings.emulates:
        reason = why_not_one_sided(settings, devices, width, dtype, choices)
        if reason:
            raise ConfigError(
                f"ep.transport = 'rowwise': {reason}; allowed here are auto, pooled_wave, fixed_cell, ragged, ring, "
                "dense"
            )
    return settings, ""


def holds_all(settings: EPConfig, shards: int) -> bool:
    """Whether a shard holds all experts, and no larger group is emulated."""
    return shards == 1 and not settings.emulates


def why_not_one_sided(
    settings: EPConfig, devices: Sequence[jax.Device], width: int, dtype: jax.typing.DTypeLike, choices: int
) -> str:
    """What one-sided row movements lack here; empty where nothing."""
    if settings.emulates:
        return f"ep.emulated_shards = {settings.emulated_shards} sends nothing"
    if settings.kernels != "auto":
        return f"ep.kernels = {settings.kernels!r}"
    if reason := implementations.why_no_kernels():
        return reason
    from ep_jax_kernels.rowwise.exchange import check_devices
    from ep_jax_kernels.rowwise.op import check_rows

    try:
        check_devices(devices)
        check_rows(jax.ShapeDtypeStruct((1, width), jnp.dtype(dtype)), choices)
    except NotImplementedError as refusal:
        return str(refusal)
    return ""
