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
# # Capacity frontier: which factors for which drop rate, and what do they cost?
#
# `pooled_wave` has two knobs. The **sender factor** sizes the slots that a shard has for each destination, the
# **receiver factor** the rows that an expert has for all sources, both as multiples of the balanced load. Too small,
# and assignments are dropped; too large, and the slack is moved and multiplied for nothing.
#
# What to look at:
#
# 1. *Drops*: each stage's drops fall with its own factor as the tail of a bell curve does. Its width is the unevenness
#    of the load, and says where the knee is.
# 2. *Price*: layer time and memory against each factor. One of them is much dearer, and why is arithmetic.
# 3. *Loss*: what drops cost a model that is evaluated with them, and one that was only trained with them.
# 4. *Frontier* and *verdict*: the cheapest pair of factors for a drop rate.

# %% [markdown]
# Result files, and what makes them again. The trainings (250 steps of `configs/ladder/ep_d192.toml`: 96 experts, top-8,
# 16 emulated shards of 4 rows of 512 tokens; one seed) shared GPUs, so **their speeds mean nothing** and are not shown;
# times are of one MoE layer at shape B (8,192 tokens a GPU, 128 experts, top-8, 3072 x 3072) on two H200 alone.
#
# ```
# XLA_CLIENT_MEM_FRACTION=.15 python -m tools.sweep configs/sweeps/capacity_ep16.toml --jobs 6
# python experiments/collect.py runs/sweeps/capacity_ep16/sender_factor=* --points 30 \
#     --out experiments/results/capacity_ep16.json
# python -m tools.bench layer --shapes B --sender 1,1.15,1.5 --receiver 1.15 --out a.json
# python -m tools.bench layer --shapes B --sender 1.15 --receiver 1,1.33,1.5 --out b.json
# ```
#
# The results of the last two in one list are `benchmarks/layer_factors_h200x2_20261130.json`.
# `experiments/results/ladder.json` (see `ep_vs_fsdp`) is read for its two seeds per model.

# %%
import importlib.util
import io
import json
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import PIL.Image
from IPython.display import Image, Markdown, display


def read(name):
    """A result file of the checkout above this file, above the working directory, or that ep_jax is installed from."""
    spec = importlib.util.find_spec("ep_jax")
    for start in (globals().get("__file__", "."), ".", spec.origin if spec else "."):
        for folder in (Path(start).resolve(), *Path(start).resolve().parents):
            if (folder / name).is_file():
                return json.loads((folder / name).read_text())
    raise FileNotFoundError(f"{name}: run this notebook inside a checkout")


