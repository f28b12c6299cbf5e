# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Drop rates: how many assignments drop, at which stage, and who pays
#
# Fixed capacities drop what exceeds them. Which policy drops how much at which factor, in which layer, column, row,
# document and expert, and what makes it more: untrained balancing, long sequences, many shards?
#
# **Look at** (1) how fast drops fall in training, (2) that receivers drop because some experts are popular everywhere,
# (3) which policies drop less for the same bytes, (4) whether replaying one run's routing foretells runs trained with
# other factors, (5) who pays under each order, (6) that senders drop more the longer sequences are. The verdict, with
# all numbers, is the last cell.
#
# Routing was recorded in one small run (its sizes are printed below) and replayed through the protocol's own plan
# functions: no model of routing is involved. One model, one seed, some 4 tokens per active parameter and a few recorded
# steps: read sizes of effects, not third digits.

# %% [markdown]
# ## Commands
# From a checkout, on one H200; the last takes some minutes on two CPU cores, without a GPU. The notebook reads its file
# alone.
#
# ```
# python -m ep_jax.train --config configs/ladder/ep_d192.toml --run_dir runs/drop_rates \
#     --train.steps 250 --optimizer.warmup_steps 25 --trace.every 50 --log.every 5
# for L in 64 128 256 512; do
#     python -m ep_jax.evaluate --run runs/drop_rates --trace.every 1 --data.sequence_length $L \
#         --train.sequences_per_step $((32768 / L)) --train.eval_sequences $((65536 / L))
#     mkdir runs/drop_rates/eval_$L
#     mv runs/drop_rates/evaluation.json runs/drop_rates/trace_held_out runs/drop_rates/eval_$L
# done
# python experiments/drop_rates_data.py --run runs/drop_rates --evaluations runs/drop_rates/eval_* \
#     --factors experiments/results/capacity_ep16.json --sizes experiments/results/ladder.json \
#     --out experiments/results/drop_rates.json
# ```
#
# The committed file is from 2026-11-30, one H200, JAX 0.11.2. The evaluated checkpoint is that of a repetition of the
# recorded run. `experiments/collect.py` gathered the other two files, from runs of the same model with other factors
# and of `configs/ladder`.

# %%
import importlib.util
import io
import json
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import PIL.Image
from IPython.display import Image, display


def read(name):
    """A result file of the checkout above this file, above the working directory, or that ep_jax is installed from."""
    spec = importlib.util.find_spec("ep_jax")
    for start in (globals().get("__file__", "."), ".", spec.origin if spec else "."):
        for folder in (Path(start).resolve(), *Path(start).resolve().parents):
            if (folder / name).is_file():
                return json.loads((folder / name).read_text())
    raise FileNotFoundError(f"{name}: run this notebook inside a checkout")


data = read("experiments/results/drop_rates.json")
SENDER, RECEIVER = "tab:blue", "tab:orange"
plt.rcParams |= {"figure.dpi": 100, "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3}
plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 9}


