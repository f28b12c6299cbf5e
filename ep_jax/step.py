"""One training step and one evaluation step, each a pure function compiled once.

Letters: M microbatches, b rows of a device, L tokens of a row, N layers, E experts, D source shards of the mesh,
P stages (valid, sender, receiver), R packed rows of a device, C bins of columns, T tokens of a device, K choices.

Inside a single shard_map over all mesh axes every device computes the losses and gradients of its own rows with weights
it gathers; outside it, on global arrays, the gradients are clipped, turned into updates and applied, and the router's
bias is balanced. A step whose loss or gradients are not finite leaves the whole state as it was and says which leaf it
was; the host decides what to do about it (`train.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_jax import mesh as placement
from ep_jax.config import RunConfig
from ep_jax.data import Batch
from ep_jax.ep import EPConfig, routed_experts_local
from ep_jax.ep.drops import LocalDrops, profile
from ep_jax.mesh import AXES, BATCH_AXES
from ep_jax.model import balancing
from ep_jax.model.parameters import in_compute_type
from ep_jax.model.transformer import Outputs, forward, join_blocks, parameter_kinds, split_blocks
from ep_jax.optimizer import gradient_norm, learning_rate_schedule
from ep_jax.state import State, optimizer_of, state_shapes, state_shardings
from ep_jax.traces.file import id_type as trace_id_type

PROFILE_BINS = 16  # columns of a packed row are reported in so many bins
BATCH_SPEC = PartitionSpec(None, BATCH_AXES, None)


class LayerDrops(NamedTuple):
    """Drops of all layers in one step, this device's or summed; a DropReport without fates."""

    counts_NPE: jax.Array  # int32
    weights_NP: jax.Array  # float32, combine weight
    source_counts_NDP: jax.Array  # int32, by the shard whose tokens they were
    profile_NPRC: jax.Array  # int32, by place in the shard (packed row) and bin of columns, over all shards


class RecordedRoutes(NamedTuple):
    """Every router's choices in one step, split over the mesh as the batch is: this device's T tokens, or D*T."""

    expert_ids_MNTK: jax.Array  # uint8 up to 256 experts, else uint16
    weights_MNTK: jax.Array  # float32


class StepMetrics(NamedTuple):
    """What a training step reports; device arrays, the same on every device."""

    loss: jax.Array  # float32, the training objective
    cross_entropy: jax.Array  # float32, nats per valid target
    load_balance: jax.Array  # float32, mean over layers, before its coefficient
    z_loss: jax.Array  # float32, mean over layers, before its coefficient
    grad_norm: jax.Array  # float32, before clipping
    learning_rate: jax.Array  # float32
    valid_targets: jax.Array  # int32
    drops: LayerDrops
    loss_finite: jax.Array  # bool
    gradients_finite: Any  # bool per parameter, structure of params
    routes: RecordedRoutes | None = None  # not the same everywhere: each device has its own; None unless traced

    @property
    def all_finite(self) -> jax.Array:
        return self.loss_finite & jnp.stack(jax.tree.leaves(self.gradients_finite)).all()


class EvalSums(NamedTuple):
    """Sums of one evaluation batch, to be added on the host."""

    cross_entropy: jax.Array  # float32, nats
    valid_targets: jax.Array  # int32
    drops: LayerDrops
    routes: RecordedRoutes | None = None  # as in StepMetrics


