"""Kernel or XLA: only NotImplementedError falls through, logged once, and a choice outlives its block."""

import jax
import jax.numpy as jnp
import pytest

from ep_jax.ep import implementations
from ep_jax.ep.rows import move_rows


@pytest.fixture(autouse=True)
def nothing_logged():
    implementations._log_once.cache_clear()


def refuses(message):
    def kernel():
        raise NotImplementedError(message)

    return kernel


def test_a_refusal_falls_through_and_is_logged_once(caplog):
    for _ in range(3):
        assert implementations.first("gather", "triton", refuses("rows of 7"), lambda: "plain") == "plain"
    assert [record.getMessage() for record in caplog.records] == ["gather by XLA: rows of 7"]


def test_any_other_error_is_an_error():
    with pytest.raises(ValueError, match="broken"):
        implementations.first("gather", "triton", lambda: (_ for _ in ()).throw(ValueError("broken")), lambda: "plain")


def test_xla_never_asks_the_kernel():
    assert implementations.first("gather", "xla", refuses("not asked"), lambda: "plain") == "plain"


def test_on_a_cpu_there_are_no_kernels():
    assert implementations.chosen() == "xla"
    assert "NVIDIA" in implementations.why_no_kernels()
    assert implementations.describe("auto").startswith("XLA; they are for NVIDIA GPUs")
    assert implementations.describe("xla") == "XLA (ep.kernels = 'xla')"


def test_a_derivative_uses_what_its_operation_used(monkeypatch):
    """It is traced later, when the block that chose is left."""
    asked = []
    monkeypatch.setattr(implementations, "why_no_kernels", lambda: "")
    monkeypatch.setattr(implementations, "first", lambda _, by, kernel, plain: asked.append(by) or plain())
    index = jnp.array([2, 0, -1])
    with implementations.using("xla"):
        _, pull = jax.vjp(lambda rows: move_rows(rows, index, jnp.array([[1], [-1], [0]])), jnp.ones((3, 4)))
    assert implementations.chosen() == "triton"
    pull(jnp.ones((3, 4)))
    assert asked == ["xla", "xla"]
