"""The Hopper products in Pallas's GPU interpreter against NumPy in float64: awkward experts, unused rows poisoned."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels.grouped_matmul.tiles import capacity_groups, ragged_groups
from ep_jax_kernels.grouped_matmul_mgpu import op
from ep_jax_kernels.grouped_matmul_mgpu.kernel import Launch
from ep_jax_kernels.grouped_matmul_mgpu.plan import ALIGNED_ROWS, CLUSTER, SHORT_ROWS, TALL_ROWS, UNIT_ROWS, plan_tiles
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec

from tests.kernels.test_grouped_matmul import RAGGED, SIZES

ROWS = 512
CAPACITY_ROWS = 304  # of each expert, at least the largest of SIZES
WIDTH, OTHER_WIDTH = 128, 512
SMALL = Launch(block_n=128, stages=3, group=3)


@pytest.fixture
def interpreted(monkeypatch):
    """A GPU of one cluster. Its six warpgroups are threads, and each needs one of XLA's, of which there are eight."""
    monkeypatch.setattr(op, "multiprocessors", lambda: CLUSTER)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


def problem(groups, num_rows, seed=0):
    """(rows, NaN in those that nobody owns; weights; the expert of each row or -1)."""
    rng = np.random.default_rng(seed)
    starts, sizes = (np.asarray(array) for array in groups)
    owner = np.full(num_rows, -1)
    for expert, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        owner[start : start + size] = expert
    rows = jnp.asarray(rng.standard_normal((num_rows, WIDTH)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((len(sizes), WIDTH, OTHER_WIDTH)), jnp.bfloat16)
    return jnp.where(jnp.asarray(owner >= 0)[:, None], rows, jnp.nan), weights, owner


def multiplied(rows, weights, owner):
    """Row by row in float64; zeros in rows that nobody owns."""
    rows, weights = np.asarray(rows, np.float64), np.asarray(weights, np.float64)
    zeros = np.zeros(weights.shape[2])
    return np.stack([zeros if expert < 0 else rows[row] @ weights[expert] for row, expert in enumerate(owner)])


def assert_close(found, wanted, owner):
    """Within the rounding to bfloat16, in owned rows."""
    assert found.dtype == jnp.bfloat16
    assert found.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(found, np.float64)[owner >= 0], wanted[owner >= 0], rtol=2**-8, atol=1e-4)


def check(groups, num_rows, transposed=False):
    rows, weights, owner = problem(groups, num_rows)
    as_they_lie = weights.swapaxes(1, 2) if transposed else weights
    found = jax.jit(functools.partial(op.product, transposed=transposed, launch=SMALL))(rows, as_they_lie, groups)
    assert_close(found, multiplied(rows, weights, owner), owner)


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "row gradient"])
@pytest.mark.usefixtures("interpreted")
def test_ragged_rows(transposed):
    check(ragged_groups(jnp.array(SIZES, jnp.int32)), ROWS, transposed)


@pytest.mark.parametrize("sizes", RAGGED[1:], ids=str)
@pytest.mark.usefixtures("interpreted")
def test_few_experts_or_none_have_the_rows(sizes):
    check(ragged_groups(jnp.array(sizes, jnp.int32)), ROWS)


@pytest.mark.usefixtures("interpreted")
def test_capacity_rows_skip_unwritten_tails():
    check(capacity_groups(jnp.array(SIZES, jnp.int32), CAPACITY_ROWS), len(SIZES) * CAPACITY_ROWS)


