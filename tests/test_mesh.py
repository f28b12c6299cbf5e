"""The mesh: sizes that must fit, ep groups inside one NVLink domain, placements, gathered weights and gradients."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ep_jax import mesh as meshes
from ep_jax.fields import ConfigError
from ep_jax.mesh import (
    AXES,
    DENSE_AXES,
    MeshConfig,
    gather_weight,
    make_mesh,
    param_spec,
    param_specs,
    reduce_scatter,
    resolve,
    shardings,
)


@dataclasses.dataclass(frozen=True)
class Device:
    """What make_mesh reads of a device; ids need not be consecutive and the list need not be sorted."""

    id: int
    process_index: int = 0
    slice_index: int | None = None

    @property
    def platform(self):
        return "gpu"


def ids(mesh) -> list:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "devices", "shape"),
    [
        ({"fsdp": 2, "ep": -1}, 8, (1, 2, 4)),
        ({"replica": -1, "fsdp": 2, "ep": 2}, 8, (2, 2, 2)),
        ({"fsdp": -1}, 8, (1, 8, 1)),
        ({"fsdp": 2, "ep": 4}, 8, (1, 2, 4)),
        ({"fsdp": 2, "ep": 4}, None, (1, 2, 4)),
        ({}, 1, (1, 1, 1)),
    ],
)
def test_resolve(given, devices, shape):
    resolved = resolve(MeshConfig(**given), devices)
    assert resolved.shape == shape
    assert resolved.size == np.prod(shape)
    assert resolve(resolved, devices) == resolved


@pytest.mark.parametrize(
    ("given", "devices", "numbers"),
    [
        ({"fsdp": 2, "ep": 2}, 8, ("4", "8")),  # fewer than there are
        ({"fsdp": 4, "ep": 4}, 8, ("16", "8")),  # more
        ({"ep": 3, "fsdp": -1}, 8, ("3", "8")),
        ({"ep": 16, "fsdp": -1}, 8, ("16", "8")),
    ],
)
def test_sizes_that_do_not_give_the_device_count_are_refused(given, devices, numbers):
    with pytest.raises(ConfigError) as error:
        resolve(MeshConfig(**given), devices)
    assert set(numbers) <= set(re.findall(r"\d+", str(error.value)))
    assert str(error.value).startswith("mesh.")
    assert "\n" not in str(error.value)


def test_minus_one_needs_a_device_count():
    with pytest.raises(ConfigError, match="-1 needs a device count"):
        resolve(MeshConfig(ep=-1), None)
    with pytest.raises(ConfigError, match="-1 must be resolved"):
        _ = MeshConfig(ep=-1).size


@pytest.mark.parametrize("given", [{"ep": 0}, {"ep": -2}, {"fsdp": -1, "ep": -1}, {"domain_size": -1}])
def test_impossible_sizes_are_refused(given):
    with pytest.raises(ConfigError, match="mesh."):
        MeshConfig(**given)


def test_make_mesh_resolves_against_real_devices():
    mesh = make_mesh(MeshConfig(fsdp=2, ep=-1))
    assert dict(mesh.shape) == {"replica": 1, "fsdp": 2, "ep": 4}
    assert mesh.axis_names == AXES
    with pytest.raises(ConfigError, match="needs 4 devices, found 8"):
        make_mesh(MeshConfig(fsdp=2, ep=2))
    assert make_mesh(MeshConfig(fsdp=2, ep=2), jax.devices()[:4]).size == 4


# --- NVLink domains ---------------------------------------------------------------------------------------------------


def test_an_ep_group_stays_on_one_host():
    two_hosts = [Device(id=i, process_index=i // 4) for i in range(8)]
    with pytest.raises(
        ConfigError, match=r"mesh.ep = 8: .* cross NVLink domains of \[4\] devices; .* mesh.domain_size"
    ):
        make_mesh(MeshConfig(ep=8), two_hosts)
    mesh = make_mesh(MeshConfig(fsdp=2, ep=4), two_hosts[::-1])
    assert ids(mesh) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_an_ep_group_that_straddles_hosts_is_refused():
    # Three devices on each of four hosts: groups of 2 do not divide 3, groups of 3 do.
    hosts = [Device(id=i, process_index=i // 3) for i in range(12)]
    with pytest.raises(ConfigError, match=r"mesh.ep = 2: .* domains of \[3\] devices"):
        make_mesh(MeshConfig(fsdp=6, ep=2), hosts)
    assert make_mesh(MeshConfig(fsdp=4, ep=3), hosts).size == 12


def test_domain_size_joins_hosts():
    # One NVLink domain over two hosts of four, as in a rack.
    hosts = [Device(id=10 * i, process_index=i // 4) for i in range(16)]
    mesh = make_mesh(MeshConfig(replica=2, ep=8, domain_size=8), hosts)
    assert ids(mesh) == [[[10 * i for i in range(8)]], [[10 * i for i in range(8, 16)]]]
    with pytest.raises(ConfigError, match="mesh.ep = 16"):
        make_mesh(MeshConfig(ep=16, domain_size=8), hosts)
    with pytest.raises(ConfigError, match="mesh.ep = 8"):
        make_mesh(MeshConfig(replica=2, ep=8, domain_size=4), hosts)


def test_slices_are_domains_and_replicas_are_racks():
    # The runtime numbers two racks of two hosts; ids alternate between the racks.
    racks = [Device(id=i, process_index=i % 4, slice_index=i % 2) for i in range(8)]
    mesh = make_mesh(MeshConfig(replica=2, fsdp=2, ep=2), racks)
    assert ids(mesh) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert make_mesh(MeshConfig(replica=2, ep=4), racks).size == 8  # two hosts, but one domain


# --- placements -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ndim", "spec"),
    [
        ("embedding", 2, P(None, DENSE_AXES)),
        ("head", 2, P(DENSE_AXES, None)),
        ("dense", 2, P(DENSE_AXES, None)),
        ("dense", 3, P(None, DENSE_AXES, None)),
        ("expert", 3, P("ep", "fsdp", None)),
        ("expert", 4, P(None, "ep", "fsdp", None)),
        ("router", 2, P(None, None)),
        ("router", 3, P(None, None, None)),
        ("norm", 1, P(None)),
        ("norm", 2, P(None, None)),
    ],
)
def test_param_spec(kind, ndim, spec):
    assert param_spec(kind, ndim) == spec


def test_specs_and_shardings_follow_the_tree():
    params = {"a": jnp.zeros((8, 8)), "b": {"c": jnp.zeros((2, 8, 4, 3))}}
    specs = param_specs({"a": "dense", "b": {"c": "expert"}}, params)
    assert specs == {"a": P(DENSE_AXES, None), "b": {"c": P(None, "ep", "fsdp", None)}}
    mesh = make_mesh(MeshConfig(replica=2, fsdp=2, ep=2))
    placed = jax.device_put(params, shardings(mesh, specs))
    # Split over fsdp and ep, copied over replica.
    assert placed["a"].addressable_shards[0].data.shape == (2, 8)
    assert placed["b"]["c"].addressable_shards[0].data.shape == (2, 4, 2, 3)
    assert len({shard.index for shard in placed["a"].addressable_shards}) == 4


# --- gathered weights -------------------------------------------------------------------------------------------------

SHAPES = {"embedding": (3, 8), "head": (8, 6), "dense": (8, 6), "expert": (4, 8, 6), "router": (8, 4), "norm": (8,)}


def losses(kind: str, dtype):
    """(sharded loss, one-device loss) of sum(weight * coefficient of each device), in float32.

    Each device has its own coefficients in the compute dtype, as its own tokens would give. An expert's weight is
    only ever used by the devices that hold it.
    """
    mesh = make_mesh(MeshConfig(replica=2, fsdp=2, ep=2))
    spec, shape = param_spec(kind, len(SHAPES[kind])), SHAPES[kind]
    per_device = P(AXES, *(None,) * len(shape))

    def local(shard, coefficient):
        weight = gather_weight(shard, kind, dtype)
        assert weight.dtype == dtype
        part = jnp.sum((weight * coefficient[0]).astype(jnp.float32))
        return jax.lax.psum(part, AXES)

    def sharded(weight, coefficients):
        return jax.shard_map(local, mesh=mesh, in_specs=(spec, per_device), out_specs=P())(weight, coefficients)

    def plain(weight, coefficients):
        total = 0.0
        for device in range(8):
            whole = weight.astype(dtype)
            mine = whole.reshape(2, -1, *shape[1:])[device % 2] if kind == "expert" else whole
            total += jnp.sum((mine * coefficients[device]).astype(jnp.float32))
        return total

    return jax.jit(jax.value_and_grad(sharded)), jax.value_and_grad(plain)


def coefficients_for(kind: str, rng, dtype):
    shape = SHAPES[kind]
    local = (shape[0] // 2, *shape[1:]) if kind == "expert" else shape
    return jnp.asarray(rng.normal(size=(8, *local)), dtype)


@pytest.mark.parametrize("kind", SHAPES)
def test_gathered_weight_in_float32(kind):
    rng = np.random.default_rng(0)
    weight, coefficients = (
        jnp.asarray(rng.normal(size=SHAPES[kind]), jnp.float32),
        coefficients_for(kind, rng, jnp.float32),
    )
    sharded, plain = losses(kind, jnp.float32)
    (value, gradient), (wanted, wanted_gradient) = sharded(weight, coefficients), plain(weight, coefficients)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", meshes.GATHERS)
def test_gradient_of_a_bfloat16_weight_is_summed_in_float32(kind):
    # Each device's gradient is exact in bfloat16, their sum is not.
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=SHAPES[kind]), jnp.float32)
    coefficients = coefficients_for(kind, rng, jnp.bfloat16)
    value, gradient = losses(kind, jnp.bfloat16)[0](weight, coefficients)
    assert gradient.dtype == jnp.float32
    exact = np.asarray(coefficients, np.float64)
    if kind == "expert":  # devices of the same ep index hold the same experts
        exact = exact.reshape(4, 2, *exact.shape[1:]).sum(axis=0).reshape(SHAPES[kind])
    else:
        exact = exact.sum(axis=0)
    assert (exact.astype(jnp.bfloat16) != exact).any()
    np.testing.assert_allclose(gradient, exact, rtol=1e-6, atol=1e-6)


def test_the_wire_carries_the_narrow_weight_and_the_wide_gradient():
    sharded, _ = losses("dense", jnp.bfloat16)
    coefficients = jax.ShapeDtypeStruct((8, *SHAPES["dense"]), jnp.bfloat16)
    text = sharded.lower(jax.ShapeDtypeStruct(SHAPES["dense"], jnp.float32), coefficients).as_text()
    assert re.findall(r'"stablehlo\.all_gather".*: \((tensor<[^>]*>)\)', text) == ["tensor<2x6xbf16>"]
    scattered = re.findall(r'"stablehlo\.reduce_scatter"\(.*?\}\) : \((tensor<[^>]*>)\)', text, flags=re.DOTALL)
    assert scattered == ["tensor<8x6xf32>"]


@pytest.mark.parametrize("between_processes", [False, True])
@pytest.mark.parametrize(("axes", "dimension"), [("ep", 0), ("fsdp", 1), (("fsdp", "ep"), 1)])
def test_reduce_scatter(monkeypatch, axes, dimension, between_processes):
    """Both ways, over one axis and two: parts in the order of the devices on those axes."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: between_processes)
    mesh, spec = make_mesh(MeshConfig(replica=1, fsdp=2, ep=4)), P(AXES)
    x = np.random.default_rng(0).integers(-9, 9, (8, 8, 16)).astype(np.float32)
    part = jax.shard_map(
        lambda x: reduce_scatter(x[0], axes, dimension)[None], mesh=mesh, in_specs=spec, out_specs=spec
    )
    program = jax.jit(part).lower(x)
    assert ("stablehlo.reduce_scatter" in program.as_text()) != between_processes
    found, by_axes = np.asarray(program.compile()(x)), x.reshape(2, 4, 8, 16)
    for device in range(8):
        fsdp, ep = divmod(device, 4)
        group = {"ep": by_axes[fsdp], "fsdp": by_axes[:, ep], ("fsdp", "ep"): x}[axes]
        place = {"ep": ep, "fsdp": fsdp, ("fsdp", "ep"): device}[axes]
        np.testing.assert_array_equal(found[device], np.split(group.sum(axis=0), len(group), dimension)[place])