def make_train_step(config: RunConfig, mesh: Mesh) -> Callable[[State, Batch], tuple[State, StepMetrics]]:
    """The compiled step (state, batch) -> (state, metrics). Donates the state.

    The batch is [M, B/M, L] placed by BATCH_SPEC; every mesh gives the same losses up to float32 rounding.
    """
    optimizer = optimizer_of(config)
    learning_rate = learning_rate_schedule(config.optimizer, config.train.steps)
    kinds = parameter_kinds(config.model, config.router)
    shapes = state_shapes(config)
    specs = placement.param_specs(kinds, shapes["params"])
    whole = PartitionSpec()
    outputs_spec = Outputs._make((whole, whole, whole, whole, _DROPS_SPEC))
    gradients_of = jax.shard_map(
        functools.partial(_local_gradients, config),
        mesh=mesh,
        in_specs=(specs, whole, Batch(*(BATCH_SPEC,) * len(Batch._fields))),
        out_specs=(specs, (outputs_spec, whole, _ROUTES_SPEC)),
    )

    def step(state: State, batch: Batch) -> tuple[State, StepMetrics]:
        gradients, (outputs, valid_targets, routes) = gradients_of(state["params"], state["router"]["bias"], batch)
        with jax.named_scope("optimizer"):  # all that is outside the model
            loss = outputs.objective(config.router)
            metrics = StepMetrics(
                loss=loss,
                cross_entropy=outputs.cross_entropy,
                load_balance=outputs.load_balance,
                z_loss=outputs.z_loss,
                grad_norm=gradient_norm(gradients),
                learning_rate=learning_rate(state["step"]),
                valid_targets=valid_targets,
                drops=outputs.drops,
                loss_finite=jnp.isfinite(loss),
                gradients_finite=jax.tree.map(lambda gradient: jnp.isfinite(gradient).all(), gradients),
                routes=routes,
            )
            updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
            bias = balancing.next_bias(state["router"]["bias"], outputs.router, config.router)
            new_state = {
                "step": state["step"] + 1,
                "params": optax.apply_updates(state["params"], updates),
                "opt_state": opt_state,
                "router": {"bias": bias},
                "rng": state["rng"],
            }
            # The old buffers are donated: only here can a step that went wrong still be undone.
            good = metrics.all_finite
            return jax.tree.map(lambda new, old: jnp.where(good, new, old), new_state, state), metrics

    shardings = state_shardings(config, mesh)
    batch_shardings = Batch(*(NamedSharding(mesh, BATCH_SPEC),) * len(Batch._fields))
    # Metrics are whole everywhere, but for routes: every process fetches all of them.
    everywhere = NamedSharding(mesh, whole)
    split = NamedSharding(mesh, _ROUTES_SPEC) if config.trace.every else None
    of_metrics = [split if name == "routes" else everywhere for name in StepMetrics._fields]
    out_shardings = (shardings, StepMetrics._make(of_metrics))
    return jax.jit(step, donate_argnums=0, in_shardings=(shardings, batch_shardings), out_shardings=out_shardings)


def make_eval_step(config: RunConfig, mesh: Mesh, ep: EPConfig) -> Callable[[Any, jax.Array, Batch], EvalSums]:
    """The compiled evaluation (params, router bias, batch) -> EvalSums under the protocol settings `ep`.

    The router's bias is applied and never updated. Routes come along when `config.trace` is on.
    """
    sums = eval_sums(config, mesh, functools.partial(routed_experts_local, settings=ep))
    return jax.jit(lambda params, bias, batch: sums(params, bias, batch, None))


def eval_sums(
    config: RunConfig, mesh: Mesh, experts: Callable[..., tuple[jax.Array, LocalDrops]]
) -> Callable[[Any, jax.Array, Batch, Any], EvalSums]:
    """The evaluation (params, router bias, batch, layer inputs) -> EvalSums with any routed experts, to be compiled.

    experts is called like `routed_experts_local` without settings, and with a layer's part of the layer inputs, arrays
    with a leading axis of layers, as `layer_input`; not where they are None.
    """
    specs = placement.param_specs(parameter_kinds(config.model, config.router), state_shapes(config)["params"])

    def local(params, bias, batch, layer_inputs):
        valid_targets = _count_valid(batch)
        run = functools.partial(
            _run_microbatch,
            config,
            experts,
            bias=bias,
            valid_total=valid_targets.astype(jnp.float32),
            layer_inputs=layer_inputs,
        )

        # Without the router's sums: the bias is applied and not updated, so the compiler leaves them out.
        def outputs_and_routes(rows):
            outputs, routes = _take_routes(run(params, rows))
            return outputs._replace(router=None), routes

        outputs, routes = _over_microbatches(outputs_and_routes, batch)
        outputs = _sum_over_devices(outputs)
        return EvalSums(outputs.cross_entropy * valid_targets, valid_targets, outputs.drops, routes)

    whole = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, whole, Batch(*(BATCH_SPEC,) * len(Batch._fields)), whole),
        out_specs=EvalSums._make((whole, whole, _DROPS_SPEC, _ROUTES_SPEC)),
    )


_DROPS_SPEC = LayerDrops._make((PartitionSpec(),) * len(LayerDrops._fields))
_ROUTES_SPEC = PartitionSpec(None, None, BATCH_AXES)  # of RecordedRoutes, or of nothing


