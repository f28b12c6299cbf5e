"""The Hopper weight gradient in Pallas's GPU interpreter against NumPy in float64: awkward experts, poisoned rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.gather_rows import reference
from ep_jax_kernels.grouped_matmul.tiles import capacity_groups, ragged_groups
from ep_jax_kernels.hopper import CLUSTER
from ep_jax_kernels.weight_gradient_mgpu import op
from ep_jax_kernels.weight_gradient_mgpu.kernel import Launch
from ep_jax_kernels.weight_gradient_mgpu.plan import EDGE_ROWS, EXPERT, STEP_ROWS, STEPS, plan_steps, tile_of
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.test_grouped_matmul import RAGGED, SIZES

ROWS = 512
CAPACITY_ROWS = 304  # of each expert, at least the largest of SIZES
WIDTH, OTHER_WIDTH = 256, 256
SMALL = Launch(block_n=128, stages=3, group=3)


@pytest.fixture
def interpreted(monkeypatch):
    """A GPU of one cluster, whose rows are gathered by plain JAX."""
    monkeypatch.setattr(op, "multiprocessors", lambda: CLUSTER)
    monkeypatch.setattr(op, "gather_rows", reference.gather_rows)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


def problem(groups, num_rows):
    """(rows and gradients, NaN where nobody owns them; the wanted gradients of the weights in float64)."""
    rng = np.random.default_rng(0)
    starts, sizes = (np.asarray(array) for array in groups)
    owned = np.zeros(num_rows, bool)
    for start, size in zip(starts, sizes, strict=True):
        owned[start : start + size] = True
    drawn = [jnp.asarray(rng.standard_normal((num_rows, width)), jnp.bfloat16) for width in (WIDTH, OTHER_WIDTH)]
    rows, d_out = (np.asarray(array, np.float64) for array in drawn)
    wanted = np.stack([rows[i : i + n].T @ d_out[i : i + n] for i, n in zip(starts, sizes, strict=True)])
    return *(jnp.where(jnp.asarray(owned)[:, None], array, jnp.nan) for array in drawn), wanted


def check(groups, num_rows):
    rows, d_out, wanted = problem(groups, num_rows)
    found = jax.jit(functools.partial(op.weight_product, dtype=jnp.bfloat16, launch=SMALL))(rows, d_out, groups)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("sizes", [SIZES, *RAGGED[1:]], ids=str)
@pytest.mark.usefixtures("interpreted")
def test_ragged_rows(sizes):
    check(ragged_groups(jnp.array(sizes, jnp.int32)), ROWS)


@pytest.mark.usefixtures("interpreted")
def test_capacity_rows_skip_unwritten_tails():
    check(capacity_groups(jnp.array(SIZES, jnp.int32), CAPACITY_ROWS), len(SIZES) * CAPACITY_ROWS)


@pytest.mark.usefixtures("interpreted")
def test_clusters_share_the_tiles_and_one_may_have_none(monkeypatch):
    """Three experts of one tile each for two clusters, which take two and one; then one tile for both."""
    monkeypatch.setattr(op, "multiprocessors", lambda: 2 * CLUSTER)
    wide = Launch(block_n=256, stages=2)
    for sizes in ([70, 0, 3], [100]):
        groups = ragged_groups(jnp.array(sizes, jnp.int32))
        rows, d_out, wanted = problem(groups, 128)
        found = jax.jit(functools.partial(op.weight_product, dtype=jnp.bfloat16, launch=wide))(rows, d_out, groups)
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8, atol=1e-4)


def test_outputs_vary_over_the_mesh_axes_of_the_inputs(monkeypatch):
    monkeypatch.setattr(op, "gather_rows", reference.gather_rows)
    mesh = jax.make_mesh((2, 4), ("fsdp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def local(rows, d_out, sizes):
        out = op.weight_product(rows, d_out, ragged_groups(sizes), jnp.bfloat16)
        assert sorted(jax.typeof(out).manual_axis_type.varying) == ["ep"]
        return out

    split = jax.sharding.PartitionSpec("ep")
    shapes = ((4 * 64, 256), jnp.bfloat16), ((4 * 64, 512), jnp.bfloat16), ((4 * 2,), jnp.int32)
    over_mesh = jax.shard_map(local, mesh=mesh, in_specs=(split,) * 3, out_specs=split)
    assert jax.eval_shape(over_mesh, *(jax.ShapeDtypeStruct(*shape) for shape in shapes)).shape == (8, 256, 512)


def test_steps_and_edges_hold_every_owned_row_once_and_no_other():
    rng = np.random.default_rng(0)
    many = [*RAGGED, *rng.multinomial(ROWS, rng.dirichlet(np.full(7, 0.3)), 30).tolist()]
    for sizes in many:
        sizes_e = jnp.array(sizes, jnp.int32)
        for groups in (ragged_groups(sizes_e), capacity_groups(sizes_e, ROWS), capacity_groups(sizes_e, ROWS + 3)):
            plan, edges = (np.asarray(array) for array in jax.jit(plan_steps)(groups))
            assert sorted(plan[:, EXPERT]) == list(range(len(sizes)))
            assert (np.diff(plan[:, STEPS]) <= 0).all()
            for expert, first, whole, steps in plan:
                edge = edges.reshape(-1, EDGE_ROWS)[expert]
                used = edge[: (steps - whole) * STEP_ROWS]
                assert steps >= 1
                assert first % 8 == 0
                assert (edge[len(used) :] == -1).all()
                held = [*range(first, first + whole * STEP_ROWS), *used[used >= 0].tolist()]
                start = int(groups.starts_e[expert])
                assert sorted(held) == list(range(start, start + sizes[expert]))


# Dealt out without the order by steps the first of these is worse than allowed, without turns that go back the second.
SHUFFLED = np.random.default_rng(0).permutation(
    np.random.default_rng(0).multinomial(64 * 4096, np.arange(1, 65) / 2080)
)
DRAWN = np.random.default_rng(0).multinomial(64 * 4096, np.random.default_rng(0).dirichlet(np.full(64, 6.0)))


@pytest.mark.parametrize("sizes", [[4096] * 64, SHUFFLED, DRAWN], ids=["even", "shuffled", "drawn"])
def test_clusters_have_alike_much_to_do(sizes):
    """The 66 clusters of an H200, 64 experts of 32 tiles: none exceeds the mean by more than one tile of 31."""
    clusters, num_tiles = 66, 64 * 32
    steps = np.asarray(plan_steps(ragged_groups(jnp.asarray(sizes, jnp.int32)))[0])[:, STEPS].astype(int)
    turns = np.arange(-(-num_tiles // clusters), dtype=np.int32)[:, None]
    tiles = np.asarray(tile_of(turns, np.arange(clusters, dtype=np.int32)[None], np.int32(clusters)))
    assert sorted(tiles[tiles < num_tiles]) == list(range(num_tiles))
    work = np.where(tiles < num_tiles, steps[np.minimum(tiles, num_tiles - 1) // 32], 0).sum(axis=0)
    assert work.max() <= work.mean() * 32 / 31


def test_the_default_launch_lowers_for_cuda(monkeypatch):
    monkeypatch.setattr(op, "gather_rows", reference.gather_rows)

    def gradient(rows, d_out, sizes):
        return op.weight_product(rows, d_out, ragged_groups(sizes), jnp.bfloat16)

    shapes = ((1024, 1024), jnp.bfloat16), ((1024, 512), jnp.bfloat16), ((8,), jnp.int32)
    traced = jax.jit(gradient).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("rows", "d_out", "message"),
    [
        (((64, 256), jnp.float32), ((64, 256), jnp.float32), "float32 times float32 in bfloat16: all must be bfloat16"),
        (((64, 128), jnp.bfloat16), ((64, 256), jnp.bfloat16), "128 columns of the rows must be a multiple of 256"),
        (((64, 256), jnp.bfloat16), ((64, 128), jnp.bfloat16), "128 columns of the gradients must be a multiple of"),
        (((60, 256), jnp.bfloat16), ((60, 256), jnp.bfloat16), "60 rows must be a multiple of 8"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(rows, d_out, message):
    groups = ragged_groups(jnp.array([3, 5], jnp.int32))
    with pytest.raises(NotImplementedError, match=message):
        op.weight_product(jnp.zeros(*rows), jnp.zeros(*d_out), groups, jnp.bfloat16)
