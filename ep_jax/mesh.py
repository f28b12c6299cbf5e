"""The (replica, fsdp, ep) mesh and the one table that says where every array lives.

Letters: D model width, V vocabulary, E routed experts.

| kind      | array        | split                             | gradient is summed over      |
|-----------|--------------|-----------------------------------|------------------------------|
| embedding | [V, D]       | D over (fsdp, ep)                 | replica, fsdp, ep            |
| head      | [D, V]       | D over (fsdp, ep)                 | replica, fsdp, ep            |
| dense     | [in, out]    | in over (fsdp, ep)                | replica, fsdp, ep            |
| expert    | [E, in, out] | E over ep, in over fsdp           | replica, fsdp                |
| router    | [D, E]       | whole on every device             | replica, fsdp, ep            |
| norm      | [width]      | whole on every device             | replica, fsdp, ep            |
| batch     | [rows, ...]  | rows over (replica, fsdp, ep)     | -                            |

Parameters of scanned blocks have one more leading axis, never split. Optimizer state follows its parameter. Inside the
step's shard_map, `gather_weight` turns a shard into the weight a matmul needs: dense weights over (fsdp, ep), experts
over fsdp only. This file does not know which parameters a model has; the model names each one's kind.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ep_jax.fields import ConfigError, check, setting

AXES = ("replica", "fsdp", "ep")
BATCH_AXES = AXES
DENSE_AXES = ("fsdp", "ep")

# kind -> one entry per dimension of the unstacked array
PLACEMENTS: dict[str, tuple] = {
    "embedding": (None, DENSE_AXES),
    "head": (DENSE_AXES, None),
    "dense": (DENSE_AXES, None),
    "expert": ("ep", "fsdp", None),
    "router": (None, None),
    "norm": (None,),
}
# kind -> (dimension, axes) that are gathered before use
GATHERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "embedding": (1, DENSE_AXES),
    "head": (0, DENSE_AXES),
    "dense": (0, DENSE_AXES),
    "expert": (1, ("fsdp",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the three mesh axes; one may be -1 and takes what the devices leave."""

    SECTION: ClassVar[str] = "mesh"

    replica: int = setting(1, at_least=-1, doc="whole copies of the model, one per rack or more")
    fsdp: int = setting(1, at_least=-1, doc="weights are split over this axis and gathered for use")
    ep: int = setting(1, at_least=-1, doc="experts are split over this axis; rows travel")
    domain_size: int = setting(
        0,
        at_least=0,
        unit="devices",
        doc="consecutive devices of one NVLink domain, which an ep group never leaves; 0 = the devices of one host",
    )

    def __post_init__(self):
        check(self)
        for axis in AXES:
            if getattr(self, axis) == 0:
                raise ConfigError(f"mesh.{axis} = 0: allowed is at least 1, or -1 for what the devices leave")
        if self.shape.count(-1) > 1:
            raise ConfigError(f"mesh.{self.shape_text()}: at most one axis may be -1")

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.replica, self.fsdp, self.ep)

    @property
    def size(self) -> int:
        """Number of devices; the config must be resolved."""
        if -1 in self.shape:
            raise ConfigError(f"mesh.{self.shape_text()}: -1 must be resolved against a device count first")
        return math.prod(self.shape)

    def shape_text(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True))


