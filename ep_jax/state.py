"""The training state: what is in it, where its leaves lie, how it is made and restored.

A dict of step, params, optimizer state, router and rng. What a step does with it is in `step.py`, how it is written in
`checkpoint.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_jax import mesh as placement
from ep_jax.checkpoint import Point, restore
from ep_jax.config import RunConfig
from ep_jax.model.transformer import init_params, initial_router_state, parameter_kinds
from ep_jax.optimizer import make_optimizer, optimizer_shardings

State = dict[str, Any]  # step, params, opt_state, router, rng: see `init_state`


def state_shapes(config: RunConfig) -> State:
    """ShapeDtypeStructs of the training state."""
    return jax.eval_shape(lambda: _new_state(config))


def state_shardings(config: RunConfig, mesh: Mesh) -> State:
    """NamedSharding of every leaf of the training state: moments follow their parameter, the rest is replicated."""
    shapes, kinds = state_shapes(config), parameter_kinds(config.model, config.router)
    params = placement.shardings(mesh, placement.param_specs(kinds, shapes["params"]))
    whole = NamedSharding(mesh, PartitionSpec())
    return {
        "step": whole,
        "params": params,
        "opt_state": optimizer_shardings(optimizer_of(config), shapes["params"], params),
        "router": jax.tree.map(lambda _: whole, shapes["router"]),
        "rng": whole,
    }


def init_state(config: RunConfig, mesh: Mesh) -> State:
    """The state before the first step, placed on the mesh; values depend on the seed alone, not on the mesh.

    A dict: step int32 (completed steps), params (float32 master weights), opt_state (optax), router {"bias": float32
    [N,E]}, rng (uint32 key data of the run's seed).
    """
    # It runs once: on CPU the compiler would spend longer on making it fast than it ever takes.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    make = functools.partial(_new_state, config)
    return jax.jit(make, out_shardings=state_shardings(config, mesh), compiler_options=options)()


def state_target(config: RunConfig, mesh: Mesh) -> State:
    """ShapeDtypeStructs of the state with their shardings, to restore a checkpoint into."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state_shapes(config),
        state_shardings(config, mesh),
    )


def restore_state(config: RunConfig, mesh: Mesh, point: Point) -> State:
    """The state of a checkpoint, placed on the mesh whatever mesh it was saved on."""
    return restore(point, state_target(config, mesh))[0]


def _new_state(config: RunConfig) -> State:
    params, _ = init_params(config.model, config.router, config.train.seed)
    return {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "opt_state": optimizer_of(config).init(params),
        "router": initial_router_state(config.model, config.router),
        "rng": jax.random.key_data(jax.random.key(config.train.seed)),
    }


def optimizer_of(config: RunConfig) -> optax.GradientTransformation:
    """The run's optimizer."""
    return make_optimizer(config.optimizer, config.train.steps, parameter_kinds(config.model, config.router))
