"""One layer of routed experts: plan, dispatch, experts, combine, by any transport.

Letters: S ep shards, E experts, e local experts, T tokens, K choices, W waves, Q slots or rows of a source over all
waves, H routed width, F expert hidden width, D source shards of the mesh.

`routed_experts_local` works on one device's arrays inside a shard_map; `routed_experts` wraps it for global arrays.
Neither knows where routes come from, and a transport knows neither experts nor router.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_jax.ep import implementations
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.choice import definite
from ep_jax.ep.dense import Dense
from ep_jax.ep.drops import DropReport, LocalDrops, fates, local_drops
from ep_jax.ep.emulated import Emulated
from ep_jax.ep.experts import ExpertRows, swiglu_experts
from ep_jax.ep.fixed_cell import FixedCell
from ep_jax.ep.pooled_tokens import pooled_transport
from ep_jax.ep.premix import mix, unmix
from ep_jax.ep.ragged import Ragged
from ep_jax.ep.returned import Returned
from ep_jax.ep.ring import Ring
from ep_jax.ep.routes import Routes, check_routes, final_weights
from ep_jax.ep.rowwise import Rowwise
from ep_jax.ep.settings import EPConfig
from ep_jax.fields import ConfigError
from ep_jax.mesh import BATCH_AXES

TRANSPORTS = {
    "pooled_wave": pooled_transport,
    "fixed_cell": FixedCell,
    "ragged": Ragged,
    "rowwise": Rowwise,
    "ring": Ring,
    "dense": Dense,
}


class Transport(Protocol):
    """How rows reach their experts and come back; one file each, swappable between runs.

    Its plan says at least where each assignment lies among the rows that come back (`place_TK`, -1 when it was not
    sent), the inverse and which assignments the sender did not drop (`sent_TK`).
    """

    @property
    def waves(self) -> int:
        """Rounds of dispatch, experts and give_back."""
        ...

    def plan(self, routes: Routes, /) -> Any:
        """Integers for all waves, made once."""
        ...

    def dispatch(self, rows_TH: jax.Array, plan: Any, wave: int, after: jax.Array | int, /) -> tuple[ExpertRows, Any]:
        """One wave's rows where its experts are, and what `give_back` needs to know; waits for `after`, a zero."""
        ...

    def weights_of(self, wave: int, w_gate_up: jax.Array, w_down: jax.Array, /) -> tuple[jax.Array, ...]:
        """The weights of the experts that the wave visits."""
        ...

    def give_back(self, results: jax.Array, arrival: Any, /) -> Returned:
        """One wave's results, back at their sources."""
        ...

    def accepted(self, returned: Sequence[Returned], plan: Any, /) -> jax.Array:
        """bool [T,K]: the assignments that were kept."""
        ...

    def combine(
        self, returned: Sequence[Returned], weights_TK: jax.Array, accepted_TK: jax.Array, plan: Any, /
    ) -> jax.Array:
        """[T,H]: the weighted sum of each token's kept results, in the dtype of the rows.

        Where the experts weight (ExpertRows), results come weighted already.
        """
        ...


def make_transport(settings: EPConfig, shape: LayerShape) -> Transport:
    """The transport that `settings` names (not auto), or the emulation of a larger one's drops, for one layer shape.

    Raises ConfigError when a capacity factor cannot be computed exactly in int32.
    """
    if settings.emulates:
        return Emulated(settings, shape)
    if settings.transport == "rowwise" and implementations.runs(settings.kernels):
        from ep_jax.ep.rowwise_gpu import RowwiseGPU

        return RowwiseGPU(settings, shape)
    return TRANSPORTS[settings.transport](settings, shape)