def show(figure):
    """Displays a figure as a PNG of 128 colours: a third of the usual bytes, which go into git."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn)
    PIL.Image.open(drawn).convert("RGB").quantize(128, dither=PIL.Image.Dither.NONE).save(small, "png", optimize=True)
    plt.close(figure)
    display(Image(small.getvalue()))


plt.rcParams |= {"figure.dpi": 100, "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3}
trainings = read("experiments/results/capacity_ep16.json")["runs"]
layers = read("benchmarks/layer_factors_h200x2_20261130.json")["results"]
ladder = read("experiments/results/ladder.json")["runs"]


def training_row(run):
    dropless, as_trained = (run["summary"][f"held_out_{name}"] for name in ("dropless", "as_trained"))
    drops = np.add(run["curves"]["drop_rate_sender"], run["curves"]["drop_rate_receiver"])
    step = run["curves"]["step"]
    return {
        "sender": run["settings"]["ep.sender_factor"],
        "receiver": run["settings"]["ep.receiver_factor"],
        "sender drops %": 100 * as_trained["drop_rate_sender"],
        "receiver drops %": 100 * as_trained["drop_rate_receiver"],
        "drops %": 100 * as_trained["drop_rate"],
        "training drops %": 100 * np.trapezoid(drops, step) / (step[-1] - step[0]),
        "dropless loss": dropless["cross_entropy"],
        "loss as trained": as_trained["cross_entropy"],
    }


runs = pd.DataFrame([training_row(run) for run in trainings]).sort_values(["sender", "receiver"], ignore_index=True)
factors = sorted(runs["sender"].unique())
display(runs.round(4))

# %% [markdown]
# ## 1. Drops
#
# Held-out text, the router's bias as trained, the capacity of the training. If the load of a pool, over its mean, were
# normal with standard deviation s, the rate dropped at factor c would be E[(load - c)+]; at c = 1 that is s/√(2π). The
# dashed curve takes s from the point at factor 1 where the other stage is widest: all its other values are predictions.
# Points at 0.001 % are that or less.


# %%
def overflow(factor, spread):
    """Share of assignments above `factor` times the mean load, for normal loads of that relative spread."""
    z = (np.asarray(factor) - 1) / spread
    tail = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in np.atleast_1d(z)])
    return spread * (np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) - z * tail)


STAGES = ("sender", "receiver")
spread = {}
figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), width_ratios=(1, 1, 0.95))
for axis, stage, other in zip(axes, STAGES, reversed(STAGES), strict=False):
    for color, value in zip(plt.cm.viridis(np.linspace(0.1, 0.85, len(factors))), factors, strict=True):
        line = runs[runs[other] == value]
        axis.plot(line[stage], line[f"{stage} drops %"].clip(lower=1e-3), "o-", color=color, label=f"{value:g}")
    widest = runs[(runs[stage] == 1) & (runs[other] == max(factors))]
    spread[stage] = math.sqrt(2 * math.pi) * widest[f"{stage} drops %"].item() / 100
    grid = np.linspace(1, 1.5, 101)
    axis.plot(grid, 100 * overflow(grid, spread[stage]), "k--", lw=1, label=f"normal, sd {spread[stage]:.0%}")
    axis.set(yscale="log", ylim=(8e-4, 12), xlabel=f"{stage} factor", ylabel="dropped, % of assignments")
    axis.set_title(f"dropped by the {stage}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(title=f"{other} factor", fontsize=8, title_fontsize=8, loc="lower left")
table = runs.pivot(index="sender", columns="receiver", values="drops %")
axes[2].imshow(np.log(table), cmap="YlOrRd", aspect="auto", origin="lower")
for (row, column), value in np.ndenumerate(table.to_numpy()):
    axes[2].text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 4 else "black")
axes[2].set(xticks=range(len(factors)), yticks=range(len(factors)), xlabel="receiver factor", ylabel="sender factor")
axes[2].set(xticklabels=factors, yticklabels=factors, title="dropped by both, %")
axes[2].grid(False)
show(figure)

# %% [markdown]
# The training's own drops: balancing has to converge first, so no factor of this grid saves the first steps.

# %%
figure, axis = plt.subplots(figsize=(7, 3.4))
for run, row in zip(trainings, map(training_row, trainings), strict=True):
    if row["sender"] == row["receiver"]:
        curve = run["curves"]
        total = 100 * np.add(curve["drop_rate_sender"], curve["drop_rate_receiver"])
        axis.plot(curve["step"], total, "o-", ms=3, label=f"{row['sender']:g} / {row['receiver']:g}")
axis.set(yscale="log", xlabel="step", ylabel="dropped in the step, %", title="drops while training")
axis.yaxis.set_major_formatter("{x:g}")
axis.legend(title="sender / receiver factor", fontsize=8, title_fontsize=8)
show(figure)

# %% [markdown]
# ## 2. Price
#
# One layer, forward and backward. Dots are medians of 20 calls (bars: 10th to 90th percentile, mostly smaller than the
# dot); columns are kernel time by kind. Kernels that run side by side count twice, so columns reach above the dots.

# %%
KINDS = {"matmul": "#4c72b0", "exchange": "#dd8452", "copy": "#8c8c8c", "elementwise": "#c9c9c9"}
TITLES = {"matmul": "expert products", "exchange": "all-to-all", "copy": "packing and copies", "elementwise": "rest"}


def axis_of(stage):
    """Benchmarks along one factor, the other at 1.15, in order."""
    other = "receiver" if stage == "sender" else "sender"
    chosen = [row for row in layers if row["settings"][f"{other}_factor"] == 1.15]
    return sorted(chosen, key=lambda row: row["settings"][f"{stage}_factor"])


def line_of(stage, value):
    """(factors, values, slope per unit of factor) along one factor."""
    x = [row["settings"][f"{stage}_factor"] for row in axis_of(stage)]
    y = [value(row) for row in axis_of(stage)]
    return x, y, np.polyfit(x, y, 1)[0]


def kernels(kind):
    return lambda row: row["forward_backward"]["by_kind_ms"].get(kind, 0.0)


def median(row):
    return row["forward_backward"]["median_ms"]


def memory(row):
    return row["temporary_gib"]


figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), width_ratios=(1, 1.25, 1))
for axis, stage in zip(axes, STAGES, strict=False):
    rows, x = axis_of(stage), line_of(stage, median)[0]
    places, base = np.arange(len(x)), np.zeros(len(x))
    for kind, color in KINDS.items():
        heights = np.array([kernels(kind)(row) for row in rows])
        axis.bar(places, heights, 0.55, bottom=base, color=color, label=TITLES[kind])
        for place, height, low in zip(places, heights, base, strict=True):
            axis.text(place, low + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=8)
        base += heights
    both = [row["forward_backward"] for row in rows]
    errors = np.array([[t["median_ms"] - t["p10_ms"], t["p90_ms"] - t["median_ms"]] for t in both]).T
    axis.errorbar(places + 0.38, list(map(median, rows)), errors, fmt="ko", label="layer, median")
    axis.set(xticks=places, xticklabels=[f"{value:g}" for value in x], xlabel=f"{stage} factor", ylim=(0, 40))
    axis.set(ylabel="ms, forward + backward", title=f"time against the {stage} factor")
    axis.grid(False)
axes[0].legend(fontsize=8, loc="upper left", ncols=2)
for stage, marker in zip(STAGES, "os", strict=True):
    x, y, slope = line_of(stage, memory)
    axes[2].plot(x, y, f"{marker}-", label=f"{stage} factor: {slope:.2f} GiB per unit")
axes[2].set(xlabel="factor (the other at 1.15)", ylabel="temporary memory, GiB a GPU", ylim=(0, 4.2), title="memory")
axes[2].legend(fontsize=8, loc="lower left")
show(figure)

# %% [markdown]
# The receiver factor costs in proportion: every row that an expert could take is multiplied, filled or not. The sender
# factor shows in the all-to-all, but the layer as a whole does not follow it, because the kernel that packs the payload
# is not the same at every size. So the price of the sender factor is taken from the all-to-all kernels alone, and the
# price of the receiver factor from the layer's median. That is on the safe side for the sender.
#
# **Why**: a unit of either factor is the same number of rows (T·K a GPU). A receiver row is multiplied by three H x F
# matrices, forward and backward: 18·H·F FLOP. A sender row crosses the link four times in bfloat16: 8·H bytes, of which
# (S-1)/S leave the GPU. H cancels, so which is dearer depends on the expert's hidden width F and the two rates alone.

# %%
ROWS, H, F = 8192 * 8, 3072, 3072  # shape B of tools/bench/shapes.py
rates = layers[0]["ceilings"]
matmul_flops, link_bytes = 1e12 * rates["matmul_tflops"], 1e9 * rates["link_gb_per_s"]


def prices_ms(width, shards):
    """(receiver, sender) ms of one unit of factor at the machine's measured rates, forward and backward."""
    return 1e3 * ROWS * 18 * H * width / matmul_flops, 1e3 * ROWS * 8 * H * (shards - 1) / shards / link_bytes