def resolve(config: MeshConfig, num_devices: int | None) -> MeshConfig:
    """Replaces an axis of -1 by what `num_devices` leaves. None: nothing says how many devices there are.

    Raises ConfigError naming both numbers when the sizes do not give the device count.
    """
    if num_devices is None:
        if -1 in config.shape:
            raise ConfigError(
                f"mesh.{config.shape_text()}: -1 needs a device count; on CPU set JAX_NUM_CPU_DEVICES or give all sizes"
            )
        return config
    known = math.prod(size for size in config.shape if size != -1)
    if -1 in config.shape and num_devices % known == 0:
        return dataclasses.replace(config, **{AXES[config.shape.index(-1)]: num_devices // known})
    if known != num_devices:
        raise ConfigError(
            f"mesh.{config.shape_text()}: needs {'a multiple of ' if -1 in config.shape else ''}{known} devices, "
            f"found {num_devices}"
        )
    return config


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a config over `devices` (all of JAX's when None), ep innermost, replicas (racks) outermost.

    Axes are of type Auto: arrays are handled whole outside the step's shard_map (optimizer, initialisation) and by
    hand inside it. Raises ConfigError when the sizes do not give the device count or an ep group would leave an
    NVLink domain.
    """
    devices = jax.devices() if devices is None else list(devices)
    config = resolve(config, len(devices))
    domains = _domains(devices, config.domain_size)
    order = sorted(range(len(devices)), key=lambda i: (domains[i], devices[i].id))
    for start in range(0, len(order), config.ep):
        group = {domains[i] for i in order[start : start + config.ep]}
        if len(group) > 1:
            sizes = sorted({domains.count(domain) for domain in group})
            raise ConfigError(
                f"mesh.ep = {config.ep}: an ep group would cross NVLink domains of {sizes} devices; allowed is a "
                f"divisor of the domain size (set mesh.domain_size where one domain spans several hosts)"
            )
    grid = np.empty(len(devices), dtype=object)
    grid[:] = [devices[i] for i in order]
    return Mesh(grid.reshape(config.shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _domains(devices: Sequence[Any], domain_size: int) -> list[int]:
    """The NVLink domain of each device: `domain_size` consecutive ids, or what the runtime calls a slice or a host."""
    if domain_size:
        rank = {device.id: i for i, device in enumerate(sorted(devices, key=lambda device: device.id))}
        return [rank[device.id] // domain_size for device in devices]
    slices = [getattr(device, "slice_index", None) for device in devices]
    return [device.process_index if index is None else index for device, index in zip(devices, slices, strict=True)]


def param_spec(kind: str, ndim: int) -> PartitionSpec:
    """Placement of a parameter: its kind's row of the table, behind the unsplit leading axes of scanned blocks."""
    placement = PLACEMENTS[kind]
    return PartitionSpec(*(None,) * (ndim - len(placement)), *placement)


def param_specs(kinds: Any, params: Any) -> Any:
    """PartitionSpec of every leaf of `params` (arrays or shapes), given the kinds of the same structure."""
    return jax.tree.map(lambda kind, leaf: param_spec(kind, leaf.ndim), kinds, params)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """NamedSharding of every PartitionSpec leaf."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def gather_weight(shard: jax.Array, kind: str, dtype: jnp.dtype) -> jax.Array:
    """The weight a matmul needs, from this device's shard; inside shard_map over AXES only.

    Forward: cast to `dtype`, then all-gather, so that the wire carries the narrow type. Backward: the gradient is
    cast to float32, then reduce-scattered over the gathered axes and summed over the others that share the shard.
    Kinds without a row in GATHERS are whole already: cast only.
    """
    if kind not in GATHERS:
        return shard.astype(dtype)
    dimension, axes = GATHERS[kind]
    return gather_shards(shard, dimension, axes, jnp.dtype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_shards(shard: jax.Array, dimension: int, axes: tuple[str, ...], dtype: jnp.dtype) -> jax.Array:
    """All-gathers `shard` along `dimension` over mesh `axes` in `dtype`; its gradient is reduced in float32."""
    # Made varying over every axis here, so that the sum over replicas happens in float32 in the backward rule below
    # and not, in the compute type, where the weight first meets an activation.
    return lax.all_gather(varying(shard.astype(dtype)), axes, axis=dimension, tiled=True)


def _gather_shards_forward(shard, dimension, axes, dtype):
    return gather_shards(shard, dimension, axes, dtype), _like(shard)


def _gather_shards_backward(dimension, axes, dtype, like, gradient):
    wide = gradient.astype(jnp.promote_types(jnp.float32, like.dtype))
    wide = reduce_scatter(wide, axes, dimension)
    shared = tuple(axis for axis in manual_axes() if axis not in varying_axes(like))
    return (lax.psum(wide, shared).astype(like.dtype) if shared else wide.astype(like.dtype),)


gather_shards.defvjp(_gather_shards_forward, _gather_shards_backward)


def reduce_scatter(x: jax.Array, axes: str | tuple[str, ...], dimension: int) -> jax.Array:
    """The sum of x over mesh axes, of which each device keeps its part along `dimension`."""
    if not (jax.default_backend() == "cpu" and jax.distributed.is_initialized()):
        return lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    # With jax.distributed XLA:CPU has Gloo's reduce-scatter. It may send from memory that is overwritten already: the
    # end of the first device's part can be wrong, without an error (jax-ml/jax#40830). With all-reduces in its place
    # one of two processes ended in a third of all starts, not known why; with the few a step has anyway none did.
    parts = lax.all_to_all(x, axes, split_axis=dimension, concat_axis=dimension, tiled=True)
    sources = lax.axis_size(axes)
    by_source = (*x.shape[:dimension], sources, x.shape[dimension] // sources, *x.shape[dimension + 1 :])
    return jnp.sum(parts.reshape(by_source), axis=dimension)


def _like(x: jax.Array) -> jax.Array:
    """An empty array with the dtype and the varying axes of x: residuals of a custom derivative carry arrays only."""
    return x.reshape(-1)[:0]


def manual_axes() -> tuple[str, ...]:
    """The mesh axes that the enclosing shard_map made manual, in mesh order."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which an array, or a ShapeDtypeStruct of one, may differ between devices."""
    return jax.typeof(x).manual_axis_type.varying


def varying(x: jax.Array) -> jax.Array:
    """x, marked as differing over every manual axis; its gradient is then summed by whoever un-marks it."""
    missing = tuple(axis for axis in manual_axes() if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
