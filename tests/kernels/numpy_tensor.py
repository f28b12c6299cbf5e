"""Runs the kernels' JAX side on the CPU: jax-triton is replaced by Triton's interpreter on NumPy arrays.

The interpreter wants torch tensors; `NumpyTensor` has the few methods of them that it calls. Kernels are imported under
TRITON_INTERPRET=1 inside the fixture `ops`, never when a test module is: a GPU session collects these modules too.

What the interpreter cannot show: bfloat16 products (it multiplies the bits) and roundings to bfloat16 (a carry is
lost), so tests compute in float32 and float16; alignment, memory order and speed.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

GUARD_BYTES = 2**18
MISSING = "kernel tests need triton: pip install 'triton==3.6.*' (it is in the extra dev)"


class NumpyTensor:
    """A contiguous array as Triton's interpreter takes it; it is its own storage and its own copy on the host."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other):
        assert other.array is self.array

    def new_empty(self, *_, **__):
        return NumpyTensor(self.array)

    def set_(self, storage, *_):
        self.array = storage.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)


def guarded(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, copy of the array inside them): on both sides GUARD_BYTES of ones: NaN, or -1."""
    memory = np.full(array.nbytes + 2 * GUARD_BYTES, 0xFF, np.uint8)
    inside = memory[GUARD_BYTES : GUARD_BYTES + array.nbytes].view(array.dtype).reshape(array.shape)
    inside[...] = array
    return memory, inside


def poisoned(shape, dtype):
    """An array that nobody has written: NaN, or -1 for integers."""
    return np.full(np.prod(shape) * jnp.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)


def interpreted_call(*arrays, kernel, out_shape, grid, num_warps, num_stages, **constants):
    """jax_triton.triton_call on concrete arrays; refuses what the real one or the GPU would refuse.

    Fails when a kernel writes outside its outputs, as long as it stays within the guards.
    """
    assert all(isinstance(array, jax.Array) for array in arrays)
    assert len(grid) <= 3
    assert 0 < grid[0] < 2**31
    assert num_warps in (1, 2, 4, 8, 16)
    assert num_stages > 0
    shapes, tree = jax.tree.flatten(out_shape)
    given = [guarded(np.asarray(array)) for array in arrays]
    outs = [guarded(poisoned(out.shape, out.dtype)) for out in shapes]
    before = [memory.copy() for memory, _ in given]
    kernel[grid](*(NumpyTensor(array) for _, array in (*given, *outs)), **constants)
    for (memory, _), bytes_before in zip(given, before, strict=True):
        assert (memory == bytes_before).all(), f"{kernel.__name__} wrote to or near an input"
    for memory, _ in outs:
        assert (memory[:GUARD_BYTES] == 0xFF).all(), f"{kernel.__name__} wrote before an output"
        assert (memory[-GUARD_BYTES:] == 0xFF).all(), f"{kernel.__name__} wrote behind an output"
    return tree.unflatten([jnp.asarray(array) for _, array in outs])


def patch_lang_tensor(original):
    """Triton's patch of its tensors, with loop bounds that NumPy 2.4 and newer still takes: arrays of one element."""

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


def require_triton():
    """Fails the test in one line where Triton is missing: a skip would prove nothing."""
    if importlib.util.find_spec("triton") is None:
        pytest.fail(MISSING, pytrace=False)