def routed_experts_local(
    rows_TH: jax.Array,
    expert_ids_TK: jax.Array,
    weights_TK: jax.Array,
    valid_T: jax.Array,
    w_gate_up_eH2F: jax.Array,
    w_down_eFH: jax.Array,
    *,
    sequence_length: int,
    settings: EPConfig,
    valid_in_group: jax.Array | None = None,
) -> tuple[jax.Array, LocalDrops]:
    """Routed experts of one device's tokens; runs inside shard_map with the axis `ep` manual.

    Arrays as in `routed_experts`, but local: T of one shard and e = E/S experts. `valid_in_group` is the int32 number
    of valid tokens of the ep group (summed here when None). Returns the combined rows [T,H] and this shard's drops.
    """
    shards = lax.axis_size("ep")
    shape = LayerShape(shards, shards * w_gate_up_eH2F.shape[0], expert_ids_TK.shape[1], rows_TH.shape[0])
    transport = make_transport(settings, shape)
    if valid_in_group is None:
        valid_in_group = lax.psum(jnp.sum(valid_T, dtype=jnp.int32), "ep")
    routes = Routes(expert_ids_TK, weights_TK, valid_T, valid_in_group, sequence_length)
    mixes = "premix" in settings.used and not settings.emulates  # emulated shards mix routes only, while they decide
    premix = settings.premix if mixes else 1
    run = implementations.using(settings.kernels)(functools.partial(_run, transport, settings))
    if premix == 1:
        out_TH, fate_TK = run(rows_TH, routes, w_gate_up_eH2F, w_down_eFH)
    else:
        with jax.named_scope("premix"):
            mixed_rows, mixed_routes = mix(rows_TH, routes, premix)
        mixed_out, mixed_fate = run(mixed_rows, mixed_routes, w_gate_up_eH2F, w_down_eFH)
        with jax.named_scope("premix"):
            out_TH, fate_TK = unmix(mixed_out, premix), unmix(mixed_fate, premix)
    return out_TH, local_drops(fate_TK, expert_ids_TK, weights_TK, shape.num_experts)


def _run(
    transport: Transport,
    settings: EPConfig,
    rows_TH: jax.Array,
    routes: Routes,
    w_gate_up_eH2F: jax.Array,
    w_down_eFH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(combined rows [T,H], fates int8 [T,K]) of one shard's routes, wave by wave."""
    with jax.named_scope("route"):
        plan = transport.plan(routes)
    returned: list[Returned] = []
    after: jax.Array | int = 0
    for wave in range(transport.waves):
        with jax.named_scope("dispatch"):
            expert_rows, arrival = transport.dispatch(rows_TH, plan, wave, after)
        with jax.named_scope("experts"):
            results = swiglu_experts(expert_rows, *transport.weights_of(wave, w_gate_up_eH2F, w_down_eFH))
        with jax.named_scope("combine"):
            returned.append(transport.give_back(results, arrival))
        if settings.schedule == "sequential":
            after = _zero_after(returned[-1].rows_QH)
    with jax.named_scope("combine"):
        accepted_TK = transport.accepted(returned, plan)
        weights_TK = final_weights(routes, accepted_TK, rescale=settings.rescale)
        out_TH = transport.combine(returned, weights_TK, accepted_TK, plan)
    return out_TH, fates(routes.valid_T, plan.sent_TK, accepted_TK)


def _zero_after(rows_QH: jax.Array) -> jax.Array:
    """An int32 zero that the compiler cannot know: whoever adds it to an index waits for these rows.

    An optimization barrier would not do; XLA:CPU drops it.
    """
    bits = lax.bitcast_convert_type(lax.stop_gradient(rows_QH[0, 0]).astype(jnp.float32), jnp.int32)
    return jnp.minimum(bits & 0x7FFFFFFF, 0)


def routed_experts(
    rows_TH: jax.Array,
    expert_ids_TK: jax.Array,
    combine_weights_TK: jax.Array,
    valid_T: jax.Array,
    w_gate_up_EH2F: jax.Array,
    w_down_EFH: jax.Array,
    *,
    sequence_length: int,
    mesh: Mesh,
    settings: EPConfig,
) -> tuple[jax.Array, DropReport]:
    """Sends each token's row to its experts and combines what comes back; differentiable in all float arguments.

    Args:
        rows_TH: [T, H] float32 or bfloat16 (float64 under x64), tokens of all shards in mesh order.
        expert_ids_TK: [T, K] int32, distinct within a row.
        combine_weights_TK: [T, K] float32.
        valid_T: [T] bool; invalid tokens take no slot and get a zero row.
        w_gate_up_EH2F: [E, H, 2F], gate first, in the rows' dtype.
        w_down_EFH: [E, F, H].
        sequence_length: columns of a packed row; shards hold whole rows.
        mesh: has an axis `ep` and maybe `replica` and `fsdp`; tokens are split over all of them, experts over `ep`.
        settings: transport, capacity factors and policies.

    Returns: combined rows [T, H] in the rows' dtype, and the DropReport. Arrays are placed on the mesh when they are
    not yet. Raises ConfigError for shapes that do not fit the mesh or each other and, outside jit, for ids of a valid
    token that are repeated or out of range (`check_routes`).
    """
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)
    if "ep" not in mesh.axis_names:
        raise ConfigError(f"mesh axes {mesh.axis_names}: an axis named ep is needed")
    devices = list(mesh.devices.flat)
    settings, _ = definite(settings, mesh.shape["ep"], devices, rows_TH.shape[1], rows_TH.dtype, expert_ids_TK.shape[1])
    _check_call(
        rows_TH, expert_ids_TK, combine_weights_TK, valid_T, w_gate_up_EH2F, w_down_EFH, sequence_length, mesh, settings
    )

    def local(rows, ids, weights, valid, w_gate_up, w_down):
        out, drops = routed_experts_local(
            rows, ids, weights, valid, w_gate_up, w_down, sequence_length=sequence_length, settings=settings
        )
        source_counts = drops.counts_PE.sum(axis=1, dtype=jnp.int32)[None]
        return out, DropReport(
            drops.fate_TK, lax.psum(drops.counts_PE, axes), source_counts, lax.psum(drops.weights_P, axes)
        )

    split, experts = PartitionSpec(axes), PartitionSpec("ep")
    in_specs = (split, split, split, split, experts, experts)
    whole = PartitionSpec()
    arrays = (rows_TH, expert_ids_TK, combine_weights_TK, valid_T, w_gate_up_EH2F, w_down_EFH)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, in_specs, strict=True)]
    out_specs = (split, DropReport._make((split, whole, split, whole)))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*placed)


