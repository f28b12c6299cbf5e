"""How several processes agree on a flag or a list; with one process all of it is trivial and JAX is not imported.

Every process makes the same calls in the same order. Nothing here moves training data.
"""

import asyncio
import functools
import sys
from typing import Any

import numpy as np


class AnyProcess:
    """Logical or of a flag over all processes; every process makes the same calls in the same order.

    With one process the answer is the flag itself. With several, a call starts a small reduction on one device of each
    process and answers with the result of the previous call: the host never waits for the step it has just launched.
    """

    def __init__(self) -> None:
        self._pending: Any = None

    def __call__(self, flag: bool) -> bool:
        if processes()[1] == 1:
            return flag
        previous, self._pending = self._pending, _start_any(flag)
        return previous is not None and bool(previous)


def processes() -> tuple[int, int]:
    """(index of this process, number of processes), without starting JAX when there is only one."""
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return 0, 1
    return jax.process_index(), jax.process_count()


def first_process(flag: bool) -> int | None:
    """The lowest index of the processes whose flag is set, None if there is none. Waits for all of them."""
    if processes()[1] == 1:
        return 0 if flag else None
    from jax.experimental import multihost_utils

    flags = multihost_utils.process_allgather(np.array(flag))
    return int(flags.argmax()) if flags.any() else None


def from_first(numbers: list[int]) -> list[int]:
    """The list (int32 values) of process 0. Waits for all processes."""
    if processes()[1] == 1:
        return numbers
    from jax.experimental import multihost_utils

    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    padded = np.array((numbers + [0] * count)[:count], np.int32)
    return [int(number) for number in multihost_utils.broadcast_one_to_all(padded)]


def barrier(name: str, timeout_s: int) -> None:
    """Waits until every process is here. name: never used before.

    Safe in a background thread: it goes through the coordination service, not through device work, which could cross
    the collectives of the step in flight.
    """
    if processes()[1] > 1:
        from orbax.checkpoint import v1

        asyncio.run(v1.multihost.sync_global_processes(name, operation_id="ep_jax", timeout=timeout_s))


def _start_any(flag: bool) -> Any:
    import jax

    sharding, any_of = _any_program()
    return any_of(jax.make_array_from_process_local_data(sharding, np.array([flag])))


@functools.cache
def _any_program() -> tuple[Any, Any]:
    import jax

    first_devices = {device.process_index: device for device in reversed(jax.devices())}
    mesh = jax.sharding.Mesh(np.array([first_devices[index] for index in sorted(first_devices)]), ("process",))
    split, everywhere = (jax.NamedSharding(mesh, jax.P(*names)) for names in (("process",), ()))
    return split, jax.jit(jax.numpy.any, out_shardings=everywhere)
