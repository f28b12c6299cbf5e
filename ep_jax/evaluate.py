"""Evaluates a run's checkpoint: `python -m ep_jax.evaluate --run runs/tiny`.

Reports the held-out loss dropless and under the training capacity, side by side with the drop rate, from the same
parameters and the same rows. The configuration is the run's own; any setting can be overridden, the mesh and the
protocol included, so a run trained on one mesh is evaluated on another. Writes evaluation.json into the run folder.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ep_jax import exits
from ep_jax.checkpoint import CHECKPOINTS, CheckpointError, resume_point
from ep_jax.cli import Option, split_args
from ep_jax.config import CONFIG_FILE, load
from ep_jax.fields import ConfigError

EVALUATION_FILE = "evaluation.json"
OPTIONS = (
    Option("run", "DIR", "the run folder to evaluate (required)"),
    Option("step", "INTEGER", "the checkpoint's step; without it the newest whole one"),
)


def main(argv: Sequence[str]) -> int:
    """Evaluates as asked; returns the exit code."""
    arguments = split_args(
        argv,
        command="python -m ep_jax.evaluate",
        description="Held-out loss of a run's checkpoint, dropless and under its capacity.",
        extra=OPTIONS,
    )
    if "run" not in arguments.options:
        raise ConfigError("--run: missing; allowed is the folder of a run, e.g. --run runs/tiny")
    folder = Path(arguments.options["run"]).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"--run {folder}: found no {CONFIG_FILE} there; allowed is the folder of a run")
    config = load(arguments.config or str(folder / CONFIG_FILE), arguments.overrides)

    from ep_jax.launch import start

    runtime = start(config)
    from ep_jax.checkpoint import read_metadata, restore
    from ep_jax.data import bigram_cross_entropy, open_dataset
    from ep_jax.evaluation import Evaluator, comparison
    from ep_jax.metrics import drop_table
    from ep_jax.report import write_json
    from ep_jax.step import state_target
    from ep_jax.traces.recorder import HELD_OUT_TRACE_FOLDER, Recorder

    config = runtime.config
    step = arguments.options.get("step")
    try:
        point = resume_point(folder, str(folder / CHECKPOINTS / step) if step else str(folder))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if point is None:
        raise ConfigError(f"--run {folder}: found no checkpoint there")
    dataset = open_dataset(config.data, vocab_size=config.model.vocab_size)
    if read_metadata(point).get("data") != dataset.fingerprint:
        runtime.say(f"WARNING: {point.path} was trained on another data set; these may be other held-out documents")
    # Parameters and the router's bias only: the optimizer's state may be twice their size.
    target = state_target(config, runtime.mesh)
    state, _ = restore(point, {name: target[name] for name in ("params", "router")}, partial=True)
    evaluator = Evaluator(config, runtime.mesh, dataset.held_out)
    with contextlib.ExitStack() as stack:
        recorder = None
        if config.trace.every:
            recorder = Recorder(config, runtime.mesh, evaluator.layout, folder / HELD_OUT_TRACE_FOLDER, "held-out rows")
            recorder.forget_after(0)
            stack.callback(recorder.close)
        free, policy = evaluator.paired(state["params"], state["router"]["bias"], recorder)
    bigram = bigram_cross_entropy(dataset.train, dataset.held_out)
    runtime.say(
        f"{point.path} on mesh {config.mesh.shape_text()}",
        "",
        drop_table(policy.counts_NPE),
        "",
        comparison(free, policy, bigram, config.ep),
    )
    if runtime.is_main:
        write_json(
            folder / EVALUATION_FILE,
            {
                "step": point.step,
                "held_out_dropless": free.as_json(),
                "held_out_as_trained": policy.as_json(),
                "held_out_bigram_cross_entropy": bigram,
            },
        )
    return exits.DONE


if __name__ == "__main__":
    exits.run_main(main)
