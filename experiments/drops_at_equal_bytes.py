"""Which capacity policy drops least for the same bytes on the wire, on routing recorded from a trained model.

    python -m ep_jax.train --config configs/experiments/routing64.toml
    python experiments/drops_at_equal_bytes.py --run runs/routing64 --out experiments/results/drops_at_equal_bytes

Records the routes of held-out rows (the router's bias as trained, nothing dropped), deals the rows out to ep shards in
shuffled and in document order, and replays them through the protocol's own plan functions (`ep_jax.ep.simulate`). Bytes
are those of a width-3072 bfloat16 row off the shard, dispatch and return, forward; `pooled_wave` at 1.15 / 1.15 is the
unit. Pre-mix pays for its own exchange with a smaller sender pool, so that every row of the table moves the same bytes
or fewer; the rows "on top" keep the factor and say what that costs, beside a larger pool of the same bytes. Writes
OUT.json and OUT.png; the verdict is in experiments/LOG.md.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WIDTH_BYTES = 2 * 3072
ROWS_PER_SHARD = 16
BASE = dict(transport="pooled_wave", sender_factor=1.15, receiver_factor=1.15)
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


def record(run: Path, num_rows: int) -> dict[str, np.ndarray]:
    """Routes of `num_rows` held-out rows in document order: ids and weights [N,R,L,K], valid [R,L]."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from ep_jax.checkpoint import restore, resume_point
    from ep_jax.config import CONFIG_FILE, load
    from ep_jax.data import Batch, open_dataset
    from ep_jax.data.batches import Layout
    from ep_jax.ep import EPConfig, routed_experts_local
    from ep_jax.launch import start
    from ep_jax.mesh import AXES, param_specs
    from ep_jax.model.transformer import forward, parameter_kinds
    from ep_jax.step import BATCH_SPEC, state_shapes, state_target

    config = load(str(run / CONFIG_FILE))
    runtime = start(dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation=1)))
    config, mesh = runtime.config, runtime.mesh
    target = state_target(config, mesh)
    state, _ = restore(resume_point(run, str(run)), {k: target[k] for k in ("params", "router")}, partial=True)
    held_out = open_dataset(config.data, vocab_size=config.model.vocab_size).held_out

    def local(params, bias, batch):
        rows = jax.tree.map(lambda x: x[0], batch)

        def recorder(rows_TH, ids_TK, weights_TK, *rest, **sizes):
            out, _ = routed_experts_local(
                rows_TH, ids_TK, weights_TK, *rest, **sizes, settings=EPConfig(transport="dense")
            )
            return out, (ids_TK, weights_TK)

        return forward(
            params,
            bias,
            rows,
            model=config.model,
            router=config.router,
            valid_total=jnp.float32(1),
            routed_experts=recorder,
        ).drops

    specs = param_specs(parameter_kinds(config.model, config.router), state_shapes(config)["params"])
    split = PartitionSpec(None, AXES)
    routes_of = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(), Batch(*(BATCH_SPEC,) * len(Batch._fields))),
            out_specs=(split, split),
        )
    )
    per_batch = config.train.sequences_per_step
    layout = Layout(held_out, sequences_per_step=per_batch, accumulation=1, mesh=mesh)
    ids, weights, valid = [], [], []
    for first in range(0, num_rows, per_batch):
        local_batch = layout.read(np.arange(first, first + per_batch))
        batch_ids, batch_weights = routes_of(state["params"], state["router"]["bias"], layout.place(local_batch))
        shape = (config.model.num_layers, per_batch, config.data.sequence_length, -1)
        ids.append(np.asarray(batch_ids).reshape(shape))
        weights.append(np.asarray(batch_weights).reshape(shape))
        valid.append(local_batch.valid[0])
    return dict(
        ids=np.concatenate(ids, 1).astype(np.int32),
        weights=np.concatenate(weights, 1),
        valid=np.concatenate(valid),
        num_experts=np.int64(config.router.num_experts),
    )


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


def compare(routes: dict[str, np.ndarray], shards: int, order: str) -> dict[str, dict]:
    """Every policy's drops over all layers and groups of `shards` shards."""
    from ep_jax.ep import EPConfig
    from ep_jax.ep.simulate import simulate

    layers, rows, length, choices = routes["ids"].shape
    groups = rows // (shards * ROWS_PER_SHARD)
    if groups == 0:
        sys.exit(f"--rows {rows}: at least {shards} x {ROWS_PER_SHARD} are needed for {shards} shards")
    place = np.arange(rows) if order == "document" else np.random.default_rng(0).permutation(rows)
    place = place[: groups * shards * ROWS_PER_SHARD]

    def dealt(array):  # rows [R, L, ...] -> [groups, S, T, ...]
        return array[place].reshape(groups, shards, ROWS_PER_SHARD * length, *array.shape[2:])

    valid = dealt(routes["valid"])
    results = {}
    for name, policy in POLICIES.items():
        if policy.get("premix", 1) > shards:
            continue
        settings, bytes_ratio = equal_bytes(policy, choices, shards)
        fates, ids, lost = [], [], np.zeros(2)
        for layer in range(layers):
            layer_ids, weights = dealt(routes["ids"][layer]), dealt(routes["weights"][layer])
            for group in range(groups):
                arguments = (layer_ids[group], weights[group], valid[group])
                sizes = dict(num_experts=int(routes["num_experts"]), sequence_length=length)
                fate = np.asarray(simulate(*arguments, **sizes, settings=EPConfig(**settings)))
                dropped = (fate == 1) | (fate == 2)
                lost += [weights[group][dropped].sum(), weights[group][fate != 3].sum()]
                fates.append(fate)
                ids.append(layer_ids[group])
        fate, expert = np.stack(fates), np.stack(ids)
        dropped, counted = (fate == 1) | (fate == 2), fate != 3
        by_row = dropped.reshape(*fate.shape[:2], ROWS_PER_SHARD, -1)
        by_place = by_row.mean(axis=(0, 1, 3)) / counted.mean()
        row_rate = by_row.mean(axis=-1)
        expert_rate = np.bincount(expert[dropped], minlength=64) / np.maximum(
            np.bincount(expert[counted], minlength=64), 1
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
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    routes = record(arguments.run, arguments.rows)
    results = {}
    for shards, order in ((16, "shuffled"), (16, "document"), (64, "shuffled"), (8, "shuffled")):
        key = f"{shards} shards, {order} rows"
        results[key] = compare(routes, shards, order)
        print(f"\n{key}, {ROWS_PER_SHARD} rows of {routes['ids'].shape[2]} a shard\n{table(results[key])}", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
