"""Trains a model: `python -m ep_jax.train --config configs/tiny.toml`.

One page of phases: devices, data, where to start, steps, report. What a phase does is in the module it calls. Exit
codes are in exits.py; a refused run has written nothing but its message.
"""

import time
from collections.abc import Sequence
from typing import Any

from ep_jax import exits
from ep_jax.checkpoint import CHECKPOINTS, CheckpointError, Point, read_metadata, resume_point
from ep_jax.cli import parse_args
from ep_jax.compilation import CompileWatch
from ep_jax.config import RunConfig
from ep_jax.fields import ConfigError
from ep_jax.launch import Runtime, start
from ep_jax.signals import TerminationRequest


def main(argv: Sequence[str]) -> int:
    """Trains as configured; returns the exit code."""
    description = "Train a Mixture-of-Experts language model."
    config = parse_args(argv, command="python -m ep_jax.train", description=description)
    with TerminationRequest() as termination, CompileWatch() as watch:
        try:
            return train(config, termination, watch)
        except CheckpointError as error:
            print(f"checkpoint failed: {error}", flush=True)
            return exits.CHECKPOINT_FAILED


def train(config: RunConfig, termination: TerminationRequest, watch: CompileWatch) -> int:
    """The whole run; returns the exit code. Raises ConfigError before anything is written, and CheckpointError.

    watch: open; the time to the first step is counted from where it was opened.
    """
    # 1. Devices. Before this line no JAX backend runs: its flags and device count are set here.
    runtime = start(config)
    from ep_jax.data import bigram_cross_entropy, open_dataset
    from ep_jax.data.batches import BatchStream
    from ep_jax.evaluation import Evaluator, comparison
    from ep_jax.loop import Loop, Start
    from ep_jax.metrics import drop_table, short_time
    from ep_jax.report import SUMMARY_FILE
    from ep_jax.state import init_state, restore_state
    from ep_jax.trackers import check_packages
    from ep_jax.watchdog import Watchdog

    # 2. Data.
    config, mesh, say = runtime.config, runtime.mesh, runtime.say
    check_packages(config.log)
    dataset = open_dataset(config.data, vocab_size=config.model.vocab_size)
    stream = BatchStream.of_run(config, dataset.train, mesh)
    introduce(runtime, dataset.describe())

    # 3. Where to start: a new state, or a checkpoint's.
    point = resume_point(config.folder / CHECKPOINTS, config.resume)
    position = {
        "data": dataset.fingerprint,
        "seed": config.train.seed,
        "sequences_per_step": config.train.sequences_per_step,
    }
    if point is None:
        beginning = Start(init_state(config, mesh), 0, {}, position)
    else:
        metadata = checked_metadata(point, position, runtime)
        if point.step >= config.train.steps and (config.folder / SUMMARY_FILE).exists():
            say(f"nothing to do: {point.path} is at step {point.step} of {config.train.steps}")
            return exits.DONE
        state, owes = restore_state(config, mesh, point), metadata.get("owes_evaluation", False)
        beginning = Start(state, point.step, metadata["totals"], position, owes)
        say(f"resumed from {point.path} at step {point.step}")

    # 4. Steps.
    began = time.perf_counter()
    evaluator = Evaluator(config, mesh, dataset.held_out)
    with Watchdog(config.train.hang_timeout_s, exits.HUNG) as watchdog:
        loop = Loop(runtime, beginning, stream, evaluator, termination, watch, watchdog)
        code = loop.run()
        seconds = time.perf_counter() - began
        if code != exits.DONE:
            loop.report.close({})
            return code

        # 5. What came of it.
        watchdog.enter("the last evaluation", limited=False)  # it may compile
        bigram = bigram_cross_entropy(dataset.train, dataset.held_out)
        free, policy = evaluator.paired(loop.state["params"], loop.state["router"]["bias"])
    say("", drop_table(loop.report.drops_NPE), "", comparison(free, policy, bigram, config.ep), "")
    summary = {
        "held_out_dropless": free.as_json(),
        "held_out_as_trained": policy.as_json(),
        "held_out_bigram_cross_entropy": bigram,
    }
    loop.report.finish(summary | {"step": config.train.steps, "seconds_of_steps": seconds})
    say(f"done in {short_time(seconds)}; everything is in {config.folder}")
    return exits.DONE


def introduce(runtime: Runtime, data: str) -> None:
    """Prints what is about to be trained, on what, and how rows will travel."""
    import jax

    from ep_jax import flops
    from ep_jax.ep import implementations
    from ep_jax.model.attention import describe_kernel

    config = runtime.config
    total, active = flops.num_parameters(config.model, config.router)
    runtime.say(
        f"mesh: {config.mesh.shape_text()} on {jax.device_count()} x {jax.devices()[0].device_kind}",
        *(f"note: {note}" for note in runtime.notes),
        f"flags: {' '.join(runtime.flags) or 'none added'}",
        data,
        f"model: {total:,} parameters, {active:,} active per token, compute in {config.model.compute_dtype}",
        f"protocol: {config.ep.describe()}",
        f"rows and experts by {implementations.describe(config.ep.kernels)}",
        f"attention by {describe_kernel(config.model, config.data.sequence_length)}",
    )


def checked_metadata(point: Point, position: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """A checkpoint's metadata. With resume = auto another data order is refused; with a path it is only announced."""
    metadata = read_metadata(point)
    changed = [name for name, value in position.items() if metadata.get(name) != value]
    message = f"{point.path} was made with another {', '.join(changed)}"
    if changed and runtime.config.resume == "auto":
        raise ConfigError(
            f"resume = 'auto': {message}; allowed are the same settings, another run_dir, or --resume {point.path}"
        )
    if changed:
        runtime.say(f"WARNING: {message}; step {point.step} of the new data order comes next")
    return metadata


if __name__ == "__main__":
    exits.run_main(main)
