r"""Which capacity policy drops least for the same bytes on the wire, on routing recorded from a trained model.

    python -m ep_jax.train --config configs/experiments/routing64.toml
    python -m ep_jax.evaluate --run runs/routing64 --ep.transport dense --trace.every 1 --train.eval_sequences 1024
    python experiments/drops_at_equal_bytes.py --trace runs/routing64/trace_held_out \
        --out experiments/results/drops_at_equal_bytes

The trace holds the routes of held-out rows (the router's bias as trained, nothing dropped). Its rows are dealt out to
ep shards shuffled and in document order, and replayed through the protocol's own plan functions. Bytes are those of a
width-3072 bfloat16 row off the shard, dispatch and return, forward; `pooled_wave` at 1.15 / 1.15 is the unit. Pre-mix
pays for its own exchange with a smaller sender pool, so that every row of the table moves the same bytes or fewer; the
rows "on top" keep the factor and say what that costs, beside a larger pool of the same bytes. Writes OUT.json and
OUT.png; the verdict is in experiments/LOG.md. Its numbers are of consecutive held-out rows, which an earlier version of
this script ran through the model itself; a trace of an evaluation has a sample of all held-out rows.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ep_jax.ep import EPConfig
from ep_jax.ep.simulate import simulate
from ep_jax.replay.resharding import Group, deal, groups, recorded_sizes
from ep_jax.traces.file import Trace, TraceStep

WIDTH_BYTES = 2 * 3072
ROWS_PER_SHARD = 16
BASE = dict(transport="pooled_wave", sender_factor=1.15, receiver_factor=1.15, order="sequence")
POLICIES: dict[str, dict] = {
    "published: sequence order": {},
    "position order": dict(order="position"),
    "choice order": dict(order="choice"),
    "weight order": dict(order="weight"),
    "pooled receive": dict(receive="pool"),
    "position, pooled receive": dict(order="position", receive="pool"),
    "pre-mix 2, position": dict(order="position", premix=2),
    "pre-mix 4, position": dict(order="position", premix=4),
    "pre-mix 8, position": dict(order="position", premix=8),
    "pre-mix 4, position, pooled": dict(order="position", premix=4, receive="pool"),
    "pre-mix 8, position, pooled": dict(order="position", premix=8, receive="pool"),
    "pre-mix 4 on top": dict(order="position", premix=4, sender_factor=1.15),
    "pre-mix 4 on top, pooled": dict(order="position", premix=4, receive="pool", sender_factor=1.15),
    "sender 1.25, position, pooled": dict(order="position", receive="pool", sender_factor=1.25),
    "fixed cells": dict(transport="fixed_cell"),
    "ragged, tail": dict(transport="ragged", agreed="tail"),
    "ragged, round robin": dict(transport="ragged"),
    "ragged, water fill": dict(transport="ragged", agreed="water_fill"),
}


def read_rows(path: Path, most: int) -> TraceStep:
    """The first `most` packed rows of a trace as one step of a single shard: [N,1,1,rows*L,K] and [1,1,rows*L]."""
    steps = list(Trace(path))

    have = sum(step.valid_MST.size for step in steps) // steps[0].header.sequence_length
    if have < most:
        sys.exit(f"--rows {most}: the trace has {have}")
    num_tokens = most * steps[0].header.sequence_length

    def joined(name: str, axis: int) -> np.ndarray:  # microbatches, shards and their tokens become tokens of one shard
        arrays = [getattr(step, name) for step in steps]
        flat = [x.reshape(*x.shape[:axis], -1, *x.shape[axis + 3 :]) for x in arrays]
        tokens = np.concatenate(flat, axis=axis).take(np.arange(num_tokens), axis)
        return np.expand_dims(tokens, (axis, axis + 1))

    return TraceStep(
        header=dataclasses.replace(steps[0].header, ep=1, policy=None),
        step=steps[0].step,
        expert_ids_NMSTK=joined("expert_ids_NMSTK", 1),
        weights_NMSTK=joined("weights_NMSTK", 1),
        valid_MST=joined("valid_MST", 0),
        document_MST=joined("document_MST", 0),
        position_MST=joined("position_MST", 0),
    )


def deal_rows(step: TraceStep, shards: int, order: str) -> list[Group]:
    """The rows, shuffled or sorted by their first token's document, dealt to shards of ROWS_PER_SHARD."""
    length = step.header.sequence_length
    first = (step.position_MST.reshape(-1, length)[:, 0], step.document_MST.reshape(-1, length)[:, 0])
    place = np.lexsort(first) if order == "document" else np.random.default_rng(0).permutation(len(first[0]))

    def placed(array: np.ndarray, axis: int) -> np.ndarray:
        rows = array.reshape(*array.shape[:axis], -1, length, *array.shape[axis + 1 :])
        return rows.take(place, axis=axis).reshape(array.shape)

    arrays = {"expert_ids_NMSTK": 3, "weights_NMSTK": 3, "valid_MST": 2, "document_MST": 2, "position_MST": 2}
    step = dataclasses.replace(step, **{name: placed(getattr(step, name), axis) for name, axis in arrays.items()})
    return list(groups(deal(step.header, recorded_sizes(step), shards, ROWS_PER_SHARD, 1), [step]))