receiver_ms, exchange_ms = line_of("receiver", median)[2], line_of("sender", kernels("exchange"))[2]
receiver_gib, sender_gib = line_of("receiver", memory)[2], line_of("sender", memory)[2]
even_F = {S: F * prices_ms(F, S)[1] / prices_ms(F, S)[0] for S in (2, 64)}
prices = [
    {"case": f"F = {width}, {S} shards", "receiver ms": prices_ms(width, S)[0], "sender ms": prices_ms(width, S)[1]}
    for width, S in ((F, 2), (F, 64), (1024, 64), (96, 16))
]
prices = pd.DataFrame(prices).assign(**{"receiver / sender": lambda t: t["receiver ms"] / t["sender ms"]})
display(Markdown("Computed price of one unit of factor at shape B's rows, link and products at their measured rates:"))
display(prices.round(2))
display(
    Markdown(
        f"Measured at F = {F}, 2 shards: receiver {receiver_ms:.1f} ms a unit, sender {exchange_ms:.1f} ms "
        f"(all-to-all kernels). Both cost the same at F = {even_F[2]:,.0f} with 2 shards and at F = {even_F[64]:,.0f} "
        "with 64: experts narrower than that make sender slack the dearer one."
    )
)

# %% [markdown]
# ## 3. Loss
#
# Two different costs. *Evaluated with drops*: the same model, the same text, with its capacity and without; a paired
# difference, nearly free of noise. *Trained with drops*: dropless loss of models that were trained under different
# factors; as noisy as trainings are. Two measures of that noise: the ladder's pairs of seeds (which also change the
# data's order and the initial weights, which these 16 runs share: an upper bound), and the scatter of the 16 runs
# around a straight line (a lower bound, and only one seed).

