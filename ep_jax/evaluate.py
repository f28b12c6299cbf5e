"""Evaluates a run's checkpoint: `python -m ep_jax.evaluate --run runs/tiny`.

Reports the held-out loss dropless and under the training capacity, side by side with the drop rates, from the same
parameters and the same rows: shuffled ones as in training, and rows in document order, where routing is less even. With
--attribute also what each layer's drops cost. The configuration is the run's own; any setting can be overridden, the
mesh and the protocol included, so a run trained on one mesh is evaluated on another. Writes evaluation.json into the
run folder.
"""

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ep_jax import exits
from ep_jax.checkpoint import CHECKPOINTS, CheckpointError, resume_point
from ep_jax.cli import Option, split_args
from ep_jax.config import CONFIG_FILE, RunConfig, load
from ep_jax.fields import ConfigError

EVALUATION_FILE = "evaluation.json"
FIGURE_TYPES = (".pdf", ".png", ".svg")
OPTIONS = (
    Option("run", "DIR", "the run folder to evaluate (required)"),
    Option("step", "INTEGER", "the checkpoint's step; without it the newest whole one"),
    Option("attribute", "", "also what each layer's drops cost, by evaluations in which it alone drops or does not"),
    Option("figure", "FILE", f"draw that, into a file that ends in {', '.join(FIGURE_TYPES)}; needs matplotlib"),
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
    check_attribution(arguments.options, config)

    from ep_jax.launch import start

    runtime = start(config)
    from ep_jax.checkpoint import read_metadata, restore
    from ep_jax.data import bigram_cross_entropy, open_dataset
    from ep_jax.evaluation import Evaluator, paired_table
    from ep_jax.metrics import drop_table
    from ep_jax.report import write_json
    from ep_jax.state import state_target
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
    weights = (state["params"], state["router"]["bias"])
    evaluator = Evaluator(config, runtime.mesh, dataset.held_out)
    with contextlib.ExitStack() as stack:
        recorder = None
        if "trace.every" in dict(arguments.overrides) and config.trace.every:  # not because the run was traced
            rows, every = min(config.train.eval_sequences, dataset.held_out.num_rows), config.trace.every
            batches = -(-rows // config.train.sequences_per_step)
            if every > batches:  # an older trace would be removed for nothing
                raise ConfigError(f"trace.every = {every}: allowed is 1 to {batches}, the held-out batches")
            where = folder / HELD_OUT_TRACE_FOLDER
            recorder = Recorder(config, runtime.mesh, evaluator.layout, where, f"held-out rows, run {folder.name}")
            stack.callback(recorder.close)
            recorder.forget_after(0)
            runtime.say(recorder.describe())
        shuffled = evaluator.paired(*weights, "shuffled", recorder)
    ordered = evaluator.paired(*weights, "document")
    bigram = bigram_cross_entropy(dataset.train, dataset.held_out)
    runtime.say(
        f"{point.path} on mesh {config.mesh.shape_text()}",
        f"protocol: {config.ep.describe()}",
        "",
        drop_table(shuffled.policy.counts_NPE),
        "",
        paired_table({"shuffled": shuffled, "document": ordered}, bigram),
    )
    numbers = {
        "step": point.step,
        "batches": len(shuffled.free.nats_B),
        "held_out_dropless": shuffled.free.as_json(),
        "held_out_as_trained": shuffled.policy.as_json(),
        "held_out_cost": shuffled.cost.as_json(),
        "document_order_dropless": ordered.free.as_json(),
        "document_order_as_trained": ordered.policy.as_json(),
        "document_order_cost": ordered.cost.as_json(),
        "held_out_bigram_cross_entropy": bigram,
    }
    if "attribute" in arguments.options:
        pairs = {"shuffled": shuffled, "document": ordered}
        numbers["cost_by_layer"] = attribute(runtime, evaluator, weights, pairs, arguments.options.get("figure"))
    if runtime.is_main:
        write_json(folder / EVALUATION_FILE, numbers)
    return exits.DONE


def check_attribution(options: Mapping[str, str], config: RunConfig) -> None:
    """Raises ConfigError when the costs of drops by layer cannot be found or drawn as asked: before the work."""
    if "attribute" in options and config.ep.transport == "dense":
        raise ConfigError("--attribute: ep.transport = 'dense' drops nothing; allowed is any other transport")
    if "figure" not in options:
        return
    file = Path(options["figure"]).expanduser()
    if "attribute" not in options:
        raise ConfigError(f"--figure {file}: shows what --attribute finds; allowed is together with it")
    if file.suffix not in FIGURE_TYPES or not file.parent.is_dir():
        raise ConfigError(f"--figure {file}: allowed is a file in a folder that exists, {', '.join(FIGURE_TYPES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--figure {file}: needs the package matplotlib; allowed without it is no figure")


def attribute(
    runtime: Any, evaluator: Any, weights: tuple[Any, Any], pairs: Mapping[str, Any], figure: str | None
) -> dict[str, Any]:
    """Finds, prints and maybe draws the cost of drops by layer for each order of rows; returns its JSON."""
    from ep_jax import counterfactual

    config = runtime.config
    runtime.say("", f"two more evaluations a layer, {2 * config.model.num_layers * len(pairs)} in all")
    step = counterfactual.make_counterfactual_step(config, runtime.mesh, config.ep)
    attributions = {}
    for order, pair in pairs.items():
        attributions[order] = counterfactual.attribute(step, *weights, evaluator.batches(order), pair)
        runtime.say("", counterfactual.table(attributions[order], order))
    if figure is not None and runtime.is_main:
        counterfactual.draw(attributions).savefig(Path(figure).expanduser(), dpi=120)
    return {order: attribution.as_json() for order, attribution in attributions.items()}


if __name__ == "__main__":
    exits.run_main(main)