def _check_call(
    rows_TH, ids_TK, weights_TK, valid_T, w_gate_up_EH2F, w_down_EFH, sequence_length, mesh, settings
) -> None:
    devices = math.prod(mesh.shape[axis] for axis in BATCH_AXES if axis in mesh.axis_names)
    ep = mesh.shape["ep"]
    group, name = (settings.emulated_shards, "ep.emulated_shards") if settings.emulates else (ep, "the mesh's ep")
    if group % ep:
        raise ConfigError(f"ep.emulated_shards = {group}: a multiple of the mesh's ep = {ep} is needed")
    shards = devices // ep * group
    tokens, width = rows_TH.shape
    if tokens % (shards * sequence_length):
        raise ConfigError(
            f"rows_TH has {tokens} tokens: a multiple of {shards} shards x sequence_length {sequence_length} is needed"
        )
    experts = w_gate_up_EH2F.shape[0]
    if experts % group:
        raise ConfigError(f"{experts} experts: a multiple of {name} = {group} is needed")
    if "premix" in settings.used and (group % settings.premix or tokens // shards % settings.premix):
        raise ConfigError(
            f"ep.premix = {settings.premix}: must divide {name} = {group} and a shard's {tokens // shards} tokens"
        )
    choices, hidden = ids_TK.shape[-1], w_down_EFH.shape[1]
    wanted = {
        "expert_ids_TK": (ids_TK.shape, (tokens, choices)),
        "combine_weights_TK": (weights_TK.shape, (tokens, choices)),
        "valid_T": (valid_T.shape, (tokens,)),
        "w_gate_up_EH2F": (w_gate_up_EH2F.shape, (experts, width, 2 * hidden)),
        "w_down_EFH": (w_down_EFH.shape, (experts, hidden, width)),
    }
    for name, (found, shape) in wanted.items():
        if found != shape:
            raise ConfigError(f"{name} has shape {found}: expected {shape}")
    for name, array, dtype in (("expert_ids_TK", ids_TK, jnp.int32), ("valid_T", valid_T, jnp.bool)):
        if array.dtype != dtype:
            raise ConfigError(f"{name} is {array.dtype}: expected {jnp.dtype(dtype)}")
    if choices > experts:
        raise ConfigError(f"expert_ids_TK has {choices} choices per token: at most {experts} experts")
    if all(_on_this_host(array) for array in (ids_TK, valid_T)):
        check_routes(ids_TK, valid_T, experts)


def _on_this_host(array: Any) -> bool:
    """Whether the values can be looked at: not being traced, and no part on another process's devices."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)
