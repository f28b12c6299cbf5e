"""Bytes that leave one GPU for one layer, over NVLink and over the network, forward and backward, by scheme.

Schemes: `fsdp` gathers all routed weights over fsdp and ep (the `dense` transport) and moves no row; `ep_full` moves
rows as wide as the model, to experts as wide; `ep` is the configured transport at the routed (latent) width. Where the
configuration is itself `dense`, the ep schemes use pooled_wave at its factors, with as much of fsdp turned into ep as
experts and domain allow; without a latent width ep_full and ep are the same.

Formulas, for a group of n GPUs of which m stand in one NVLink domain, shard s bytes:

    all-gather, reduce-scatter   (n-1)*s leave a GPU, (n/m-1)*s of them over the network: each shard enters each other
                                 domain once and is spread inside (a lower bound; a flat ring needs as much)
    all-reduce of b bytes        a reduce-scatter and an all-gather of shards b/n
    rows                         `ep_jax.ep.traffic`, which tests hold against compiled programs; an ep group never
                                 leaves its domain

A layer's weights are gathered in the compute type once forward, once more backward where remat recomputes (full,
exchanges); their gradients are reduce-scattered in float32, then all-reduced in float32 over the replicas. Rows go both
ways forward and backward, and forward once more under remat full. All of it happens in every microbatch.

Embedding and head are gathered and reduced once a microbatch, `tables`. Gross figures (`balanced_row_bytes`,
`routed_weight_bytes`) are the published comparison: factors 1, headers and what stays at home counted as sent.

Not counted: scalars, router statistics, norms and routers' gradients, what XLA adds for Muon on split matrices.
"""

import dataclasses
import math
from collections.abc import Iterable

from ep_jax.ep.settings import EPConfig
from ep_jax.ep.traffic import Widths, traffic
from ep_jax.mesh import GATHERS
from ep_jax.planning.sizes import FLOAT32, LAYER_KINDS, Parameter, Sizes, axes_size, members_in_domain

SCHEMES = ("fsdp", "ep_full", "ep")


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What leaves one GPU."""

    nvlink: float = 0.0
    network: float = 0.0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.nvlink + other.nvlink, self.network + other.network)

    def __mul__(self, times: float) -> "Bytes":
        return Bytes(self.nvlink * times, self.network * times)

    @property
    def total(self) -> float:
        return self.nvlink + self.network


@dataclasses.dataclass(frozen=True)
class Pass:
    """Bytes of one layer and one microbatch, by what they carry."""

    rows: Bytes
    routed_weights: Bytes
    dense_weights: Bytes
    replicas: Bytes  # gradients between copies of the model

    @property
    def total(self) -> Bytes:
        return self.rows + self.routed_weights + self.dense_weights + self.replicas


@dataclasses.dataclass(frozen=True)
class LayerTraffic:
    """One layer and one microbatch under one scheme."""

    scheme: str
    forward: Pass
    backward: Pass

    @property
    def total(self) -> Bytes:
        return self.forward.total + self.backward.total


def layer_traffic(sizes: Sizes, scheme: str, devices_per_domain: int) -> LayerTraffic:
    """Bytes of a layer under a scheme of SCHEMES."""
    sizes = as_scheme(sizes, scheme, devices_per_domain)
    layered = [p for p in sizes.parameters if p.kind in LAYER_KINDS]
    dense = [p for p in layered if not p.routed]
    routed = [_at_full_width(sizes, p) if scheme == "ep_full" else p for p in layered if p.routed]
    axes = ("fsdp", "ep") if scheme == "fsdp" else GATHERS["expert"][1]
    rows_forward, rows_backward = _row_bytes(sizes, scheme)
    # A sum over replicas meets each parameter once, wherever its shards lie.
    replicas = _sum(_over_replicas(sizes, p, devices_per_domain) for p in (*dense, *routed))
    dense_axes = GATHERS["dense"][1]
    return LayerTraffic(
        scheme,
        Pass(
            rows_forward,
            _sum(_gather(sizes, p, axes, sizes.itemsize, devices_per_domain) for p in routed),
            _sum(_gather(sizes, p, dense_axes, sizes.itemsize, devices_per_domain) for p in dense),
            Bytes(),
        ),
        Pass(
            rows_backward,
            _sum(_back(sizes, p, axes, devices_per_domain) for p in routed),
            _sum(_back(sizes, p, dense_axes, devices_per_domain) for p in dense),
            replicas,
        ),
    )


def tables_traffic(sizes: Sizes, devices_per_domain: int) -> Bytes:
    """Embedding and head of one microbatch: gathered once, reduced once, summed over replicas."""
    tables = [p for p in sizes.parameters if p.kind in ("embedding", "head")]
    axes = GATHERS["head"][1]
    return _sum(
        _gather(sizes, p, axes, sizes.itemsize, devices_per_domain)
        + _gather(sizes, p, axes, FLOAT32, devices_per_domain)
        + _over_replicas(sizes, p, devices_per_domain)
        for p in tables
    )


def balanced_row_bytes(sizes: Sizes, width: int) -> int:
    """Published measure of EP: every assignment's row there and back, forward, at factor 1."""
    return 2 * sizes.shape.assignments * width * sizes.itemsize


