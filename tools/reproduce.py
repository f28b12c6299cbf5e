"""Does a training reproduce? Its first steps twice in one process, compared to the bit.

    python -m tools.reproduce --config configs/h200.toml [--steps N] [--out FILE] [--section.key VALUE ...]
    python -m tools.reproduce --config configs/h200.toml --against FILE     # in a new process, or on another machine

Trains N steps from the run's own start on its own data, without a run folder, and again with the same compiled
program. After each step loss, gradient norm and a checksum of every array of the state are compared. Where an order of
sums depends on threads, the array it reaches is the first one to differ; some steps later all do. It saves and resumes
nothing.

On GPUs the compiler chooses kernels by measuring them, so a new process can have another program, hence other bits:
`--train.compilation_cache FOLDER` has it read the first one's.

Exit codes: 0 the same bits; 1 not; 2 refused; 3 a step was not finite; 6 the other processes did not come.
"""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_jax import exits
from ep_jax.cli import Option, split_args
from ep_jax.config import load
from ep_jax.exits import run_main
from ep_jax.fields import ConfigError
from ep_jax.launch import Runtime, start

LISTED = 3  # names of arrays on a line
OPTIONS = (
    Option("steps", "N", "steps that are trained twice, 4 if left out"),
    Option("out", "FILE", "JSON file of the losses and checksums"),
    Option("against", "FILE", "such a file, there for every process: compare with it too"),
)


@dataclasses.dataclass(frozen=True)
class After:
    """What is known of a step that was taken."""

    loss: float
    grad_norm: float
    checksums: dict[str, int]  # of 32 bits, by the path of the array in the state

    @property
    def bits(self) -> dict[str, Any]:
        """By name, parameters first: in them a difference is easiest to understand."""
        numbers = {"loss": self.loss.hex(), "gradient norm": self.grad_norm.hex()} | self.checksums
        return dict(sorted(numbers.items(), key=lambda item: not item[0].startswith("params/")))


def main(argv: Sequence[str]) -> int:
    """Does what the command line says; returns the exit code. Raises ConfigError."""
    description = (__doc__ or "").split("\n")[0]
    arguments = split_args(argv, command="python -m tools.reproduce", description=description, extra=OPTIONS)
    text = arguments.options.get("steps", "4")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--steps {text}: allowed is an integer of at least 1")
    steps, out = int(text), Path(arguments.options["out"]) if "out" in arguments.options else None
    if out and not out.parent.is_dir():
        raise ConfigError(f"--out = {str(out)!r}: cannot be written: there is no folder {out.parent}")
    known = read(Path(arguments.options["against"])) if "against" in arguments.options else None
    runtime = start(load(arguments.config, arguments.overrides))
    runtime.say(f"{runtime.config.mesh.shape_text()}, {runtime.config.ep.describe()}", "")

    from ep_jax.report import NonFiniteError

    try:
        first, second = train_twice(runtime, steps)
    except NonFiniteError as error:
        runtime.say(f"stopped: {error}")
        return exits.NON_FINITE
    same = report(runtime.say, "the same steps again", first, second)
    if known is not None:
        same &= report(runtime.say, f"against {arguments.options['against']}", known, first)
    if out and runtime.is_main:
        write(out, first)
    return exits.DONE if same else exits.DIFFERS


def train_twice(runtime: Runtime, steps: int) -> list[list[After]]:
    """What is known of the run's first `steps` steps, twice, by one program. Raises NonFiniteError."""
    import jax

    from ep_jax.checkpoint import leaves_by_path
    from ep_jax.data import open_dataset
    from ep_jax.data.batches import BatchStream
    from ep_jax.headroom import headroom
    from ep_jax.report import refuse_non_finite
    from ep_jax.state import init_state
    from ep_jax.step import make_train_step

    config, mesh = runtime.config, runtime.mesh
    stream = BatchStream.of_run(config, open_dataset(config.data, vocab_size=config.model.vocab_size).train, mesh)
    step, checksum = make_train_step(config, mesh), jax.jit(checksums)
    runs: list[list[After]] = []
    for again in (False, True):
        state, taken = init_state(config, mesh), []
        with contextlib.closing(stream.from_step(0)) as batches:
            for number in range(1, steps + 1):
                batch = next(batches)[1]
                with contextlib.nullcontext() if again or number > 1 else headroom(mesh):
                    state, metrics = jax.block_until_ready(step(state, batch))
                refuse_non_finite(number, metrics)
                loss, norm, sums = jax.device_get((metrics.loss, metrics.grad_norm, checksum(state)))
                by_path = {path: int(value) for path, value in leaves_by_path(sums).items()}
                taken.append(After(float(loss), float(norm), by_path))
        runs.append(taken)
        del state  # before there is another one
    return runs


def checksums(state: Any) -> Any:
    """uint32 for each array: the sum of its numbers' bits, each mixed with its place, modulo 2**32."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def checksum(array: jax.Array) -> jax.Array:
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        if array.dtype != bool:
            array = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
        place, stride = jnp.zeros(array.shape, jnp.uint32), 1
        for axis in reversed(range(array.ndim)):
            place += lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride % 2**32)
            stride *= array.shape[axis]
        # Mixed before they are summed: else two signs that flip would cancel.
        mixed = (array.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)) ^ (place * jnp.uint32(0x85EBCA6B) + 1)
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x7FEB352D)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x846CA68B)
        return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)

    return jax.tree.map(checksum, state)


def report(say: Any, what: str, first: Sequence[After], second: Sequence[After]) -> bool:
    """Prints a line for each step that both have; whether nothing differs."""
    say(f"{what}:", "step        loss   gradient norm   differ")
    pairs, same = list(zip(first, second, strict=False)), True
    for number, (one, other) in enumerate(pairs, 1):
        names = [name for name in one.bits | other.bits if one.bits.get(name) != other.bits.get(name)]
        listed = ": " + ", ".join(names[:LISTED]) if names else ""
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        counted = f"{len(names) or 'none'} of {len(one.bits | other.bits)}"
        say(f"{number:4} {one.loss:11.6f} {one.grad_norm:15.6f}   {counted}{listed}{more}")
        same &= not names
    steps = f"{len(pairs)} step{'s' * (len(pairs) > 1)}"
    say(f"the same bits in {steps}" if same else f"not the same bits in {steps}", "")
    return same


def write(path: Path, taken: Sequence[After]) -> None:
    """The steps as JSON. Raises ConfigError."""
    from ep_jax.report import write_json

    try:
        write_json(path, [dataclasses.asdict(after) for after in taken])
    except OSError as error:
        raise ConfigError(f"--out = {str(path)!r}: cannot be written: {error.strerror}") from None


def read(path: Path) -> list[After]:
    """What `write` wrote. Raises ConfigError."""
    try:
        taken = [After(**after) for after in json.loads(path.read_text(encoding="utf-8"))]
        for after in taken:
            if not (isinstance(after.loss, float) and isinstance(after.grad_norm, float)):
                raise TypeError
            if not all(isinstance(checksum, int) for checksum in after.checksums.values()):
                raise TypeError
    except OSError as error:
        raise ConfigError(f"--against = {str(path)!r}: cannot be read: {error.strerror}") from None
    except (AttributeError, TypeError, ValueError):
        taken = []
    if not taken:
        raise ConfigError(f"--against = {str(path)!r}: expected a file that --out wrote")
    return taken


if __name__ == "__main__":
    run_main(main)