def show(figure):
    """Displays a figure as a PNG of 128 colours: a third of the usual bytes, which go into git."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn)
    PIL.Image.open(drawn).convert("RGB").quantize(128, dither=PIL.Image.Dither.NONE).save(small, "png", optimize=True)
    plt.close(figure)
    display(Image(small.getvalue()))


def percent(counts, axis=-1):
    """Drops of both stages, % of valid assignments; counts have (valid, sender, receiver) on `axis`."""
    return staged(counts, axis).sum(axis=axis)


def staged(counts, axis=-1):
    """The same by stage."""
    valid, *drops = np.moveaxis(np.array(counts, dtype=float), axis, 0)
    return np.stack([100 * d / np.maximum(valid, 1) for d in drops], axis=axis)


def log_percent(axis, lowest, highest):
    """A logarithmic % axis with plain numbers; what lies below `lowest` is not shown."""
    axis.set(yscale="log", ylim=(lowest, highest), ylabel="dropped, % of assignments")
    axis.yaxis.set_major_formatter("{x:g}")


run, at = data["run"], f"{data['run']['sender_factor']} / {data['run']['receiver_factor']}"
print(
    f"{run['parameters'] / 1e6:.1f} M parameters, {run['active_parameters'] / 1e6:.2f} M active; "
    f"{run['layers']} layers of {run['experts']} experts, top-{run['choices']};\n"
    f"{run['steps']} steps of {run['tokens_per_step']:,} tokens = "
    f"{run['steps'] * run['tokens_per_step'] / run['active_parameters']:.1f} tokens per active parameter;\n"
    f"an ep group of {run['shards']} shards, each {run['rows']} packed rows of {run['sequence_length']} columns; "
    f"trained with {run['policy']} at {at}"
)
agree = [not one["differs"] for one in data["check"]]
checked = np.sum([one["counts"] for one in data["check"]], axis=0)
print(
    f"replay = what the run counted, by layer, stage and expert, to the unit: {sum(agree)} of {len(agree)} recorded "
    f"steps\n({checked[0]:,} assignments, {checked[1:].sum():,} dropped)"
)

# %% [markdown]
# ## 1. In training
# Left: the recorded run by stage; dots are recorded steps. Middle: the same model and rows, trained with other factors.
# Right: this size and larger ones at 1.15 / 1.15, two seeds each. Rates are those of single steps.

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), sharey=True)
curve = {name: np.array(values) for name, values in data["curves"].items()}
recorded = np.isin(curve["step"], [one["step"] for one in data["steps"]])
for end, colour in (("sender", SENDER), ("receiver", RECEIVER)):
    rate = 100 * curve[f"drop_rate_{end}"]
    left.plot(curve["step"], rate, color=colour, label=end)
    left.plot(curve["step"][recorded], rate[recorded], "o", color=colour)
left.set(title=f"the recorded run, {at}", xlabel="step")
left.legend()
equal = [one for one in data["curves_of_factors"] if len(set(one["settings"].values())) == 1]
for place, one in enumerate(equal):
    total = 100 * np.add(one["drop_rate_sender"], one["drop_rate_receiver"])
    factor = one["settings"]["ep.sender_factor"]
    colour = plt.cm.viridis(place / len(equal))
    middle.plot(one["step"], total, color=colour)
    middle.text(one["step"][-1], total[-1], f" {factor:g} / {factor:g}", color=colour, va="center", clip_on=False)
middle.set(title="both stages, other factors", xlabel="step", xlim=(None, 1.3 * max(equal[0]["step"])))
sizes = sorted({one["parameters"] for one in data["curves_of_sizes"]})
for one in data["curves_of_sizes"]:
    total = 100 * np.add(one["drop_rate_sender"], one["drop_rate_receiver"])
    place = sizes.index(one["parameters"])
    label = "" if any(one["parameters"] == p.get_gid() for p in right.lines) else f"{one['parameters'] / 1e6:.0f} M"
    x = 100 * np.array(one["step"]) / one["step"][-1]
    colour = ("tab:olive", "tab:green", "tab:purple")[place % 3]
    right.plot(x, total, color=colour, lw=1, label=label, gid=one["parameters"])
right.set(title="both stages, model sizes", xlabel="% of training")
right.legend(title="parameters")
log_percent(left, 0.05, 100)
middle.set_ylabel("")
right.set_ylabel("")
show(figure)

# %% [markdown]
# ## 2. Before and after balancing converges
# Left: load of every expert of all layers, sorted, in single steps; the capacity line is what an expert's rows hold.
# Middle: each dot is an expert of a layer. Receivers drop what lies above the capacity, `1 - factor / load`, less what
# senders have dropped before. Right: drops by layer.

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
steps = data["steps"]
shades = [plt.cm.plasma(0.85 * place / max(len(steps) - 1, 1)) for place in range(len(steps))]
factor = run["receiver_factor"]
for one, colour in zip(steps, shades, strict=True):
    counts_NPE = np.array(one["counts_NPE"])
    load = counts_NPE[:, 0] / counts_NPE[:, 0].mean(axis=1, keepdims=True)
    share = 100 * (np.arange(load.size) + 0.5) / load.size
    first_or_last = one in (steps[0], steps[-1])
    left.plot(share, np.sort(load, axis=None)[::-1], color=colour, label=f"step {one['step']}")
    if first_or_last:
        receiver = 100 * counts_NPE[:, 2] / counts_NPE[:, 0]
        middle.plot(load.ravel(), receiver.ravel(), ".", ms=5, color=colour, label=f"step {one['step']}")
left.axhline(factor, color="black", ls="--", lw=1)
left.text(99, factor, f"capacity {factor:g}", va="bottom", ha="right")
left.set(title="load of experts, sorted", xlabel="% of experts of all layers", ylabel="load / balanced load")
left.legend()
load = np.linspace(factor, middle.get_xlim()[1], 50)
middle.plot(load, 100 * (1 - factor / load), color="black", lw=1, label=f"1 - {factor:g} / load")
middle.set(title="experts: load and receiver drops", xlabel="load / balanced load", ylabel="dropped by receiver, %")
middle.legend()
width = 0.8 / len(steps)
for place, (one, colour) in enumerate(zip(steps, shades, strict=True)):
    by_layer = staged(np.array(one["counts_NPE"]).sum(axis=2))
    x = np.arange(len(by_layer)) + (place - (len(steps) - 1) / 2) * width
    right.bar(x, by_layer[:, 0], 0.9 * width, color=colour, label=f"step {one['step']}")
    right.bar(x, by_layer[:, 1], 0.9 * width, bottom=by_layer[:, 0], color=colour, alpha=0.45)
right.set(title="by layer: sender (dark), receiver (light)", xlabel="layer", ylabel="dropped, % of assignments")
right.set_xticks(range(run["layers"]))
right.legend()
right.grid(axis="x", visible=False)
show(figure)

# %% [markdown]
# ## 3. Policy and factor
# Sender = receiver factor, second half of training. The orders drop nearly alike, so one line stands for them in the
# first two pictures; they differ in the weight that is lost. Equal factors do not mean equal bytes (pre-mix sends rows
# once more, ragged sends those that exist): in the middle, the bytes that leave a GPU in a forward pass, with rows of
# 3072 bfloat16. Rows of experts, which a larger receiver factor adds, are not in them.

# %%
STYLES = {
    "position order": ("tab:blue", "-", "o"),
    "weight order": ("tab:blue", ":", "x"),
    "pooled receive": ("tab:green", "-", "s"),
    "pre-mix 4": ("tab:purple", "-", "^"),
    "pre-mix 4, pooled receive": ("tab:red", "-", "D"),
    "fixed cells": ("tab:gray", "-", "v"),
    "ragged, round robin": ("black", "-", "*"),
}
LABELS = {"position order": "pooled wave, position order", "ragged, round robin": "ragged, any agreement"}


def curve_of(policy, key="factors"):
    """(factors, counts [factor][step][stage], lost weight by stage from 0 to 1, bytes) of one policy."""
    rows = [row for row in data[key] if row["policy"] == policy]
    return [np.array([row[name] for row in rows]) for name in ("factor", "counts_UP", "lost_weight", "forward_bytes")]


unit = curve_of("position order")[3][0]
figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), sharey=True)
for policy, (colour, line, marker) in STYLES.items():
    factor, counts, lost, sent = curve_of(policy)
    look = dict(color=colour, ls=line, marker=marker, ms=5, label=LABELS.get(policy, policy))
    if policy != "weight order":  # drops like the other orders
        axes[0].plot(factor, percent(counts.sum(axis=1)), **look)
        axes[1].plot(sent / unit, percent(counts.sum(axis=1)), **look)
    axes[2].plot(factor, 100 * lost.sum(axis=1), **look)
early = curve_of("position order", "factors_of_first_step")
axes[0].plot(early[0], percent(early[1].sum(axis=1)), color="tab:blue", ls="--", lw=1)
axes[0].text(early[0][7], 0.45 * percent(early[1].sum(axis=1))[7], f"in step {steps[0]['step']}", color="tab:blue")
axes[0].set(title="dropped", xlabel="sender = receiver factor")
axes[1].set(title="the same by bytes sent", xlabel="bytes, of pooled wave at 1.0")
axes[2].set(title="lost combine weight", xlabel="sender = receiver factor")
log_percent(axes[0], 0.01, 20)
axes[0].set_ylabel("% of assignments, or of weight")
figure.legend(*axes[2].get_legend_handles_labels(), loc="outside lower center", ncol=4)
show(figure)

print(f"at {at}, steps {', '.join(map(str, data['settled_steps']))} (lowest and highest step in brackets)")
print(f"{'':28}{'dropped %':>22}{'sender':>8}{'receiver':>10}{'lost weight':>13}{'bytes':>7}")
for policy in data["who_pays"]:
    factor, counts, lost, sent = curve_of(policy)
    place = int(np.argmin(abs(factor - run["sender_factor"])))
    total, by_step = percent(counts[place].sum(axis=0)), percent(counts[place])
    sender, receiver = staged(counts[place].sum(axis=0))
    spread = f"({by_step.min():.3f} - {by_step.max():.3f})"
    cells = f"{sender:8.3f}{receiver:10.3f}{100 * lost[place].sum():13.3f}{sent[place] / unit:7.2f}"
    print(f"{policy:28}{total:7.3f} {spread}{cells}")

# %% [markdown]
# ## 4. Which of the two factors, and does replay foretell training?
# Left: the policy of the run at pairs of factors, replayed. Right: each mark is a run that was trained with other
# factors, in a step that was recorded here: what it logged against what replaying this run's routing with its factors
# drops. Routers that were trained apart differ, most of all early; on the line, replay was right.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4))
pairs = data["pairs"]
table = percent(pairs["counts_IJP"])
left.imshow(np.log(table), cmap="YlOrRd", origin="lower")
for (i, j), value in np.ndenumerate(table):
    left.text(j, i, f"{value:.2g}", ha="center", va="center", color="white" if value > 4 else "black")
left.set_xticks(range(len(pairs["receivers"])), pairs["receivers"])
left.set_yticks(range(len(pairs["senders"])), pairs["senders"])
left.set(xlabel="receiver factor", ylabel="sender factor", title="dropped, % of assignments")
left.grid(visible=False)
found = data["replayed_and_trained"]
for step, marker in zip(sorted({one["step"] for one in found}), "xos", strict=False):
    of_step = [one for one in found if one["step"] == step]
    x, y = [percent(one["replayed"]) for one in of_step], [100 * sum(one["trained"]) for one in of_step]
    colour = shades[[one["step"] for one in steps].index(step)]
    right.loglog(x, y, marker, color=colour, ms=5, label=f"step {step}")
right.plot([0.005, 30], [0.005, 30], color="black", lw=1)
right.set(xlim=(0.005, 30), ylim=(0.005, 30), aspect="equal", title="trained and replayed, both stages")
right.set(xlabel="replayed from this run, % dropped", ylabel="logged by the run trained so, % dropped")
right.xaxis.set_major_formatter("{x:g}")
right.yaxis.set_major_formatter("{x:g}")
if found:
    right.legend()
show(figure)

# %% [markdown]
# ## 5. Who pays
# Nearly the same number of drops, dealt out differently: `sequence` makes the last rows of a shard pay, `position` the
# last columns of every row; `choice` and `weight` drop what matters least, but look at later tokens to do so. Right:
# documents sorted by what they lose.

# %%
ORDERS = {
    "sequence order": ("tab:red", "-"),
    "position order": ("tab:blue", "-"),
    "choice order": ("tab:green", "--"),
    "weight order": ("tab:purple", ":"),
}
figure, axes = plt.subplots(1, 3, figsize=(13, 4))
bins = len(data["who_pays"]["position order"]["column"][0])
columns = (np.arange(bins) + 0.5) * run["sequence_length"] / bins
for policy, (colour, line) in ORDERS.items():
    pays = {scope: np.array(counts) for scope, counts in data["who_pays"][policy].items()}
    look = dict(color=colour, ls=line, lw=2, label=policy)
    axes[0].plot(columns, percent(pays["column"], axis=0), marker=".", **look)
    axes[1].plot(range(run["rows"]), percent(pays["place"], axis=0), marker="o", **look)
    order = np.argsort(percent(pays["document"], axis=0))[::-1]
    valid = pays["document"][0][order]
    share = 100 * (np.cumsum(valid) - valid / 2) / valid.sum()
    axes[2].plot(share, percent(pays["document"], axis=0)[order], **look)
axes[0].set(title="by column of the packed row", xlabel="column", ylabel="dropped, % of assignments")
axes[1].set(title="by packed row of the shard", xlabel="row of the shard, in flat order", xticks=range(run["rows"]))
axes[2].set(title="by document, worst first", xlabel="% of all documents, by their assignments", xlim=(0, 100))
for axis in axes:
    axis.set_ylim(bottom=0)
axes[0].legend()
show(figure)

# %% [markdown]
# ## 6. Sequence length and shards, at a fixed number of tokens
# Left: the recorded routing itself, cut into pieces and dealt to the shards at random: every token keeps its experts,
# only who meets whom changes; bands span the lowest and highest step. Middle: held-out rows of other lengths through
# the trained model, whose balancing knows only the longest (two batches, a dot each). Right: other ep sizes; of
# training, the same tokens dealt to more or fewer shards; held out, as many rows a shard as recorded, so that more
# shards are more tokens (batches joined).

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
pieces = [one["columns"] for one in data["pieces"]]
for stage, (end, colour) in enumerate((("sender", SENDER), ("receiver", RECEIVER))):
    by_step = staged([one["counts_UP"] for one in data["pieces"]])[..., stage]
    pooled = staged(np.sum([one["counts_UP"] for one in data["pieces"]], axis=1))[:, stage]
    left.fill_between(pieces, by_step.min(axis=1), by_step.max(axis=1), color=colour, alpha=0.2, lw=0)
    left.plot(pieces, pooled, "o-", color=colour, label=end)
    lengths = [one["columns"] for one in data["evaluations"]]
    batches = staged([one["counts_UP"] for one in data["evaluations"]])[..., stage]
    middle.plot(lengths, batches, ".", color=colour)
    middle.plot(lengths, batches.mean(axis=1), "-", color=colour, label=end)
    middle.set_xticks(lengths, lengths)
left.set(title="same routing, cut into pieces", xlabel="tokens of a piece", ylabel="dropped, % of assignments")
middle.set(title="held-out rows of other lengths", xlabel="columns of a packed row", xscale="log")
left.set(xscale="log", ylim=(0, None))
left.set_xticks(pieces, pieces)
middle.set_xticks(lengths, lengths)
for axis in (left, middle):
    axis.minorticks_off()
    axis.legend()
middle.set_ylim(bottom=0)
shards = data["shards"]
both = staged([one["counts"] for one in shards])
x = np.arange(len(shards)) + 0.6 * np.array([one["trace"] != "training" for one in shards])
right.bar(x, both[:, 0], color=SENDER, label="sender")
right.bar(x, both[:, 1], bottom=both[:, 0], color=RECEIVER, label="receiver")
right.set_xticks(x, [f"{one['shards']} x {one['rows']}" for one in shards])
for name in dict.fromkeys(one["trace"] for one in shards):
    of_trace = np.array([one["trace"] == name for one in shards])
    right.text(x[of_trace].mean(), both[of_trace].sum(axis=1).max() + 0.2, name, ha="center")
right.set(title="other ep sizes", xlabel="shards x packed rows of a shard")
right.set_ylim(0, 1.15 * both.sum(axis=1).max())
right.legend(loc="upper right")
right.grid(axis="x", visible=False)
show(figure)

# %% [markdown]
# ## Verdict
# The numbers are computed from the file, the words between them were written for the committed one.


# %%
def pooled(rows):
    """Drops by stage of each row, %, its steps or batches summed."""
    return staged(np.sum([row["counts_UP"] for row in rows], axis=1))


def at_factor(policy, factor):
    """(% dropped by stage, % of weight lost) at a replayed factor."""
    factors, counts, lost, _ = curve_of(policy)
    place = np.argmin(abs(factors - factor))
    return staged(counts[place].sum(axis=0)), 100 * lost[place].sum()


def factor_under(policy, target):
    """The smallest replayed factor with which a policy drops less than the target, %."""
    factors, counts, _, _ = curve_of(policy)
    good = factors[percent(counts.sum(axis=1)) < target]
    return f"{good[0]:g}" if len(good) else f"above {factors[-1]:g}"


def for_bytes(policy, budget):
    """% dropped for so many bytes; between replayed factors, straight in the logarithm."""
    _, counts, _, sent = curve_of(policy)
    total = percent(counts.sum(axis=1))
    return np.exp(np.interp(budget, sent[total > 0], np.log(total[total > 0])))


def listed(values, digits=1):
    """Numbers as a list for people."""
    return ", ".join(f"{value:.{digits}f}" for value in values)


first, last = steps[0]["step"], steps[-1]["step"]
by_step = staged([np.array(one["counts_NPE"]).sum(axis=(0, 2)) for one in steps])
step_1 = 100 * (curve["drop_rate_sender"][0] + curve["drop_rate_receiver"][0])
loads = [np.array(one["counts_NPE"])[:, 0] for one in (steps[0], steps[-1])]
over = [100 * np.mean(load > run["receiver_factor"] * load.mean(axis=1, keepdims=True)) for load in loads]
piece = dict(zip(pieces, pooled(data["pieces"]), strict=True))
whole, third = max(pieces), sorted(pieces)[-3:]
held_out = pooled(data["evaluations"])
little = data["little_context"]
crowding = [100 * little[name] for name in ("overload_of_first", "overload_at_random")]
on_shards = {one["shards"]: staged(one["counts"])[0] for one in shards if one["trace"] == "training"}
column, row = ({p: percent(data["who_pays"][p][scope], axis=0) for p in ORDERS} for scope in ("column", "place"))
trained, trained_lost = at_factor("position order", run["sender_factor"])
weight_lost = at_factor("weight order", run["sender_factor"])[1]
factors, _, _, sent = curve_of("position order")
budget = np.interp(1.25, factors, sent)
rate = {p: for_bytes(p, budget) for p in ("position order", "pooled receive", "pre-mix 4", "pre-mix 4, pooled receive")}
needed = "; ".join(f"{LABELS.get(p, p)} {factor_under(p, 0.5)}" for p in STYLES if p != "weight order")
published = staged(pairs["published_counts"])
errors = {}
for one in found:
    errors.setdefault(one["step"], []).append(percent(one["replayed"]) - 100 * sum(one["trained"]))
worst = [np.abs(of_step).max() for of_step in errors.values()]
spread = percent(curve_of("position order")[1][np.argmin(abs(factors - run["sender_factor"]))])

verdict = [
    f"Exact. A replay equals what the run counted, to the unit, in {sum(agree)} of {len(agree)} recorded steps.",
    f"Balancing is most of it. At {at}, {step_1:.0f} % dropped in step 1, {by_step[0].sum():.1f} % in step {first}, "
    f"{by_step[-1].sum():.1f} % in step {last}; from {first} to {last}, receivers went from {by_step[0, 1]:.1f} to "
    f"{by_step[-1, 1]:.1f} %, senders from {by_step[0, 0]:.1f} to {by_step[-1, 0]:.1f} %. {over[0]:.0f} % of the "
    f"experts were over capacity, then {over[1]:.0f} %. Uniformly random routing of these sizes drops "
    f"{percent(data['uniform']):.2g} %.",
    "Two causes. Receivers drop because some experts are popular with all shards, senders because the tokens of a "
    f"sequence want the same experts: dealt out token by token, the same routing drops {piece[1][0]:.2f} % at senders "
    f"instead of {piece[whole][0]:.2f} %, but still {piece[1][1]:.2f} % (instead of {piece[whole][1]:.2f} %) at "
    "receivers.",
    f"Longer sequences drop more at senders, as published: {listed([piece[n][0] for n in third], 2)} % with pieces of "
    f"{listed(third, 0)} tokens. The trained model on held-out rows of {listed(lengths, 0)} columns drops more of the "
    f"longer ones at senders ({listed(held_out[:, 0])} %), but not in all ({listed(held_out.sum(axis=1))} %): of the "
    f"shortest rows, receivers drop more. Its balancing was fitted to rows of {run['sequence_length']}, and tokens "
    f"with little context crowd together: in those rows, the first {little['first_columns']} columns put "
    f"{crowding[0]:.1f} % of their assignments above capacity, as many tokens at random {crowding[1]:.1f} %. A "
    "training run per length would settle it; none was made.",
    f"More shards with fewer rows each drop more at senders: {listed(on_shards.values())} % on {listed(on_shards, 0)} "
    "shards that share the same tokens.",
    f"Both factors count. {table[0, 0]:.1f} % drop at {pairs['senders'][0]} / {pairs['receivers'][0]}; raising the "
    f"sender's alone to {pairs['senders'][-1]} leaves {table[-1, 0]:.1f} %, the receiver's alone {table[0, -1]:.1f} "
    f"%, both {table[-1, -1]:.1f} %. Published: 2.4 % at 1.05 / 1.33 and, in production, 3.4 % at 1.15 / 1.15, almost "
    f"all at senders. This small model: {published.sum():.1f} % ({published[0]:.1f} at senders) and "
    f"{trained.sum():.1f} % ({trained[0]:.1f} at senders).",
    f"Policies. The smallest replayed factor for under 0.5 %: {needed}. For the bytes of pooled wave at 1.25: "
    f"position order {rate['position order']:.2f} %, pooled receive {rate['pooled receive']:.2f} %, pre-mix 4 "
    f"{rate['pre-mix 4']:.2f} %, both {rate['pre-mix 4, pooled receive']:.2f} %. Pre-mix earns its bytes only "
    "together with pooled receive (LOG.md has a case with more and shorter rows a shard, where it does not even "
    "then), and neither is causal, nor is ragged.",
    f"Who pays. Sequence order takes {row['sequence order'][-1]:.1f} % of the last row of a shard and "
    f"{row['sequence order'][0]:.1f} % of the first; position order {column['position order'][-1]:.0f} % of the last "
    f"{run['sequence_length'] // bins} columns and at most {column['position order'][: bins // 2].max():.2f} % "
    f"anywhere in the first half of the columns. Weight order treats both alike and loses {weight_lost:.1f} % of the "
    f"combine weight instead of {trained_lost:.1f} %, but is not causal.",
    f"Weak points. One model of {run['parameters'] / 1e6:.0f} M parameters, one seed, {len(spread)} late training "
    f"steps (totals from {spread.min():.1f} to {spread.max():.1f} %) and two held-out batches a length, from a few "
    f"dozen documents; emulated shards of {run['rows']} rows. Trust factors of two, not third digits.",
]
if errors:
    verdict.insert(
        -1,
        f"Replay foretells. It is off by at most {listed(worst)} points in steps {listed(errors, 0)} of the "
        f"{len(data['curves_of_factors'])} runs trained with other factors; on average, replayed minus trained is "
        f"{listed(map(np.mean, errors.values()), 2)}. Early, routers that were trained apart differ most.",
    )
print("\n\n".join(textwrap.fill(text, 110, initial_indent="* ", subsequent_indent="  ") for text in verdict))