def routed_weight_bytes(sizes: Sizes) -> int:
    """Published measure of FSDP: all routed weights of a layer, in the compute type."""
    return sum(p.elements for p in sizes.parameters if p.routed) * sizes.itemsize


def configured_scheme(settings: EPConfig) -> str:
    """The scheme that a configuration trains with."""
    return "fsdp" if settings.transport == "dense" else "ep"


def as_scheme(sizes: Sizes, scheme: str, devices_per_domain: int) -> Sizes:
    """The configuration itself where it already is of the scheme, or its counterpart that moves weights or rows."""
    config = sizes.config
    if scheme == "fsdp":
        dense = dataclasses.replace(config.ep, transport="dense", waves=1, payload="compute")
        return Sizes(dataclasses.replace(config, ep=dense))
    if config.ep.transport != "dense":
        return sizes
    shards = config.mesh.fsdp * config.mesh.ep
    ep = math.gcd(shards, config.router.num_experts, devices_per_domain)
    mesh = dataclasses.replace(config.mesh, fsdp=shards // ep, ep=ep)
    return Sizes(dataclasses.replace(config, mesh=mesh, ep=dataclasses.replace(config.ep, transport="pooled_wave")))


def _row_bytes(sizes: Sizes, scheme: str) -> tuple[Bytes, Bytes]:
    """Rows of one layer, forward and backward."""
    if scheme == "fsdp":
        return Bytes(), Bytes()
    model = sizes.config.model
    width = model.model_dim if scheme == "ep_full" else model.latent_dim
    found = traffic(sizes.config.ep, sizes.shape, Widths(width, model.expert_hidden_dim, sizes.itemsize))
    again = found.forward_bytes if model.remat == "full" else 0
    return Bytes(nvlink=found.forward_bytes), Bytes(nvlink=found.backward_bytes + again)


def _at_full_width(sizes: Sizes, p: Parameter) -> Parameter:
    """The expert matrix as it would be if rows travelled at the model's width."""
    model = sizes.config.model
    experts, rows_in, rows_out = p.shape
    reads_rows = p.name == "expert_gate_up"  # [E, H, 2F]; the other matrix is [E, F, H]
    return p._replace(shape=(experts, model.model_dim, rows_out) if reads_rows else (experts, rows_in, model.model_dim))


def _back(sizes: Sizes, p: Parameter, axes: tuple[str, ...], devices_per_domain: int) -> Bytes:
    """Backward: the gradient in float32, and the weight once more where it is not kept."""
    again = 0 if sizes.config.model.remat == "none" else 1
    gathered = _gather(sizes, p, axes, sizes.itemsize, devices_per_domain) * again
    return gathered + _gather(sizes, p, axes, FLOAT32, devices_per_domain)


def _gather(sizes: Sizes, p: Parameter, axes: tuple[str, ...], itemsize: int, devices_per_domain: int) -> Bytes:
    """All-gather of a parameter's shards over `axes`, or the reduce-scatter of its gradient."""
    mesh = sizes.config.mesh
    group, inside = axes_size(mesh, *axes), members_in_domain(mesh, axes, devices_per_domain)
    return _spread(p.local_elements(mesh) * itemsize, group, inside)


def _over_replicas(sizes: Sizes, p: Parameter, devices_per_domain: int) -> Bytes:
    """All-reduce of the gradient's shard over the copies of the model, in float32."""
    mesh = sizes.config.mesh
    inside = members_in_domain(mesh, ("replica",), devices_per_domain)
    return _spread(p.local_elements(mesh) * FLOAT32 / mesh.replica, mesh.replica, inside) * 2


def _spread(shard_bytes: float, group: int, inside: int) -> Bytes:
    network = (group / inside - 1) * shard_bytes
    return Bytes(nvlink=(group - 1) * shard_bytes - network, network=network)


def _sum(parts: Iterable[Bytes]) -> Bytes:
    return sum(parts, Bytes())
