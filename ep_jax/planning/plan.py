"""One plan as a nested dict of plain numbers, units in the keys: what `tools/plan.py` prints and writes as JSON."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ep_jax.config import RunConfig, check_run, placed
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.choice import holds_all
from ep_jax.ep.pooled_tokens import pooled_transport
from ep_jax.ep.settings import dropless
from ep_jax.fields import ConfigError
from ep_jax.flops import flops_per_token, num_parameters
from ep_jax.model.parameters import CAST_KINDS
from ep_jax.planning import advice, links
from ep_jax.planning.bounds import Bounds, bounds
from ep_jax.planning.hardware import Hardware
from ep_jax.planning.memory import (
    Memory,
    by_kernels,
    bytes_per_parameter,
    has_copies,
    memory,
    optimizer_bytes,
    published_bytes_per_parameter,
    wave_rows,
)
from ep_jax.planning.sizes import FLOAT32, Sizes

OUT_OF_SCOPE = "drops, without a trace: they follow from routing, not from sizes; --trace gives recorded routing"


def place(config: RunConfig, hardware: Hardware) -> RunConfig:
    """The configuration on the hardware, its transport chosen. Raises ConfigError where it cannot stand there."""
    config = placed(config, hardware.num_devices if -1 in config.mesh.shape else None)
    mesh = config.mesh
    if mesh.size > hardware.num_devices:
        raise ConfigError(
            f"mesh.{mesh.shape_text()}: needs {mesh.size} GPUs, the hardware has {hardware.domains} x "
            f"{hardware.devices_per_domain}; allowed is a smaller mesh, or more hardware.domains"
        )
    if hardware.devices_per_domain % mesh.ep:
        raise ConfigError(
            f"mesh.ep = {mesh.ep}: must divide the {hardware.devices_per_domain} GPUs of an NVLink domain"
        )
    if config.ep.transport == "auto":
        alone = holds_all(config.ep, mesh.ep) and by_kernels(config)
        transport = "rowwise" if one_sided(config) else "pooled_wave"
        settings = dropless(config.ep) if alone else dataclasses.replace(config.ep, transport=transport)
        config = dataclasses.replace(config, ep=settings)
    check_run(config)
    return config


def one_sided(config: RunConfig) -> bool:
    """Whether `auto` would take rowwise on these GPUs in one process (`ep.choice.why_not_one_sided`)."""
    from ep_jax_kernels.rowwise.exchange import MOST_PEERS
    from ep_jax_kernels.rowwise.op import check_rows

    row = jax.ShapeDtypeStruct((1, config.model.latent_dim), jnp.dtype(config.model.compute_dtype))
    try:
        check_rows(row, config.router.experts_per_token)
    except NotImplementedError:
        return False
    return by_kernels(config) and not config.ep.emulates and config.mesh.size <= MOST_PEERS


def make_plan(config: RunConfig, hardware: Hardware) -> dict[str, Any]:
    """Everything the planner knows of a placed configuration (`place`)."""
    sizes = Sizes(config)
    found = memory(sizes)
    total, active = num_parameters(config.model, config.router)
    return {
        "hardware": dataclasses.asdict(hardware) | {"peak_flops": hardware.peak_flops},
        "mesh": dict(zip(("replica", "fsdp", "ep"), config.mesh.shape, strict=True)),
        "model": {
            "parameters": total,
            "active_parameters": active,
            "layers": config.model.num_layers,
            "block_layers": config.model.global_every,
            "flops_per_token": flops_per_token(config.model, config.router, config.data.sequence_length).training,
        },
        "step": {
            "tokens": sizes.tokens * sizes.microbatches * config.mesh.size,
            "tokens_per_gpu_and_microbatch": sizes.tokens,
            "microbatches": sizes.microbatches,
            "remat": config.model.remat,
            "compute_dtype": config.model.compute_dtype,
            "optimizer": config.optimizer.name,
            "protocol": config.ep.describe(),
        },
        "state": _state(sizes),
        "memory": _memory(found, hardware),
        "wave": _wave(sizes, found),
        "traffic": _traffic(sizes, hardware),
        "time": {scheme: _time(bounds(sizes, hardware, scheme)) for scheme in links.SCHEMES},
        "configured_scheme": links.configured_scheme(config.ep),
        "fit": _fit(config, hardware, found),
        "warnings": _warnings(config, hardware, found),
        "out_of_scope": OUT_OF_SCOPE,
    }


def _state(sizes: Sizes) -> dict[str, Any]:
    """Weights, gradients and optimizer of one GPU: a layer, the tables, all."""
    mesh, optimizer = sizes.config.mesh, sizes.config.optimizer.name
    per_layer = [p for p in sizes.parameters if p.kind not in ("embedding", "head") and p.name != "final_norm"]
    layer = {"weights": 0, "gradients": 0, "copies": 0, "optimizer": 0}
    for p in per_layer:
        elements = p.local_elements(mesh)
        layer["weights"] += elements * FLOAT32
        layer["gradients"] += elements * FLOAT32
        layer["copies"] += elements * sizes.itemsize if has_copies(sizes) and p.kind in CAST_KINDS else 0
        layer["optimizer"] += elements * optimizer_bytes(p.kind, optimizer)
    return {
        "layer_bytes": layer,
        "bytes_per_parameter": bytes_per_parameter(optimizer),
        "published_bytes_per_parameter": published_bytes_per_parameter(optimizer),
        "parameters_per_gpu": sizes.local_elements(),
    }


def _memory(found: Memory, hardware: Hardware) -> dict[str, Any]:
    return {
        "weights_bytes": found.state.weights,
        "optimizer_bytes": found.state.optimizer,
        "rest_bytes": found.state.rest,
        "gradients_bytes": found.gradients,
        "copies_bytes": found.copies,
        "kept_bytes": found.kept,
        "kept_layer_bytes": found.kept_layer,
        "backward_bytes": found.backward,
        "ragged_dot_bytes": found.ragged_dot,
        "loss_bytes": found.loss,
        "optimizer_step_bytes": found.optimizer_step,
        "peak_bytes": found.peak,
        "usable_bytes": hardware.usable_bytes,
        "layer_activation_bytes": found.layer,
    }


def _wave(sizes: Sizes, found: Memory) -> dict[str, Any]:
    rows = wave_rows(sizes.config.ep, sizes.shape, sizes.config.model.latent_dim)
    capacity = {}
    if sizes.config.ep.transport == "pooled_wave":
        transport = pooled_transport(sizes.config.ep, sizes.shape)
        capacity = {"sender_pool_rows": transport.pool_rows, "expert_rows": transport.expert_rows}
    return {"rows": rows._asdict(), "bytes": found.wave} | capacity


def _traffic(sizes: Sizes, hardware: Hardware) -> dict[str, Any]:
    model = sizes.config.model
    schemes = {}
    for scheme in links.SCHEMES:
        layer = links.layer_traffic(sizes, scheme, hardware.devices_per_domain)
        schemes[scheme] = {name: dataclasses.asdict(getattr(layer, name)) for name in ("forward", "backward")}
    tables = links.tables_traffic(sizes, hardware.devices_per_domain)
    return {
        "layer_bytes": schemes,
        "tables_bytes": dataclasses.asdict(tables),
        "gross_forward_bytes": {
            "fsdp": links.routed_weight_bytes(sizes),
            "ep_full": links.balanced_row_bytes(sizes, model.model_dim),
            "ep": links.balanced_row_bytes(sizes, model.latent_dim),
        },
    }


def _time(found: Bounds) -> dict[str, Any]:
    return dataclasses.asdict(found) | {
        "overlapped_s": found.overlapped_s,
        "in_sequence_s": found.in_sequence_s,
        "bound_by": found.bound_by,
        "mfu_ceiling_overlapped": found.mfu_ceiling(found.overlapped_s),
        "mfu_ceiling_in_sequence": found.mfu_ceiling(found.in_sequence_s),
    }


def _fit(config: RunConfig, hardware: Hardware, found: Memory) -> dict[str, Any]:
    return {
        "fits": found.peak <= hardware.usable_bytes,
        "nearest": [{"change": a.text, "peak_bytes": a.peak_bytes} for a in advice.nearest(config, hardware)],
        "largest_model": [_largest(config, hardware), _largest(advice.frugal(config), hardware)],
    }


def _largest(config: RunConfig, hardware: Hardware) -> dict[str, Any]:
    layers = advice.largest(config, hardware)
    parameters = 0
    if layers:
        parameters, _ = num_parameters(dataclasses.replace(config.model, num_layers=layers), config.router)
    return {
        "remat": config.model.remat,
        "microbatches": config.train.accumulation,
        "layers": layers,
        "parameters": parameters,
    }


def _warnings(config: RunConfig, hardware: Hardware, found: Memory) -> list[str]:
    lines = []
    if found.peak > hardware.usable_bytes:
        lines.append(
            f"does not fit: the peak of {found.peak / 2**30:.1f} GiB is over the usable "
            f"{hardware.usable_bytes / 2**30:.1f} GiB"
        )
    if found.ragged_dot > 0.1 * hardware.usable_bytes:
        lines.append(
            f"{found.ragged_dot / 2**30:.1f} GiB of the backward pass are products of ragged_dot over all experts, as "
            f"XLA lowers it; the peak without them is {(found.peak - found.ragged_dot) / 2**30:.1f} GiB or less"
        )
    if config.model.compute_dtype != "bfloat16":
        lines.append(f"model.compute_dtype = {config.model.compute_dtype}: times still use the bfloat16 peak")
    if config.ep.transport == "rowwise":
        lines.append(
            "ep.transport = rowwise: planned as one-sided writes, as on up to 8 Hopper GPUs of one process; elsewhere "
            "it is emulated and needs more"
        )
    if config.ep.emulates:
        lines.append(
            f"ep.emulated_shards = {config.ep.emulated_shards}: planned as the real group of mesh.ep = "
            f"{config.mesh.ep}; the emulation gathers all experts instead of sending rows"
        )
    shape = LayerShape(config.mesh.ep, config.router.num_experts, config.router.experts_per_token, 1)
    if config.ep.transport != "dense" and shape.num_shards == 1:
        lines.append("mesh.ep = 1: no row leaves its GPU")
    return lines
