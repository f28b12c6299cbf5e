"""Trains a model: `python -m ep_jax.train --config configs/tiny.toml`.

One page of phases: devices, data, state, steps, report. What a phase does is in the module it calls. Exit codes are in
exits.py; a refused run has written nothing but its message.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from ep_jax import exits, flops
from ep_jax.checkpoint import CHECKPOINTS, CheckpointError, Checkpointer, Point, read_metadata, restore, resume_point
from ep_jax.cli import parse_args
from ep_jax.config import RunConfig, write_config
from ep_jax.fields import ConfigError
from ep_jax.signals import TerminationRequest


def main(argv: Sequence[str]) -> int:
    """Trains as configured; returns the exit code."""
    config = parse_args(
        argv, command="python -m ep_jax.train", description="Train a Mixture-of-Experts language model."
    )
    with TerminationRequest() as termination:
        try:
            return train(config, termination)
        except CheckpointError as error:
            print(f"checkpoint failed: {error}", flush=True)
            return exits.CHECKPOINT_FAILED


def train(config: RunConfig, termination: TerminationRequest) -> int:
    # 1. Devices, data, and where to start. Nothing is written to the run folder before the first step is done.
    from ep_jax.launch import start

    runtime = start(config)
    import jax

    from ep_jax.data import bigram_cross_entropy, open_dataset
    from ep_jax.data.batches import BatchStream
    from ep_jax.evaluation import Evaluator, comparison
    from ep_jax.metrics import DelayedMetrics, drop_table, short_time
    from ep_jax.profiling import Profiler, device_description
    from ep_jax.report import DEVICES_FILE, NonFiniteError, Report, write_json
    from ep_jax.step import init_state, make_train_step, state_shapes, state_shardings
    from ep_jax.trackers import check_packages

    config, mesh, say = runtime.config, runtime.mesh, runtime.say
    check_packages(config.log)
    dataset = open_dataset(config.data, vocab_size=config.model.vocab_size)
    stream = BatchStream(
        dataset.train,
        seed=config.train.seed,
        sequences_per_step=config.train.sequences_per_step,
        accumulation=config.train.accumulation,
        mesh=mesh,
        prefetch=config.data.prefetch,
    )
    total, active = flops.num_parameters(config.model, config.router)
    say(
        f"mesh: {config.mesh.shape_text()} on {jax.device_count()} x {jax.devices()[0].device_kind}",
        *(f"note: {note}" for note in runtime.notes),
        f"flags: {' '.join(runtime.flags) or 'none added'}",
        dataset.describe(),
        f"model: {total:,} parameters, {active:,} active per token, compute in {config.model.compute_dtype}",
        f"protocol: {config.ep.transport}, sender factor {config.ep.sender_factor}, receiver factor "
        f"{config.ep.receiver_factor}, {config.ep.waves} wave(s)",
    )
    point = resume_point(config.folder / CHECKPOINTS, config.resume)
    position = {
        "data": dataset.fingerprint,
        "seed": config.train.seed,
        "sequences_per_step": config.train.sequences_per_step,
    }
    metadata: dict[str, Any] = {"totals": {}}
    if point is not None:
        metadata = _checked_metadata(point, position, config.resume, say)
        if point.step >= config.train.steps:
            say(f"nothing to do: {point.path} is at step {point.step} of {config.train.steps}")
            return exits.DONE

    # 2. State and the one compiled step.
    if point is None:
        state, first_step = init_state(config, mesh), 0
    else:
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state_shapes(config),
            state_shardings(config, mesh),
        )
        (state, _), first_step = restore(point, target), point.step
        say(f"resumed from {point.path} at step {first_step}")
    train_step, delayed, report = make_train_step(config, mesh), DelayedMetrics(), None
    evaluator = Evaluator(config, mesh, dataset.held_out)
    started = time.perf_counter()

    # 3. Steps. `step` counts completed ones; the host is one step behind the device.
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(contextlib.closing(stream.from_step(first_step)))
        checkpointer = stack.enter_context(
            contextlib.closing(Checkpointer(config.folder / CHECKPOINTS, config.checkpoint))
        )
        profiler = stack.enter_context(Profiler(config.profile, config.folder, first_step, config.train.steps - 1))

        def save(step: int) -> None:
            checkpointer.save(step, state, {**position, "step": step, "totals": report.totals, **_provenance(config)})

        try:
            for index, batch in batches:
                with profiler.at_step(index):
                    state, metrics = train_step(state, batch)
                step = index + 1
                finished = delayed.push(step, metrics)
                if report is None:
                    first = delayed.flush()
                    say(f"first step done after {short_time(time.perf_counter() - started)}, mostly compiling")
                    if runtime.is_main:
                        write_config(config)
                        write_json(config.folder / DEVICES_FILE, {**device_description(), "added_flags": runtime.flags})
                    report = Report(runtime, first_step=first_step, totals=metadata["totals"])
                    termination.arm()
                    finished = first
                report.step_done(finished)
                checkpointer.check()

                last = step == config.train.steps
                stop = termination.requested_anywhere()
                due = config.checkpoint.every and step % config.checkpoint.every == 0
                evaluate_now = config.train.eval_every and step % config.train.eval_every == 0 and not last
                if due or evaluate_now or last or stop:
                    report.step_done(delayed.flush())  # the state is good up to here, and rows up to here exist
                if due or last or stop:
                    save(step)
                    report.clock.pause()
                if evaluate_now and not stop:
                    held_out = evaluator(state["params"], state["router"]["bias"], config.ep)
                    report.log_evaluation(step, {"held_out_cross_entropy": held_out.cross_entropy})
                    say(f"step {step}: held-out cross entropy {held_out.cross_entropy:.4f} as trained")
                if stop and not last:
                    checkpointer.wait()
                    say(f"stopped by SIGTERM: step {step} is saved; the same command resumes there")
                    return exits.INTERRUPTED
                if last:
                    break
        except NonFiniteError as error:
            say(f"stopped: {error}; parameters were left as they were before it and nothing was saved")
            return exits.NON_FINITE
        profiler.close()

        # 4. What came of it.
        checkpointer.wait()
        seconds = time.perf_counter() - started
        bigram = bigram_cross_entropy(dataset.train, dataset.held_out)
        free, policy = evaluator.paired(state["params"], state["router"]["bias"])
        say("", drop_table(report.drops_NPE), "", comparison(free, policy, bigram, config.ep), "")
        summary = report.finish(
            {
                "step": config.train.steps,
                "tokens": report.tokens,
                "seconds": seconds,
                "tokens_per_second": report.clock.tokens_per_second,
                "held_out_dropless": free.as_json(),
                "held_out_as_trained": policy.as_json(),
                "held_out_bigram_cross_entropy": bigram,
                "training_drops": report.totals["drops_NPE"],
            }
        )
        say(f"done in {short_time(seconds)}: {config.folder} holds checkpoints, metrics.jsonl and {summary.name}")
    return exits.DONE


def _checked_metadata(point: Point, position: dict[str, Any], resume: str, say) -> dict[str, Any]:
    """The checkpoint's metadata. Refuses to go on by itself with another data order; says so where it was asked to."""
    metadata = read_metadata(point)
    changed = [name for name, value in position.items() if metadata.get(name) != value]
    if changed:
        message = f"{point.path} was made with another {', '.join(changed)}"
        if resume == "auto":
            raise ConfigError(
                f"resume = 'auto': {message}; allowed are the same settings, another run_dir, or --resume {point.path}"
            )
        say(f"WARNING: {message}; step {point.step} of the new data order comes next")
    return metadata


def _provenance(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint says about its origin."""
    from ep_jax import __version__
    from ep_jax.config import to_toml

    return {"config": to_toml(config), "ep_jax": __version__}


if __name__ == "__main__":
    exits.run_main(main)