def _local_gradients(config: RunConfig, params: Any, bias: jax.Array, batch: Batch) -> tuple:
    """Gradients (placed like params), (Outputs summed over devices and microbatches, valid targets, routes or None)."""
    valid_targets = _count_valid(batch)
    experts = functools.partial(routed_experts_local, settings=config.ep)
    run = functools.partial(_run_microbatch, config, experts, bias=bias, valid_total=valid_targets.astype(jnp.float32))

    def objective(params, rows):
        outputs, routes = _take_routes(run(params, rows))
        return lax.psum(outputs.objective(config.router), AXES), (outputs, routes)

    dtype = jnp.dtype(config.model.compute_dtype)
    kinds = parameter_kinds(config.model, config.router)
    copies = split_blocks(in_compute_type(params, kinds, dtype), config.model)

    def gradients_and_routes(rows):
        # In float32 again, so that the gradients are: XLA knows that the model's cast gives back the copy.
        wide = jax.tree.map(lambda copy: copy.astype(jnp.float32), copies)
        gradients, (outputs, routes) = jax.grad(objective, has_aux=True)(wide, rows)
        return (gradients, outputs), routes

    (gradients, outputs), routes = _over_microbatches(gradients_and_routes, batch)
    return join_blocks(gradients), (_sum_over_devices(outputs), valid_targets, routes)


def _count_valid(batch: Batch) -> jax.Array:
    """int32: valid targets of the whole step, the denominator of every mean."""
    return lax.psum(jnp.sum(batch.valid, dtype=jnp.int32), AXES)


def _run_microbatch(
    config: RunConfig, experts, params: Any, rows: Batch, *, bias, valid_total, layer_inputs=None
) -> Outputs:
    """The model on this device's rows [b, L] of one microbatch, with the routed experts of `eval_sums`.

    The drops of its Outputs are (counts_NPE, weights_NP, profile_NPRC, (ids_NTK, weights_NTK) or None).
    """
    id_type = trace_id_type(config.router.num_experts)

    def routed_experts(rows_TH, ids_TK, weights_TK, *arrays, **inputs):
        out, drops = experts(rows_TH, ids_TK, weights_TK, *arrays, **inputs)
        # Each assignment's fate stays here: a step reports where drops were, not which.
        where_PRC = profile(drops.fate_TK, rows.tokens.shape[1], PROFILE_BINS)
        routes = (ids_TK.astype(id_type), lax.stop_gradient(weights_TK)) if config.trace.every else None
        return out, (drops.counts_PE, drops.weights_P, where_PRC, routes)

    return forward(
        params,
        bias,
        rows,
        model=config.model,
        router=config.router,
        valid_total=valid_total,
        routed_experts=routed_experts,
        layer_inputs=layer_inputs,
    )


def _take_routes(outputs: Outputs) -> tuple[Outputs, tuple | None]:
    """The recorded routes taken out of the drops: they are not summed."""
    *drops, routes = outputs.drops
    return outputs._replace(drops=tuple(drops)), routes


def _over_microbatches(
    function: Callable[[Batch], tuple[Any, tuple | None]], batch: Batch
) -> tuple[Any, RecordedRoutes | None]:
    """(Sums added over the microbatches, routes of all of them) of function(rows) = (sums, routes), one at a time."""
    first = jax.tree.map(lambda x: x[0], batch)
    if batch.tokens.shape[0] == 1:
        total, routes = function(first)
        routes = jax.tree.map(lambda x: x[None], routes)
    else:

        def add(total, rows):
            sums, routes = function(rows)
            return jax.tree.map(jnp.add, total, sums), routes

        zeros = jax.tree.map(_zeros_like, jax.eval_shape(function, first)[0])
        total, routes = lax.scan(add, zeros, batch)
    return total, None if routes is None else RecordedRoutes(*routes)


def _zeros_like(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros that may differ between devices as the summed value does; a scan's carry must have one type."""
    zeros = jnp.zeros(shape.shape, shape.dtype)
    axes = tuple(axis for axis in placement.manual_axes() if axis in placement.varying_axes(shape))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def _sum_over_devices(outputs: Outputs) -> Outputs:
    """Outputs with every sum taken over the whole mesh, and the drops as LayerDrops."""
    counts_NPE, *_ = outputs.drops
    # Summed like the rest, each device in its own place, so that every process holds all of it.
    mine_D = jnp.arange(lax.axis_size(AXES), dtype=jnp.int32) == lax.axis_index(AXES)
    source_counts_NDP = jnp.where(mine_D[None, :, None], counts_NPE.sum(axis=-1, dtype=jnp.int32)[:, None], 0)
    outputs, source_counts_NDP = lax.psum((outputs, source_counts_NDP), AXES)
    counts_NPE, weights_NP, profile_NPRC = outputs.drops
    return outputs._replace(drops=LayerDrops(counts_NPE, weights_NP, source_counts_NDP, profile_NPRC))
