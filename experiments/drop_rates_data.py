"""Turns recorded routing into the one small file that the notebook `drop_rates` starts from.

    python experiments/drop_rates_data.py --run runs/drop_rates --evaluations runs/drop_rates/eval_* \\
        --factors experiments/results/capacity_ep16.json --sizes experiments/results/ladder.json \\
        --out experiments/results/drop_rates.json

The run was trained with --trace.every; an evaluation is a folder with trace_held_out/ and evaluation.json of the same
model at another sequence length. The commands that make them stand at the top of the notebook. What is dropped is
decided by the protocol's own plan functions (`ep_jax.replay`). Counts are those of assignments, exact, summed over
layers unless a key says otherwise; the notebook makes rates of them. Traces are held in memory.

Letters: U recorded steps, N layers, P stages (valid, sender, receiver), E experts, I and J sender and receiver factors.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ep_jax import config as configuration
from ep_jax import exits, flops
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.settings import EPConfig
from ep_jax.ep.traffic import Widths
from ep_jax.fields import ConfigError
from ep_jax.replay.check import difference, policy_of
from ep_jax.replay.policies import Family
from ep_jax.replay.recommend import by_step
from ep_jax.replay.replay import Outcome, Request, replay
from ep_jax.replay.resharding import Dealing, deal, groups, recorded_sizes
from ep_jax.replay.results import result_of
from ep_jax.traces import Trace, TraceStep
from ep_jax.traces.recorder import HELD_OUT_TRACE_FOLDER, TRACE_FOLDER
from ep_jax.traces.synthetic import generate
from ep_jax.trackers import METRICS_FILE, read_rows

FACTORS = tuple(round(1 + 0.05 * i, 2) for i in range(11))
PAIRED = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)  # sender x receiver
PUBLISHED = (1.05, 1.33)  # of the published gate runs
WIDTHS = Widths(3072, 0, 2)  # the production row; only ratios of bytes are shown
ENDS = ("sender", "receiver")
CURVES = ("step", "drop_rate_sender", "drop_rate_receiver")
POLICIES = {
    "sequence order": EPConfig(order="sequence"),
    "position order": EPConfig(order="position"),
    "choice order": EPConfig(order="choice"),
    "weight order": EPConfig(order="weight"),
    "pooled receive": EPConfig(order="position", receive="pool"),
    "pre-mix 4": EPConfig(order="position", premix=4),
    "pre-mix 4, pooled receive": EPConfig(order="position", premix=4, receive="pool"),
    "fixed cells": EPConfig(transport="fixed_cell", order="position"),
    "ragged, tail": EPConfig(transport="ragged", agreed="tail"),
    "ragged, round robin": EPConfig(transport="ragged", agreed="round_robin"),
    "ragged, water fill": EPConfig(transport="ragged", agreed="water_fill"),
}


def main(argv: Sequence[str]) -> None:
    """Does what the command line says. Raises ConfigError."""
    options = _parser().parse_args(argv)
    config = configuration.load(str(options.run / configuration.CONFIG_FILE))
    trace = Trace(options.run / TRACE_FOLDER)
    steps, trained = list(trace), policy_of(trace.header.policy or {})
    held_out = [(folder, list(Trace(folder / HELD_OUT_TRACE_FOLDER))) for folder in options.evaluations]
    held_out.sort(key=lambda folder_steps: folder_steps[1][0].header.sequence_length)
    others = collected(options.factors)
    settled = [step for step in steps if 2 * step.step > config.train.steps]
    if not settled:
        raise ConfigError(f"{trace.path}: needs steps of the second half of training, found {trace.steps}")
    at = (trained.sender_factor, trained.receiver_factor)
    data = {
        "run": describe(config, steps, trained),
        "settled_steps": [step.step for step in settled],
        "check": [checked(step) for of in (steps, *[of for _, of in held_out]) for step in of],
        "curves": curves(options.run),
        "curves_of_factors": others,
        "curves_of_sizes": collected(options.sizes),
        "steps": [by_expert(step, trained, at) for step in steps],
        "factors": by_factor(settled),
        "factors_of_first_step": by_factor(steps[:1]),
        "pairs": by_pair(settled, trained),
        "replayed_and_trained": [one for step in steps for one in compare(step, trained, others)],
        "who_pays": who_pays(settled, at),
        "pieces": by_piece(settled, trained, at),
        "uniform": uniform(steps[0], trained, at),
        "evaluations": [evaluated(folder, of) for folder, of in held_out],
        "little_context": little_context(steps[0].header.sequence_length, [of for _, of in held_out], at[1]),
        "shards": by_shards(options.shards, settled, [of for _, of in held_out], trained, at),
    }
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in data.items())
    options.out.write_text("{\n" + text + "\n}\n")
    print(f"{len(steps)} + {sum(len(of) for _, of in held_out)} recorded steps in {options.out}")


def describe(config: configuration.RunConfig, steps: list[TraceStep], trained: EPConfig) -> dict[str, Any]:
    """Sizes of the run."""
    recorded, header = recorded_sizes(steps[0]), steps[0].header
    total, active = flops.num_parameters(config.model, config.router)
    return {
        "parameters": total,
        "active_parameters": active,
        "layers": recorded.layers,
        "experts": header.num_experts,
        "choices": recorded.choices,
        "shards": header.ep,
        "rows": recorded.rows,
        "sequence_length": header.sequence_length,
        "steps": config.train.steps,
        "tokens_per_step": recorded.step_rows * header.sequence_length,
        "policy": Family(trained, header.ep).name,
        "sender_factor": trained.sender_factor,
        "receiver_factor": trained.receiver_factor,
    }


def checked(step: TraceStep) -> dict[str, Any]:
    """Whether a replay of the step drops what the run counted; "differs" says where it does not."""
    header = step.header
    if header.policy is None or step.counts_NPE is None:
        raise ConfigError(f"{header.source}, step {step.step}: needs a trace with the policy and the counts of its run")
    differs = difference(step, step.counts_NPE, policy_of(header.policy))
    of = {"trace": header.source, "columns": header.sequence_length, "step": step.step}
    return of | {"counts": totals(step.counts_NPE), "differs": differs}


def curves(run: Path) -> dict[str, list]:
    """Of the training run: drop rates of single steps as logged."""
    rows = read_rows(run / METRICS_FILE)
    return {name: [short(row[name]) for row in rows] for name in CURVES}


def collected(file: Path) -> list[dict[str, Any]]:
    """Drop curves that experiments/collect.py gathered; those that do not reach the run's last step are left out."""
    runs = []
    for run in json.loads(file.read_text())["runs"]:
        step = run["curves"]["step"]
        if run["settings"].get("ep.transport") != "dense" and step[-1] == run["summary"]["step"]:
            settings = {name: value for name, value in run["settings"].items() if name.startswith("ep.")}
            drops = {name: [short(value) for value in run["curves"][name]] for name in CURVES}
            runs.append({"name": run["name"], "parameters": run["parameters"], "settings": settings} | drops)
    return runs