# %%
pairs = pd.DataFrame([run["name"].rsplit("_s", 1) for run in ladder], columns=["model", "seed"])
pairs["loss"] = [run["summary"]["held_out_dropless"]["cross_entropy"] for run in ladder]
seed_sd = math.sqrt(pairs.groupby("model")["loss"].var().mean())

gap = runs["loss as trained"] - runs["dropless loss"]
gap_slope = (gap * runs["drops %"]).sum() / (runs["drops %"] ** 2).sum()  # nats a percent, through 0
(slope, level), covariance = np.polyfit(runs["training drops %"], runs["dropless loss"], 1, cov=True)
slope_error = math.sqrt(covariance[0, 0])
scatter = np.std(runs["dropless loss"] - level - slope * runs["training drops %"], ddof=2)

figure, axes = plt.subplots(1, 2, figsize=(11, 3.7))
axes[0].scatter(runs["drops %"], 1e3 * gap, color="#c44e52")
x = np.array([0, runs["drops %"].max()])
axes[0].plot(x, 1e3 * gap_slope * x, "k--", lw=1, label=f"{1e3 * gap_slope:.2f} millinats per % dropped")
axes[0].set(xlabel="dropped in the evaluation, %", ylabel="millinats per byte")
axes[0].set_title("evaluated with drops: as trained minus dropless")
axes[0].legend(loc="upper left")
axes[1].scatter(runs["training drops %"], runs["dropless loss"], color="#4c72b0")
x = np.array([runs["training drops %"].min(), runs["training drops %"].max()])
axes[1].plot(x, level + slope * x, "k--", lw=1, label=f"{1e3 * slope:.2f} ± {1e3 * slope_error:.2f} millinats per %")
axes[1].errorbar(
    [14], [runs["dropless loss"].mean()], [seed_sd], color="0.4", capsize=5, label="± one sd of seeds (ladder)"
)
axes[1].set(xlabel="dropped in training, mean of all steps, %", ylabel="held-out loss, nats per byte")
axes[1].set_title("trained with drops, evaluated dropless")
axes[1].legend(loc="upper left", fontsize=8)
show(figure)

# %% [markdown]
# ## 4. Frontier
#
# Layer time of any pair = measured line of the receiver factor + price of the sender factor: times of shape B on two
# GPUs put beside drops of a small model on 16 emulated shards. The line joins the
# pairs that are worth their price (its lower convex hull). The knee is where that price, in ms per percent of drops
# removed, jumps most.

# %%
x, y, _ = line_of("receiver", median)
runs["ms"] = np.polyval(np.polyfit(x, y, 1), runs["receiver"]) + exchange_ms * (runs["sender"] - 1.15)
x, y, _ = line_of("receiver", memory)
runs["GiB"] = np.polyval(np.polyfit(x, y, 1), runs["receiver"]) + sender_gib * (runs["sender"] - 1.15)