def equal_bytes(policy: dict, choices: int, shards: int) -> tuple[dict, float]:
    """The policy with its sender factor lowered by what its pre-mix costs, and its bytes over the published ones."""
    settings = {**BASE, **policy}
    away = choices * (shards - 1) / shards  # assignments that leave their shard, per token, at factor 1
    premix = settings.get("premix", 1)
    rows = (premix - 1) / premix * (1 + 4 * choices / WIDTH_BYTES)  # a row each way; ids and weights one way
    if premix > 1 and "sender_factor" not in policy:
        settings["sender_factor"] = round(BASE["sender_factor"] - rows / away, 4)
    if settings["transport"] == "ragged":
        return settings, 1 / BASE["sender_factor"]  # only rows that exist travel
    return settings, (settings["sender_factor"] * away + (rows if premix > 1 else 0)) / (BASE["sender_factor"] * away)


def compare(step: TraceStep, shards: int, order: str) -> dict[str, dict]:
    """Every policy's drops over all layers and groups of `shards` shards."""
    dealt = deal_rows(step, shards, order)
    layers, *_, choices = step.expert_ids_NMSTK.shape
    experts = step.header.num_experts
    sizes = dict(num_experts=experts, sequence_length=step.header.sequence_length)
    results = {}
    for name, policy in POLICIES.items():
        if policy.get("premix", 1) > shards:
            continue
        settings, bytes_ratio = equal_bytes(policy, choices, shards)
        fates, ids, lost = [], [], np.zeros(2)
        for layer in range(layers):
            for group in dealt:
                layer_ids, weights = group.expert_ids_NSTK[layer], group.weights_NSTK[layer]
                arguments = (layer_ids.astype(np.int32), weights, group.valid_ST)
                fate = np.asarray(simulate(*arguments, **sizes, settings=EPConfig(**settings)))
                dropped = (fate == 1) | (fate == 2)
                lost += [weights[dropped].sum(), weights[fate != 3].sum()]
                fates.append(fate)
                ids.append(layer_ids)
        fate, expert = np.stack(fates), np.stack(ids)
        dropped, counted = (fate == 1) | (fate == 2), fate != 3
        by_row = dropped.reshape(*fate.shape[:2], ROWS_PER_SHARD, -1)
        by_place = by_row.mean(axis=(0, 1, 3)) / counted.mean()
        row_rate = by_row.mean(axis=-1)
        expert_rate = np.bincount(expert[dropped], minlength=experts) / np.maximum(
            np.bincount(expert[counted], minlength=experts), 1
        )
        results[name] = dict(
            sender_factor=settings["sender_factor"],
            bytes=round(bytes_ratio, 4),
            dropped=float(dropped.sum() / counted.sum()),
            sender=float((fate == 1).sum() / counted.sum()),
            receiver=float((fate == 2).sum() / counted.sum()),
            lost_weight=float(lost[0] / lost[1]),
            last_place=float(by_place[-1]),
            first_place=float(by_place[0]),
            worst_row_99=float(np.quantile(row_rate, 0.99)),
            worst_expert=float(expert_rate.max()),
            by_place=[float(x) for x in by_place],
        )
    return results


def table(results: dict[str, dict]) -> str:
    """The results as text, percentages."""
    columns = (
        "dropped",
        "sender",
        "receiver",
        "lost_weight",
        "first_place",
        "last_place",
        "worst_row_99",
        "worst_expert",
    )
    lines = [f"{'policy':<30} {'cs':>6} {'bytes':>6} " + " ".join(f"{name[:9]:>9}" for name in columns)]
    for name, row in results.items():
        values = " ".join(f"{100 * row[column]:9.3f}" for column in columns)
        lines.append(f"{name:<30} {row['sender_factor']:6.3f} {row['bytes']:6.3f} {values}")
    return "\n".join(lines)


def draw(results: dict[str, dict[str, dict]], path: Path) -> None:
    """Drops by policy, and who pays by place in the shard."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    main = next(iter(results.values()))
    names = list(main)[::-1]
    left.barh(names, [100 * main[name]["sender"] for name in names], label="sender")
    left.barh(
        names, [100 * main[name]["receiver"] for name in names], left=[100 * main[name]["sender"] for name in names],
        label="receiver",
    )  # fmt: skip
    left.set(xlabel="% of assignments dropped", title=f"{next(iter(results))}, equal bytes (on top and 1.25: 9 % more)")
    left.legend()
    for name in ("published: sequence order", "position order", "weight order", "pre-mix 4, position"):
        right.plot(100 * np.array(main[name]["by_place"]), marker="o", label=name)
    right.set(xlabel="packed row's place in its shard", ylabel="% dropped", title="who pays", ylim=(0, None))
    right.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    step = read_rows(arguments.trace, arguments.rows)
    results = {}
    for shards, order in ((16, "shuffled"), (16, "document"), (64, "shuffled"), (8, "shuffled")):
        key = f"{shards} shards, {order} rows"
        results[key] = compare(step, shards, order)
        print(
            f"\n{key}, {ROWS_PER_SHARD} rows of {step.header.sequence_length} a shard\n{table(results[key])}",
            flush=True,
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