def by_expert(step: TraceStep, trained: EPConfig, at: tuple[float, float]) -> dict[str, Any]:
    """Counts [N][P][E] of one step under the policy of the run."""
    [[outcome]] = run_replay([step], [Request.of_pairs(Family(trained, step.header.ep), [at])])
    return {"step": step.step, "counts_NPE": outcome.expert_NPE.tolist()}


def by_factor(steps: list[TraceStep]) -> list[dict[str, Any]]:
    """All POLICIES at FACTORS, sender = receiver: counts [U][P], lost weight by stage, bytes that leave a GPU."""
    requests = [Request.of_pairs(family, [(f, f) for f in FACTORS]) for family in families(steps).values()]
    found = []
    for name, outcomes in zip(POLICIES, run_replay(steps, requests), strict=True):
        for outcome in outcomes:
            factor = outcome.sender if outcome.family.uses_sender else outcome.receiver
            result = result_of(outcome, shape_of(as_recorded(steps)), recorded_sizes(steps[0]).rows, WIDTHS, 0)
            lost, sent = [short(float(x)) for x in outcome.lost_weight_2], round(result.forward_bytes)
            one = {"policy": name, "factor": factor, "counts_UP": totals_by_step(outcome), "lost_weight": lost}
            found.append(one | {"forward_bytes": sent})
    return found


def by_pair(steps: list[TraceStep], trained: EPConfig) -> dict[str, Any]:
    """The policy of the run at PAIRED x PAIRED, counts [I][J][P], and at the published pair."""
    family = Family(trained, steps[0].header.ep)
    requests = [Request.grid(family, PAIRED, PAIRED), Request.of_pairs(family, [PUBLISHED])]
    grid, [published] = run_replay(steps, requests)
    counts_IJP = np.reshape([outcome.total_P for outcome in grid], (len(PAIRED), len(PAIRED), 3))
    of_published = {"published_factors": PUBLISHED, "published_counts": published.total_P.tolist()}
    return {"senders": PAIRED, "receivers": PAIRED, "counts_IJP": counts_IJP.tolist()} | of_published