def price(a, b):
    """ms per percent of drops removed between two pairs."""
    return (b["ms"] - a["ms"]) / (a["drops %"] - b["drops %"])


front = []
for _, pair in runs.sort_values(["ms", "drops %"]).iterrows():
    if front and pair["drops %"] >= front[-1]["drops %"]:
        continue
    while len(front) > 1 and price(front[-2], front[-1]) > price(front[-1], pair):
        front.pop()
    front.append(pair)
front = pd.DataFrame(front)
front["ms per % removed"] = [np.nan, *(price(front.iloc[i], front.iloc[i + 1]) for i in range(len(front) - 1))]
jumps = front["ms per % removed"].shift(-1) / front["ms per % removed"]
knee = front.loc[jumps.idxmax()]

figure, axis = plt.subplots(figsize=(8.5, 5.2))
points = axis.scatter(runs["ms"], runs["drops %"], c=runs["GiB"], cmap="plasma_r", edgecolor="k", s=45, zorder=3)
figure.colorbar(points, label="temporary memory, GiB a GPU")
axis.plot(front["ms"], front["drops %"], "k-", lw=1)
axis.plot(knee["ms"], knee["drops %"], "o", ms=15, mfc="none", mec="k", label="knee")
for place, pair in runs.iterrows():
    style = dict(ha="right", va="top", weight="bold", xytext=(-7, -2)) if place in front.index else dict(xytext=(6, 4))
    label = f"{pair['sender']:g} / {pair['receiver']:g}"
    axis.annotate(label, (pair["ms"], pair["drops %"]), textcoords="offset points", fontsize=8, **style)
axis.set(xlabel="layer, forward + backward, ms", ylabel="dropped, % of assignments", ylim=(-0.6, 8.7))
axis.set(title="sender / receiver factor: drops against layer time", xlim=(20.5, 30))
axis.legend(loc="upper right")
show(figure)
columns = ["sender", "receiver", "drops %", "ms", "GiB", "ms per % removed", "loss as trained", "dropless loss"]
display(front[columns].round(4).reset_index(drop=True))

# %% [markdown]
# ## Verdict

# %%
tight = runs[(runs["sender"] == 1) & (runs["receiver"] == 1)].iloc[0]
lines = [
    "| drops under | sender / receiver | dropped | layer time | throughput | memory | as trained - dropless |",
    "|---|---|---|---|---|---|---|",
]
for target in (5, 2, 1, 0.5, 0.1):
    enough = runs[runs["drops %"] < target].sort_values("ms")
    if enough.empty:
        lines.append(f"| {target:g} % | none of the grid | | | | | |")
        continue
    best = enough.iloc[0]
    lines.append(
        f"| {target:g} % | **{best['sender']:g} / {best['receiver']:g}** | {best['drops %']:.2f} % "
        f"| {best['ms'] - tight['ms']:+.1f} ms ({best['ms'] / tight['ms'] - 1:+.0%}) "
        f"| {tight['ms'] / best['ms'] - 1:+.0%} "
        f"| {best['GiB'] - tight['GiB']:+.2f} GiB ({best['GiB'] / tight['GiB'] - 1:+.0%}) "
        f"| {1e3 * (best['loss as trained'] - best['dropless loss']):z.1f} millinats |"
    )
against = f"{tight['ms']:.1f} ms, {tight['GiB']:.2f} GiB, {tight['drops %']:.1f} % dropped"
display(Markdown(f"Cheapest pairs of the grid; time and memory against 1 / 1 ({against}):\n\n" + "\n".join(lines)))

before, after = front.loc[knee.name, "ms per % removed"], front["ms per % removed"].shift(-1)[knee.name]
cheaper = "sender" if exchange_ms < receiver_ms else "receiver"
ratio = max(receiver_ms, exchange_ms) / min(receiver_ms, exchange_ms)
medians, copies = line_of("sender", median)[1], line_of("sender", kernels("copy"))[1]
rises = "rises with it"
if np.any(np.diff(medians) <= 0):
    rises = "does not follow it, as the packing kernel's speed depends on the size: measure, do not interpolate"
