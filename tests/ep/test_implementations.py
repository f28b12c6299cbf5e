"""Kernel or XLA: only NotImplementedError falls through, logged once, and a derivative belongs to its operation."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ep_jax_kernels import call

from ep_jax.ep import implementations
from ep_jax.ep.rows import combine_rows, move_rows


@pytest.fixture(autouse=True)
def nothing_logged():
    call.log_once.cache_clear()


@pytest.fixture
def with_kernels(monkeypatch):
    monkeypatch.setattr(implementations, "why_no_kernels", lambda: "")


def raises(error):
    def kernel(*_):
        raise error

    return kernel


def plain(*arguments):
    return "plain", *arguments


def test_the_kernel_is_asked_first(with_kernels):
    kernel = lambda *arguments: ("kernel", *arguments)  # noqa: E731
    assert implementations.first("gather", kernel, plain, 1, 2) == ("kernel", 1, 2)


def test_a_refusal_falls_through_and_is_logged_once(with_kernels, caplog):
    for _ in range(3):
        assert implementations.first("gather", raises(NotImplementedError("rows of 7")), plain, 1) == ("plain", 1)
    assert [record.getMessage() for record in caplog.records] == ["gather by XLA: rows of 7"]


def test_any_other_error_is_an_error(with_kernels):
    with pytest.raises(ValueError, match="broken"):
        implementations.first("gather", raises(ValueError("broken")), plain)


def test_xla_never_asks_the_kernel(with_kernels):
    with implementations.using("xla"):
        assert implementations.first("gather", raises(ValueError("asked")), plain) == ("plain",)


def test_on_a_cpu_there_are_no_kernels():
    assert implementations.chosen() == "xla"
    assert "NVIDIA" in implementations.why_no_kernels()
    assert implementations.describe("auto").startswith("XLA; kernels are for NVIDIA GPUs")
    assert implementations.describe("xla") == "XLA (ep.kernels = 'xla')"


INDEX, PLACES = jnp.array([2, 0, -1]), jnp.array([[1], [-1], [0]])
ROWS = jnp.arange(24.0).reshape(3, 8)
OPERATIONS = {
    "move": (lambda rows: move_rows(rows, INDEX, PLACES), ["gather"], ["gather"]),
    "move to several": (
        lambda rows: move_rows(rows, jnp.array([2, 0, 2]), jnp.array([[1, -1], [-1, -1], [0, 2]])),
        ["gather"],
        ["combine"],
    ),
    "combine": (
        lambda rows: combine_rows(rows, jnp.ones((1, 3)), INDEX[None], jnp.array([1, -1, 0]), rows.dtype),
        ["combine"],
        ["gradient"],
    ),
}


@pytest.fixture
def launched(monkeypatch, with_kernels):
    """Names of the kernels that were launched; what they give is zero."""
    names = []

    def record(*_, kernel, out_shape, **__):
        names.append(kernel)
        return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_shape)

    monkeypatch.setattr(call, "triton_call", record)
    for folder, kernels in (
        ("gather_rows", {"gather_rows_kernel": "gather"}),
        ("combine_rows", {"combine_rows_kernel": "combine", "combine_rows_gradient_kernel": "gradient"}),
    ):
        bodies = types.ModuleType(f"ep_jax_kernels.{folder}.kernel")  # in the place of what imports triton
        vars(bodies).update(kernels)
        monkeypatch.setitem(sys.modules, bodies.__name__, bodies)
    return names


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_derivative_uses_what_its_operation_used(launched, operation):
    """It is traced later, when the block that chose is left, or inside one that chooses otherwise."""
    function, forward, backward = OPERATIONS[operation]
    with implementations.using("xla"):
        out, pull = jax.vjp(function, ROWS)
    assert implementations.chosen() == "triton"
    assert np.any(pull(jnp.ones_like(out))[0])
    assert launched == []

    out, pull = jax.vjp(function, ROWS)
    assert launched == forward
    with implementations.using("xla"):
        assert not np.any(pull(jnp.ones_like(out))[0])
    assert launched == forward + backward


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_that_a_kernel_refuses_are_moved_by_xla_both_ways(launched, operation, caplog):
    function, *_ = OPERATIONS[operation]
    out, pull = jax.vjp(function, ROWS[:, :7])
    assert np.any(pull(jnp.ones_like(out))[0])
    assert launched == []
    [record] = caplog.records
    assert "by XLA: rows of 7 x float32" in record.getMessage()