def compare(step: TraceStep, trained: EPConfig, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What this run's routing would drop at other factors, and what runs trained with them logged in the same step."""
    logged = {}
    for run in runs:
        if step.step in run["step"]:
            at, pair = run["step"].index(step.step), [run["settings"][f"ep.{end}_factor"] for end in ENDS]
            logged[tuple(pair)] = [run[f"drop_rate_{end}"][at] for end in ENDS]
    if not logged:
        return []
    [outcomes] = run_replay([step], [Request.of_pairs(Family(trained, step.header.ep), list(logged))])
    return [
        {"step": step.step, "factors": pair, "replayed": outcome.total_P.tolist(), "trained": rates}
        for (pair, rates), outcome in zip(logged.items(), outcomes, strict=True)
    ]


def who_pays(steps: list[TraceStep], at: tuple[float, float]) -> dict[str, Any]:
    """Counts [P][...] of each policy at the factors of the run by place in the shard, column, source and document."""
    found = {}
    requests = [Request.of_pairs(family, [at]) for family in families(steps).values()]
    for name, [outcome] in zip(POLICIES, run_replay(steps, requests), strict=True):
        scopes = dict(place=outcome.place_PR, column=outcome.column_PC, source=outcome.source_PS)
        scopes["document"] = outcome.document_PD
        found[name] = {scope: counts.tolist() for scope, counts in scopes.items()}
    return found


def by_piece(steps: list[TraceStep], trained: EPConfig, at: tuple[float, float]) -> list[dict[str, Any]]:
    """The same routing cut into pieces of 1, 2, 4 ... columns, dealt to shards at random within each step."""
    found, columns = [], steps[0].header.sequence_length
    for length in [2**i for i in range(columns.bit_length()) if columns % 2**i == 0]:
        cut = [cut_and_dealt(step, length, np.random.default_rng([step.step, length])) for step in steps]
        [[outcome]] = run_replay(cut, [Request.of_pairs(Family(trained, steps[0].header.ep), [at])])
        found.append({"columns": length, "counts_UP": totals_by_step(outcome)})
    return found


def cut_and_dealt(step: TraceStep, length: int, rng: np.random.Generator) -> TraceStep:
    """The step with its rows cut into rows of `length` columns, in random order; tokens keep experts and weights."""
    ids, valid = step.expert_ids_NMSTK, step.valid_MST
    order = rng.permutation(valid.size // length)

    def dealt(array: np.ndarray, axis: int) -> np.ndarray:
        wide = array.reshape(*array.shape[:axis], len(order), length, *array.shape[axis + 3 :])
        return wide.take(order, axis=axis).reshape(array.shape)

    return TraceStep(
        header=dataclasses.replace(step.header, sequence_length=length),
        step=step.step,
        expert_ids_NMSTK=dealt(ids, 1),
        weights_NMSTK=dealt(step.weights_NMSTK, 1),
        valid_MST=dealt(valid, 0),
        document_MST=dealt(step.document_MST, 0),
        position_MST=dealt(step.position_MST, 0),
    )


def uniform(like: TraceStep, trained: EPConfig, at: tuple[float, float]) -> list[int]:
    """Counts [P] of synthetic routing of the same sizes in which every token chooses at random: noise alone."""
    recorded, header = recorded_sizes(like), like.header
    sizes = dict(shards=recorded.shards, rows_per_shard=recorded.rows, sequence_length=header.sequence_length)
    experts = dict(num_experts=header.num_experts, experts_per_token=recorded.choices)
    steps = list(generate("uniform", **sizes, **experts, num_layers=recorded.layers, steps=3))
    [[outcome]] = run_replay(steps, [Request.of_pairs(Family(trained, recorded.shards), [at])])
    return outcome.total_P.tolist()


def evaluated(folder: Path, steps: list[TraceStep]) -> dict[str, Any]:
    """Counts [U][P] of an evaluation's batches as the run counted them, and its held-out losses in nats."""
    losses = json.loads((folder / "evaluation.json").read_text())
    return {
        "columns": steps[0].header.sequence_length,
        "counts_UP": [totals(step.counts_NPE) for step in steps],
        "dropless_nats": losses["held_out_dropless"]["cross_entropy"],
        "as_trained_nats": losses["held_out_as_trained"]["cross_entropy"],
    }


def little_context(columns: int, held_out: list[list[TraceStep]], factor: float) -> dict[str, Any]:
    """How unevenly the first columns of held-out rows, as long as those of training, load experts.

    "overload" is the share of a batch's assignments that exceed `factor` times the balanced load, 0 to 1, averaged over
    batches and layers: of the first columns alone, and of as many tokens drawn at random.
    """
    shortest = held_out[0][0].header.sequence_length
    first, at_random = [], []
    for step in (step for of in held_out for step in of if step.header.sequence_length == columns):
        early_T = (np.arange(step.valid_MST.size) % columns < shortest)[step.valid_MST.reshape(-1)]
        random_T = np.random.default_rng(step.step).permutation(early_T)
        for ids_MSTK in step.expert_ids_NMSTK:
            ids_TK = ids_MSTK[step.valid_MST]
            for chosen_T, overloads in ((early_T, first), (random_T, at_random)):
                load_E = np.bincount(ids_TK[chosen_T].reshape(-1), minlength=step.header.num_experts)
                overloads.append(np.maximum(load_E - factor * load_E.mean(), 0).sum() / load_E.sum())
    found = {"overload_of_first": first, "overload_at_random": at_random}
    return {"first_columns": shortest} | {name: short(float(np.mean(values))) for name, values in found.items()}


def by_shards(
    shard_counts: list[int],
    settled: list[TraceStep],
    held_out: list[list[TraceStep]],
    trained: EPConfig,
    at: tuple[float, float],
) -> list[dict[str, Any]]:
    """The policy of the run on other ep sizes: the rows of a training step split over them, and, of held-out batches
    with the columns of training, as many rows a shard as recorded. That joins batches, soundly: one router made them.
    """
    columns = settled[0].header.sequence_length
    traces = [("training", "split", settled)]
    traces += [("held out", "recorded", steps) for steps in held_out if steps[0].header.sequence_length == columns]
    found = []
    for name, rows, steps in traces:
        for shards in shard_counts:
            dealing = deal(steps[0].header, recorded_sizes(steps[0]), shards, rows, len(steps))
            [[outcome]] = run_replay(steps, [Request.of_pairs(Family(trained, shards), [at])], dealing)
            dealt = {"trace": name, "shards": shards, "rows": dealing.rows, "assumption": dealing.assumption}
            found.append(dealt | {"counts": outcome.total_P.tolist()})
    return found


def families(steps: list[TraceStep]) -> dict[str, Family]:
    """POLICIES at the recorded degree."""
    return {name: Family(settings, steps[0].header.ep) for name, settings in POLICIES.items()}


def as_recorded(steps: list[TraceStep]) -> Dealing:
    """The ep groups as they were recorded."""
    return deal(steps[0].header, recorded_sizes(steps[0]), steps[0].header.ep, "recorded", len(steps))


def shape_of(dealing: Dealing) -> LayerShape:
    """Sizes of a layer that a policy sees."""
    header, tokens = dealing.header, dealing.rows * dealing.header.sequence_length
    return LayerShape(dealing.shards, header.num_experts, dealing.recorded.choices, tokens)


def run_replay(steps: list[TraceStep], requests: list[Request], dealing: Dealing | None = None) -> list[list[Outcome]]:
    """Outcomes [request][pair], as recorded or as dealt."""
    dealing = dealing or as_recorded(steps)
    for request in requests:
        request.family.check(shape_of(dealing))
    sizes = dict(num_experts=dealing.header.num_experts, sequence_length=dealing.header.sequence_length)
    return replay(groups(dealing, steps), requests, **sizes)


def totals_by_step(outcome: Outcome) -> list[list[int]]:
    """Counts [U][P] over all layers."""
    return by_step(outcome.counts_GNP.sum(axis=1), outcome.steps_G).tolist()


def totals(counts_NPE: np.ndarray | None) -> list[int]:
    """Counts [P] over all layers and experts."""
    return [] if counts_NPE is None else counts_NPE.sum(axis=(0, 2)).tolist()


def short(value: Any) -> Any:
    """A float with five digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder with trace/ and metrics.jsonl")
    parser.add_argument("--evaluations", type=Path, nargs="+", required=True, help="folders")
    parser.add_argument("--factors", type=Path, required=True, help="collected runs of other capacity factors")
    parser.add_argument("--sizes", type=Path, required=True, help="collected runs of other sizes")
    parser.add_argument("--shards", type=int, nargs="+", default=[8, 16, 32], help="ep sizes to deal the rows to")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    exits.run_main(main)
