"""Sizes that every part of a plan needs: parameters by kind, what a GPU holds of them, tokens, group sizes.

The list of parameters repeats what the model declares, so that planning starts no array library's work; a test holds
it against the model's own shapes.
"""

import dataclasses
import math
from typing import NamedTuple

from ep_jax.config import RunConfig
from ep_jax.ep.capacity import LayerShape
from ep_jax.mesh import AXES, GATHERS, PLACEMENTS, MeshConfig

FLOAT32 = INT32 = 4
LAYER_KINDS = ("dense", "expert")  # matrices of a layer that are gathered before use
ITEMSIZE = {"bfloat16": 2, "float32": 4}


class Parameter(NamedTuple):
    """One array of the model, or as many equal ones as there are layers."""

    name: str
    kind: str
    shape: tuple[int, ...]  # without the leading axis of scanned blocks
    copies: int  # layers, or 1

    @property
    def elements(self) -> int:
        """Of one copy, over all GPUs."""
        return math.prod(self.shape)

    @property
    def routed(self) -> bool:
        return self.kind == "expert"

    def local_elements(self, mesh: MeshConfig) -> int:
        """Of one copy, on one GPU."""
        return self.elements // axes_size(mesh, *(axis for entry in PLACEMENTS[self.kind] for axis in _axes(entry)))

    def gathered_elements(self, mesh: MeshConfig) -> int:
        """Of one copy on one GPU, once it is gathered for use."""
        return self.local_elements(mesh) * self.gather_size(mesh)

    def gather_size(self, mesh: MeshConfig) -> int:
        """GPUs that gather it from each other before use."""
        return axes_size(mesh, *(GATHERS[self.kind][1] if self.kind in GATHERS else ()))


def _axes(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def axes_size(mesh: MeshConfig, *axes: str) -> int:
    return math.prod(getattr(mesh, axis) for axis in axes)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A configuration whose mesh is resolved, and what follows from it for one GPU."""

    config: RunConfig

    @property
    def itemsize(self) -> int:
        """c: bytes of an element in the compute type."""
        return ITEMSIZE[self.config.model.compute_dtype]

    @property
    def tokens(self) -> int:
        """T: tokens of one GPU in one microbatch, padding included."""
        train = self.config.train
        rows = train.sequences_per_step // (train.accumulation * self.config.mesh.size)
        return rows * self.config.data.sequence_length

    @property
    def microbatches(self) -> int:
        return self.config.train.accumulation

    @property
    def layers(self) -> int:
        return self.config.model.num_layers

    @property
    def shape(self) -> LayerShape:
        """The routed layer of one ep group."""
        router = self.config.router
        return LayerShape(self.config.mesh.ep, router.num_experts, router.experts_per_token, self.tokens)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters(self.config)

    def local_elements(self, *kinds: str) -> int:
        """Parameters on one GPU, of some kinds or of all."""
        return sum(
            p.copies * p.local_elements(self.config.mesh) for p in self.parameters if not kinds or p.kind in kinds
        )


def parameters(config: RunConfig) -> tuple[Parameter, ...]:
    """Every array of the model, in the order in which it is used."""
    model, router, n = config.model, config.router, config.model.num_layers
    D, H, F, E = model.model_dim, model.latent_dim, model.expert_hidden_dim, router.num_experts
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shared = model.num_shared_experts * model.shared_hidden_dim
    found = [
        Parameter("embedding", "embedding", (model.vocab_size, D), 1),
        Parameter("attention_norm", "norm", (D,), n),
        Parameter("query", "dense", (D, q), n),
        Parameter("key", "dense", (D, kv), n),
        Parameter("value", "dense", (D, kv), n),
        Parameter("output", "dense", (q, D), n),
        Parameter("query_norm", "norm", (model.head_dim,), n),
        Parameter("key_norm", "norm", (model.head_dim,), n),
        Parameter("moe_norm", "norm", (D,), n),
        Parameter("router", "router", (D, E), n),
    ]
    if model.has_latent:
        found += [
            Parameter("latent_down", "dense", (D, H), n),
            Parameter("latent_norm", "norm", (H,), n),
            Parameter("latent_up", "dense", (H, D), n),
        ]
    found += [
        Parameter("expert_gate_up", "expert", (E, H, 2 * F), n),
        Parameter("expert_down", "expert", (E, F, H), n),
    ]
    if shared:
        found += [
            Parameter("shared_gate_up", "dense", (D, 2 * shared), n),
            Parameter("shared_down", "dense", (shared, D), n),
        ]
    found.append(Parameter("final_norm", "norm", (D,), 1))
    if not model.tie_embeddings:
        found.append(Parameter("head", "head", (D, model.vocab_size), 1))
    return tuple(found)


def members_in_domain(mesh: MeshConfig, axes: tuple[str, ...], devices_per_domain: int) -> int:
    """How many GPUs of a group over neighbouring mesh axes stand in one NVLink domain; ep is the innermost axis."""
    stride = 1
    for axis in reversed(AXES):
        if axis in axes:
            break
        stride *= getattr(mesh, axis)
    return max(1, min(axes_size(mesh, *axes), devices_per_domain // stride))