def test_tiles_begin_aligned_and_hold_both_sides_of_every_owned_row():
    rng = np.random.default_rng(0)
    many = [*RAGGED, *rng.multinomial(ROWS, rng.dirichlet(np.full(7, 0.3)), 20).tolist()]
    for sizes in many:
        for groups, num_rows in (
            (ragged_groups(jnp.array(sizes, jnp.int32)), ROWS),
            (capacity_groups(jnp.array(sizes, jnp.int32), ROWS), 7 * ROWS),
        ):
            plan, used = jax.jit(plan_tiles, static_argnums=1)(groups, num_rows)
            assert used[0] <= len(plan)
            starts, held, units = np.asarray(groups.starts_e), Counter(), Counter()
            for expert, start, end, first, side in np.asarray(plan)[: used[0]]:
                assert first % ALIGNED_ROWS == 0
                assert start - ALIGNED_ROWS < first < end
                last = min(end, first + (SHORT_ROWS if side == CLUSTER else TALL_ROWS))
                units[expert] += -(-(last - first) // UNIT_ROWS) * (2 if side == CLUSTER else 1)
                for row in range(max(first, start), last):
                    held.update((expert, row, half) for half in ((0, 1) if side == CLUSTER else (side,)))
            owned = [(expert, starts[expert] + i) for expert, size in enumerate(sizes) for i in range(size)]
            assert held == Counter((expert, row, half) for expert, row in owned for half in (0, 1))
            for expert, size in enumerate(sizes):
                assert units[expert] <= 2 * -(-(size + ALIGNED_ROWS - 1) // UNIT_ROWS)


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "row gradient"])
def test_the_default_launch_lowers_for_cuda(transposed):
    def products(rows, weights, sizes):
        return op.product(rows, weights, ragged_groups(sizes), transposed=transposed)

    shapes = ((1024, 1024), jnp.bfloat16), ((8, 1024, 1024), jnp.bfloat16), ((8,), jnp.int32)
    traced = jax.jit(products).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


def test_outputs_vary_over_the_mesh_axes_of_the_inputs():
    """Also under checkpoint and scan, as a layer uses them."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @jax.checkpoint
    def layer(rows, weights, sizes):
        hidden = op.product(rows, weights, ragged_groups(sizes))
        return op.product(hidden, weights, ragged_groups(sizes), transposed=True)

    def local(rows, weights, sizes):
        out, _ = jax.lax.scan(lambda rows, _: (layer(rows, weights, sizes), None), rows, None, length=2)
        assert sorted(jax.typeof(out).manual_axis_type.varying) == ["ep"]
        return out

    split = PartitionSpec("ep")
    shapes = ((4 * 256, 512), jnp.bfloat16), ((4 * 2, 512, 1024), jnp.bfloat16), ((4 * 2,), jnp.int32)
    out = jax.eval_shape(
        jax.shard_map(local, mesh=mesh, in_specs=(split,) * 3, out_specs=split),
        *(jax.ShapeDtypeStruct(*shape) for shape in shapes),
    )
    assert out.shape == (4 * 256, 512)


@pytest.mark.parametrize(
    ("rows", "weights", "message"),
    [
        (((512, 512), "float16"), ((2, 512, 512), "float16"), "must be bfloat16"),
        (((512, 512), "bfloat16"), ((2, 512, 512), "float32"), "must be bfloat16"),
        (((512, 480), "bfloat16"), ((2, 480, 512), "bfloat16"), "480 summed columns must be a multiple of 64"),
        (((512, 512), "bfloat16"), ((2, 512, 768), "bfloat16"), "768 output columns must be a multiple of 512"),
        (((508, 512), "bfloat16"), ((2, 512, 512), "bfloat16"), "508 rows must be a multiple of 8"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_refused(rows, weights, message):
    groups = ragged_groups(jnp.array([4, 4], jnp.int32))
    with pytest.raises(NotImplementedError, match=message):
        op.product(jnp.zeros(*rows), jnp.zeros(*weights), groups)


def test_a_wrong_call_is_refused():
    groups = ragged_groups(jnp.array([4, 4], jnp.int32))
    rows, weights = jnp.zeros((512, 512), jnp.bfloat16), jnp.zeros((2, 1024, 512), jnp.bfloat16)
    with pytest.raises(ValueError, match="must be the same"):
        op.product(rows, weights, groups)
    with pytest.raises(ValueError, match="block_n 192: must be a multiple of 128"):
        op.product(rows, weights.swapaxes(1, 2), groups, launch=Launch(block_n=192))
