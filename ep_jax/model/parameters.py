"""Declares, initialises and names the kinds of the parameters.

A module declares each parameter with `weight` or `norm_scale`: an `nnx.Param` that holds only a shape, its kind (what
`ep_jax.mesh` places and gathers by) and how it starts. `initialize` draws the values. No array is made before that, so
a model of any size can be described on any machine.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ep_jax import mesh

KINDS = ("embedding", "head", "dense", "expert", "router", "norm")
CAST_KINDS = ("embedding", "head", "dense", "expert")  # used in the compute type alone

# A normal cut at two standard deviations is this much narrower than the normal itself.
TRUNCATED_STD = 0.87962566103423978


def weight(kind: str, shape: tuple[int, ...], std: float) -> nnx.Param:
    """Declares a float32 matrix that starts truncated-normal with exactly this standard deviation."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), kind=kind, std=std)


def norm_scale(shape: tuple[int, ...]) -> nnx.Param:
    """Declares the float32 scale of an RMSNorm, which starts at one."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), kind="norm", std=None)


def kinds_of(module: nnx.Module) -> dict[str, Any]:
    """The kind of every parameter, as a nested dict with the structure of the parameters."""
    return _map_parameters(lambda path, param: param.get_metadata("kind"), module)


def initialize(module: nnx.Module, seed: int | jax.Array) -> dict[str, Any]:
    """Float32 master weights as a nested dict of arrays; depends on the seed and each parameter's path alone.

    The keys come from the paths, so a parameter keeps its values when others are added, and JAX's partitionable
    random numbers make them the same under every sharding.
    """
    key = jax.random.key(seed)
    return _map_parameters(lambda path, param: _initial_value(key, path, param), module)


def gathered(param: nnx.Param, dtype: jnp.dtype) -> jax.Array:
    """The whole weight in `dtype`, from the shard this device holds; the gradient comes back reduced in float32."""
    return mesh.gather_weight(param[...], param.get_metadata("kind"), dtype)


def in_compute_type(params: Any, kinds: Any, dtype: jnp.dtype) -> Any:
    """Parameters of the kinds that are only used after `gathered` cast them, cast; the others as they are.

    Made once for many uses of the weights, instead of once for each: what is cast again, to float32 and back, is the
    same number.
    """
    return jax.tree.map(lambda param, kind: param.astype(dtype) if kind in CAST_KINDS else param, params, kinds)


def _initial_value(key: jax.Array, path: tuple[str, ...], param: nnx.Param) -> jax.Array:
    shape, std = param.get_value().shape, param.get_metadata("std")
    if std is None:
        return jnp.ones(shape, jnp.float32)
    path_key = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
    return jax.random.truncated_normal(path_key, -2.0, 2.0, shape, jnp.float32) * (std / TRUNCATED_STD)


def _map_parameters(function, module: nnx.Module) -> dict[str, Any]:
    """Nested dict of function(path, param) over the parameters of a module."""
    result: dict[str, Any] = {}
    for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        names, node = tuple(map(str, path)), result
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = function(names, param)
    return result
