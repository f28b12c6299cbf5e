"""The tuner's logic on the CPU: what is tried, what counts as right, what is kept; and that cases fit each other."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.tune import TOLERANCE, relative_error, tune
from kernels.tune_cases import TOKAMAX, Case, Way, edge_cases, product_cases, ragged_groups


@dataclasses.dataclass(frozen=True)
class Launch:
    factor: float = 2.0
    refuses: bool = False


def run(launch):
    if launch.refuses:
        raise NotImplementedError("not here")
    return lambda rows: rows * launch.factor


def make_case(launches):
    """Rows times 2, of which the last is not owned: NaN."""
    rows = jnp.ones((3, 4)).at[2].set(jnp.nan)
    return Case(
        name="double",
        shape="toy",
        ways={"ours": Way(launches, run), "others": Way((Launch(),), run)},
        arguments=(rows,),
        reference=lambda rows: rows * 2,
        baseline=lambda rows: rows + rows,
        baseline_arguments=(rows,),
        work=1.0,
        baseline_work=1.0,
        unit="TB/s",
        owned=np.array([True, True, False]),
    )


def test_launches_are_checked_and_the_right_ones_ranked():
    ranking = {}
    launches = (Launch(3.0), Launch(refuses=True), Launch(), Launch(2.0001), Launch(jnp.nan))
    rows = tune(make_case(launches), ("ours",), ranking, float("inf"), keep=1, iterations=2)
    assert [row["ok"] for row in rows] == [False, False, True, True, False]
    assert "not here" in rows[1]["failed"]
    assert sum("median_ms" in row for row in rows) == 1
    assert set(ranking) == {("double", "ours")}
    assert {*ranking["double", "ours"]} == {Launch(), Launch(2.0001)}

    rows = tune(make_case(launches), ("ours", "others"), ranking, float("inf"), keep=1, iterations=2)
    assert [(row["way"], row["ok"]) for row in rows] == [("ours", True), ("others", True)]


def test_after_the_end_nothing_is_tried():
    ranking = {}
    assert tune(make_case((Launch(),)), ("ours",), ranking, 0.0, keep=1, iterations=2) == []
    assert ranking["double", "ours"] == [Launch()]


def test_products_are_compared_with_products():
    """References and XLA's way give the same shapes; rows that nobody owns are NaN; ours have awkward sizes to do."""
    groups = ragged_groups(jnp.array([5, 11], jnp.int32))
    ways = {}
    for case in product_cases("toy", groups, 24, (16, 8), by=("triton", "hopper", TOKAMAX)):
        ways[case.name] = list(case.ways)
        out, even = case.reference(*case.arguments), case.baseline(*case.baseline_arguments)
        assert out.shape[-1] == even.shape[-1]
        assert jnp.isfinite(out).all()
        assert jnp.isnan(case.arguments[0]).any()
        assert case.work == case.baseline_work == 2 * 16 * 16 * 8
    assert ways == {
        "matmul forward": ["triton", "hopper", TOKAMAX],
        "matmul row gradient": ["triton", "hopper", TOKAMAX],
        "matmul weight gradient": ["triton", "hopper", TOKAMAX],
    }
    tried = {(case.name, way) for case in edge_cases() for way in case.ways}
    assert tried == {(name, way) for name, names in ways.items() for way in names if way != TOKAMAX}


def test_tokamax_is_asked_for_the_same_products(monkeypatch):
    """Its calls, computed by JAX's own ragged products."""
    asked = []

    def ragged_dot_general(left, right, group_sizes, dimensions, *, implementation):
        asked.append(implementation)
        return lax.ragged_dot_general(left, right, group_sizes, dimensions)

    fake = types.ModuleType(TOKAMAX)
    fake.ragged_dot_general = ragged_dot_general
    monkeypatch.setitem(sys.modules, TOKAMAX, fake)
    for case in product_cases("toy", ragged_groups(jnp.array([5, 11], jnp.int32)), 24, (16, 8), by=(TOKAMAX,)):
        arguments = [jnp.nan_to_num(x) if isinstance(x, jax.Array) else x for x in case.arguments]
        found, wanted = case.ways[TOKAMAX].run("mosaic")(*arguments), case.reference(*arguments)
        assert relative_error(found, wanted, case.owned) < TOLERANCE
    assert asked == ["mosaic"] * 3