cause = "Padded receiver rows are multiplied, padded sender rows only moved."
if cheaper == "receiver":
    cause = "That is against what rows cost by arithmetic: something else than slack decides."
tail = runs.loc[(runs["sender"] == 1.5) & (runs["receiver"] == 1.5), "sender drops %"].item()
normal_tail = 100 * overflow(1.5, spread["sender"])[0]
range_of_loss = runs["dropless loss"].max() - runs["dropless loss"].min()
certain = 2 * math.sqrt(2) * seed_sd
saved, dearer = slope * (tight["training drops %"] - knee["training drops %"]), knee["ms"] / tight["ms"]
shorter = [run["summary"] for run in ladder if run["name"].startswith("ladder_ep_d192")]  # the same model, two seeds
shorter_loss = np.mean([summary["held_out_dropless"]["cross_entropy"] for summary in shorter])
steps = shorter[0]["step"], trainings[0]["summary"]["step"]
learning = (shorter_loss - runs["dropless loss"].median()) / math.log(steps[1] / steps[0])
even = saved / math.log(dearer)
display(
    Markdown(f"""
* **The knee of this grid is at {knee["sender"]:g} / {knee["receiver"]:g}** ({knee["drops %"]:.2f} % dropped): until
  there a percent of drops is removed for up to {before:.1f} ms of layer time, beyond it for {after:.1f} ms. Why there:
  loads scatter by {spread["sender"]:.0%} (sender pools) and {spread["receiver"]:.0%} (experts) around their mean, and
  slack of one to two such standard deviations catches most of a bell curve. The real tail is
  {"fatter" if tail > normal_tail else "thinner"}: at sender factor 1.5 a normal one leaves {normal_tail:.4f} %, here
  {tail:.4f} % were dropped.
* **{cheaper.capitalize()} slack is the cheaper one, by {ratio:.0f} times**: a tenth of factor costs
  {exchange_ms / 10:.2f} ms and {sender_gib / 10:.2f} GiB at the sender, {receiver_ms / 10:.2f} ms and
  {receiver_gib / 10:.2f} GiB at the receiver. {cause} Computed for 64 shards, where nearly all rows leave the GPU, a
  receiver row costs {prices_ms(F, 64)[0] / prices_ms(F, 64)[1]:.1f} sender rows; experts narrower than
  {even_F[64]:,.0f} turn it round.
* **Layer time against the sender factor {rises}**: {", ".join(f"{value:.1f}" for value in medians)} ms, of which
  packing and copies {", ".join(f"{value:.1f}" for value in copies)} ms.
* **A percent of drops costs {1e3 * gap_slope:.1f} millinats per byte when the evaluation drops too**, and nothing of
  that when it is dropless.
* **Trained with drops, evaluated dropless**: {1e3 * slope:.2f} ± {1e3 * slope_error:.2f} millinats per percent of
  training drops: {"visible" if abs(slope) > 2 * slope_error else "not visible"} within this one seed (scatter
  {1e3 * scatter:.1f}). All 16 runs lie within {1e3 * range_of_loss:.1f} millinats; two runs of different seeds must be
  {1e3 * certain:.0f} apart (two standard deviations of a difference) to mean something. So single pairs
  {"differ" if range_of_loss > certain else "cannot be told apart"} by their dropless loss on this evidence.
* **Is the knee worth its price?** From 1 / 1 to the knee saves {1e3 * saved:.1f} millinats of dropless loss (by the
  line) for {dearer - 1:.0%} more layer time. Were the layers the whole step, that paid where an e-fold of tokens brings
  less than {1e3 * even:.0f} millinats; here, from {steps[0]} to {steps[1]} steps, it brings
  {1e3 * learning:.0f}. So in trainings as short as these, {"more tokens" if learning > even else "fewer drops"} are the
  better buy; a long training, where tokens bring little, has to ask again.
""")
)
