"""Lower bounds of a step's time on one GPU, and the ceiling of MFU that follows.

    model      tokens of the GPU * training FLOPs a token (ep_jax.flops)
    padding    routed FLOPs * (rows that the experts compute on / rows of balanced routing - 1); none where rows are
               grouped without fixed places, as a kernel visits only filled rows
    remat      the layers' forward FLOPs once more (full); the same without the experts' down-projection, whose result
               was kept (exchanges); those of attention scores where cuDNN does not run (products)
    optimizer  Muon: 5 Newton-Schulz steps of 4*a*a*b + 2*a*a*a a matrix [a, b], a <= b, shared by the GPUs
               that hold it
    links      bytes of `ep_jax.planning.links` of the scheme / rate

All columns of a plan compute the configured model; only padding is a scheme's own (FSDP has none).

Compute runs at the peak times the hardware's measured matmul fraction, links at theirs. The bounds:

    overlapped    max(compute, NVLink, network): everything hides behind the slowest
    in sequence   their sum: nothing hides
    MFU ceiling = model FLOPs / (time * data-sheet peak)

Not here: attention's softmax, norms, gathers of rows, launches, waiting for other GPUs, input, host. A measured step
lies above the bound; the published hero run reached 21.5 to 24 %.
"""

import dataclasses

from ep_jax.config import RunConfig
from ep_jax.flops import Flops, flops_per_token
from ep_jax.optimizer import MUON_KINDS, NEWTON_SCHULZ_STEPS
from ep_jax.planning.hardware import Hardware
from ep_jax.planning.links import as_scheme, layer_traffic, tables_traffic
from ep_jax.planning.memory import fixed_places, fused_attention, wave_rows
from ep_jax.planning.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Bounds:
    """FLOPs and bytes of one GPU and step, and seconds."""

    model_flops: float
    padding_flops: float
    remat_flops: float
    optimizer_flops: float
    nvlink_bytes: float
    network_bytes: float
    compute_s: float
    nvlink_s: float
    network_s: float
    peak_flops: float

    @property
    def overlapped_s(self) -> float:
        return max(self.compute_s, self.nvlink_s, self.network_s)

    @property
    def in_sequence_s(self) -> float:
        return self.compute_s + self.nvlink_s + self.network_s

    @property
    def bound_by(self) -> str:
        times = {"compute": self.compute_s, "NVLink": self.nvlink_s, "network": self.network_s}
        return max(times, key=lambda name: times[name])

    def mfu_ceiling(self, seconds: float) -> float:
        """Utilisation, 0 to 1, of a step that takes so long."""
        return self.model_flops / (seconds * self.peak_flops)


def bounds(sizes: Sizes, hardware: Hardware, scheme: str) -> Bounds:
    """The bounds of a step under a scheme of `links.SCHEMES`."""
    config = sizes.config
    flops = flops_per_token(config.model, config.router, config.data.sequence_length)
    tokens = sizes.tokens * sizes.microbatches
    padding = 3 * tokens * flops.routed_experts * padding_share(as_scheme(sizes, scheme, hardware.devices_per_domain))
    remat = tokens * recomputed(flops, config)
    optimizer = muon_flops(sizes) if config.optimizer.name == "muon" else 0.0
    layer = layer_traffic(sizes, scheme, hardware.devices_per_domain).total * config.model.num_layers
    moved = (layer + tables_traffic(sizes, hardware.devices_per_domain)) * sizes.microbatches
    work = tokens * flops.training + padding + remat + optimizer
    return Bounds(
        model_flops=tokens * flops.training,
        padding_flops=padding,
        remat_flops=remat,
        optimizer_flops=optimizer,
        nvlink_bytes=moved.nvlink,
        network_bytes=moved.network,
        compute_s=work / (hardware.peak_flops * hardware.matmul_fraction),
        nvlink_s=moved.nvlink / hardware.nvlink_rate,
        network_s=moved.network / hardware.network_rate,
        peak_flops=hardware.peak_flops,
    )


def padding_share(sizes: Sizes) -> float:
    """Rows computed on for nothing, over the rows of balanced routing."""
    if not fixed_places(sizes.config.ep):
        return 0.0
    rows = wave_rows(sizes.config.ep, sizes.shape, sizes.config.model.latent_dim)
    return rows.waves * rows.experts / sizes.shape.assignments - 1


def recomputed(flops: Flops, config: RunConfig) -> float:
    """FLOPs of a token's forward pass that the backward pass repeats."""
    if config.model.remat == "none":
        return 0.0
    if config.model.remat == "products":
        return 0.0 if fused_attention(config.model) else flops.attention_scores
    results_kept = config.model.remat == "exchanges" and config.ep.transport != "dense"
    return flops.forward - flops.head - (flops.routed_experts / 3 if results_kept else 0)


def muon_flops(sizes: Sizes) -> float:
    """FLOPs of one GPU's share of orthogonalising all matrices, once a step."""
    mesh, total = sizes.config.mesh, 0.0
    for p in sizes.parameters:
        if p.kind in MUON_KINDS:
            a, b = sorted(p.shape[-2:])
            matrices = p.copies * p.elements / (a * b)
            total += matrices * NEWTON_SCHULZ_STEPS * (4 * a * a * b + 2 * a**3) / (mesh.fsdp * mesh.ep)
    return total
