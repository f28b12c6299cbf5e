"""Does a training reproduce? Its first steps twice in one process, compared to the bit.

    python -m tools.reproduce --config configs/h200.toml [--steps N] [--out FILE] [--section.key VALUE ...]
    python -m tools.reproduce --config configs/h200.toml --against FILE     # in a new process, or on another machine

Trains N steps from the run's own start on its own data, without checkpoints and files, and again with the same compiled
program. After each step loss, gradient norm and a checksum of every array of the state are compared. Where an order of
sums depends on threads, the array it reaches is the first one to differ; some steps later all do.

On GPUs the compiler chooses kernels by measuring them, so a new process can have another program, hence other bits:
`--train.compilation_cache FOLDER` has it read the first one's.

Exit codes: 0 the same bits; 1 not; 2 refused.
"""

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

DIFFERS = 1
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
    known = read(Path(arguments.options["against"])) if "against" in arguments.options else None
    runtime = start(load(arguments.config, arguments.overrides))
    config = runtime.config
    runtime.say(f"{config.mesh.shape_text()}, {config.ep.describe()}", "")
    take = stepper(runtime)
    runs = [take(int(text)) for _ in range(2)]
    same = report(runtime.say, "the same steps again", *runs)
    if known is not None:
        same &= report(runtime.say, f"against {arguments.options['against']}", known, runs[0])
    if "out" in arguments.options and runtime.is_main:
        write(Path(arguments.options["out"]), runs[0])
    return exits.DONE if same else DIFFERS


def stepper(runtime: Runtime) -> Any:
    """A function: trains the run's first `steps` steps, always by one program; returns a list of After."""
    import jax

    from ep_jax.data import open_dataset
    from ep_jax.data.batches import BatchStream
    from ep_jax.headroom import headroom
    from ep_jax.state import init_state
    from ep_jax.step import make_train_step

    config, mesh = runtime.config, runtime.mesh
    stream = BatchStream.of_run(config, open_dataset(config.data, vocab_size=config.model.vocab_size).train, mesh)
    step, checksum = make_train_step(config, mesh), jax.jit(checksums)

    def take(steps: int) -> list[After]:
        state, batches, taken = init_state(config, mesh), stream.from_step(0), []
        try:
            for _ in range(steps):
                batch = next(batches)[1]
                with headroom(mesh):
                    state, metrics = jax.block_until_ready(step(state, batch))
                loss, norm, sums = jax.device_get((metrics.loss, metrics.grad_norm, checksum(state)))
                by_path = {
                    jax.tree_util.keystr(path, simple=True, separator="/"): int(value)
                    for path, value in jax.tree_util.tree_leaves_with_path(sums)
                }
                taken.append(After(float(loss), float(norm), by_path))
        finally:
            batches.close()
        return taken

    return take


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
    same = True
    for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
        names = [name for name in one.bits | other.bits if one.bits.get(name) != other.bits.get(name)]
        listed = ": " + ", ".join(names[:LISTED]) if names else ""
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        counted = f"{len(names) or 'none'} of {len(one.bits)}"
        say(f"{number:4} {one.loss:11.6f} {one.grad_norm:15.6f}   {counted}{listed}{more}")
        same &= not names
    say("the same bits" if same else "not the same bits", "")
    return same


def write(path: Path, taken: Sequence[After]) -> None:
    """The steps as JSON. Raises ConfigError."""
    content = json.dumps([dataclasses.asdict(after) for after in taken], indent=1) + "\n"
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}") from None


def read(path: Path) -> list[After]:
    """What `write` wrote. Raises ConfigError."""
    try:
        taken = [After(**after) for after in json.loads(path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise ConfigError(f"--against {path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):
        taken = []
    if not taken:
        raise ConfigError(f"--against {path}: expected a file that --out wrote")
    return taken


if __name__ == "__main__":
    run_main(main)
