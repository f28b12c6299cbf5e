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
# # Wave schedules: unsplit, sequential, overlapped
#
# `ep.waves = W` cuts a layer's dispatch, experts and return into W waves. *Sequential* waves run one after the other,
# so buffers shrink with W. *Overlapped* waves are left to XLA's scheduler, so that one wave's all-to-all can run beside
# another's matrix products. *Unsplit* is W = 1. Does overlapping pay for what splitting costs?
#
# What to look at:
#
# 1. *Layer time*: overlapped against sequential is the gain of overlapping; overlapped against the unsplit line is the
#    one that counts.
# 2. *Kernels*: what grows with W, what the matrix products lose by being smaller, and whether they slow down beside
#    communication.
# 3. *Memory*: what waves were meant for.

# %% [markdown]
# Result files, and what makes them again, on two H200 with nothing else on them (`pooled_wave` at 1.05 / 1.05, uniform
# routing, nothing dropped; shape A: 16,384 tokens a GPU, 16 experts, top-4, 3072 x 3072; C: 32,768 tokens, 64 experts,
# top-8, 2048 x 1024). The results of the first two in one list are `benchmarks/waves_h200x2_20261130.json`, those of
# the third `benchmarks/gemm_h200_20261130.json`.
#
# ```
# python -m tools.bench waves --shapes A --waves 1,2,3,4 --kernels 14 --sender 1.05 --receiver 1.05 --out a.json
# python -m tools.bench waves --shapes C --waves 1,2,3 --kernels 14 --sender 1.05 --receiver 1.05 --out c.json
# python -m tools.bench gemm --shapes A,C --waves 1,2,4 --out gemm.json
# ```
#
# Times are device times: medians of 20 calls, with the 10th and 90th percentile.

# %%
import importlib.util
import io
import json
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
SHORT = {"unsplit": "", "sequential": "seq.", "overlapped": "over."}
WAYS = {"forward": "forward", "forward_backward": "forward + backward"}
KINDS = {"matmul": "#4c72b0", "exchange": "#dd8452", "copy": "#8c8c8c", "elementwise": "#c9c9c9"}
COLORS = {"unsplit": "0.5", "sequential": "#4c72b0", "overlapped": "#c44e52"}


def layer_rows(result):
    """A row for forward, and one for forward and backward."""
    settings = result["settings"]
    for way in WAYS:
        times = result[way]
        yield {
            "shape": result["shape"],
            "W": settings["waves"],
            "schedule": "unsplit" if settings["waves"] == 1 else settings["schedule"],
            "way": way,
            "ms": times["median_ms"],
            "p10": times["p10_ms"],
            "p90": times["p90_ms"],
            "limit ms": result["limit_ms"]["forward" if way == "forward" else "both"],
            "GiB": result["temporary_gib"],
            **{kind: times["by_kind_ms"].get(kind, 0.0) for kind in KINDS},
        }


benchmark = read("benchmarks/waves_h200x2_20261130.json")
results = [result for result in benchmark["results"] if "failed" not in result]
layers = pd.DataFrame([row for result in results for row in layer_rows(result)])
layers["side by side"] = layers[list(KINDS)].sum(axis=1) - layers["ms"]  # kernel time that ran beside other kernels
shapes = sorted(layers["shape"].unique())
columns = ["shape", "W", "schedule", "ms", "p10", "p90", "GiB", *KINDS, "side by side"]
for way, title in WAYS.items():
    display(Markdown(f"**{title}**, ms; kernel time by kind"))
    display(layers.loc[layers["way"] == way, columns].round(2).reset_index(drop=True))

# %% [markdown]
# ## 1. Layer time
#
# Bars on the points are the 10th to 90th percentile of the calls. The dotted line is the physical limit: products and
# links at the rates measured in the same run, nothing overlapped and nothing else done.

# %%
figure, axes = plt.subplots(2, len(shapes), figsize=(11, 6.4), squeeze=False)
for row, (way, title) in enumerate(WAYS.items()):
    for column, shape in enumerate(shapes):
        axis, here = axes[row, column], layers[(layers["way"] == way) & (layers["shape"] == shape)]
        unsplit = here[here["W"] == 1].iloc[0]
        axis.axhspan(unsplit["p10"], unsplit["p90"], color="0.88")
        axis.axhline(unsplit["ms"], color="k", ls="--", lw=1)
        axis.plot(1, unsplit["ms"], "ko", label="unsplit")
        axis.annotate(f"{unsplit['ms']:.1f}", (1, unsplit["ms"]), (0, 7), textcoords="offset points", ha="center")
        for shift, schedule in ((-0.06, "sequential"), (0.06, "overlapped")):
            line = here[here["schedule"] == schedule]
            errors = np.array([line["ms"] - line["p10"], line["p90"] - line["ms"]])
            style = dict(fmt="o-", capsize=4, color=COLORS[schedule], label=schedule)
            axis.errorbar(line["W"] + shift, line["ms"], errors, **style)
        axis.axhline(unsplit["limit ms"], color="k", ls=":", lw=1, label="limit")
        axis.annotate(f"{unsplit['limit ms']:.1f}", (1, unsplit["limit ms"]), (-4, 4), textcoords="offset points")
        axis.set(xticks=sorted(here["W"].unique()), xlabel="waves", ylabel="ms", title=f"shape {shape}, {title}")
        axis.set_xlim(0.7, here["W"].max() + 0.3)
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
show(figure)


# %%
def pair(shape, way, waves):
    """(unsplit, sequential, overlapped) rows."""
    here = layers[(layers["shape"] == shape) & (layers["way"] == way)]
    at = here[here["W"] == waves].set_index("schedule")
    return here[here["W"] == 1].iloc[0], at.loc["sequential"], at.loc["overlapped"]


def change(new, old):
    """Change of the median in %, and whether the 10th to 90th percentiles do not touch."""
    return 100 * (new["ms"] / old["ms"] - 1), bool(new["p90"] < old["p10"] or old["p90"] < new["p10"])


rows = []
for shape in shapes:
    for way in WAYS:
        for waves in sorted(layers.loc[(layers["shape"] == shape) & (layers["W"] > 1), "W"].unique()):
            unsplit, sequential, overlapped = pair(shape, way, waves)
            split, gain, total = (
                change(sequential, unsplit),
                change(overlapped, sequential),
                change(overlapped, unsplit),
            )
            rows.append(
                {
                    "shape": shape,
                    "way": WAYS[way],
                    "W": waves,
                    "splitting %": split[0],
                    "overlapping %": gain[0],
                    "clear": gain[1],
                    "overlapped against unsplit %": total[0],
                    "clear ": total[1],
                    "exchange hidden %": 100 * (sequential["ms"] - overlapped["ms"]) / sequential["exchange"],
                    "matmul beside communication %": 100 * (overlapped["matmul"] / sequential["matmul"] - 1),
                    "exchange beside matmul %": 100 * (overlapped["exchange"] / sequential["exchange"] - 1),
                    "memory, sequential %": 100 * (sequential["GiB"] / unsplit["GiB"] - 1),
                    "memory, overlapped %": 100 * (overlapped["GiB"] / unsplit["GiB"] - 1),
                }
            )
effects = pd.DataFrame(rows)
display(
    Markdown(
        "Changes in percent, negative is faster or smaller: of splitting (sequential against unsplit), of overlapping "
        "(overlapped against sequential), of both. *Clear*: the 10th to 90th percentiles do not touch."
    )
)
display(effects.iloc[:, :8].round(1))

# %% [markdown]
# ## 2. Kernels
#
# Left: kernel time by kind, forward and backward; the dot is the layer's median, lower than the column where kernels
# ran side by side. Right: the experts' products alone, without any communication, in W parts.

# %%
gemm = read("benchmarks/gemm_h200_20261130.json")["results"]
figure, axes = plt.subplots(1, len(shapes) + 1, figsize=(13, 4.2), width_ratios=(1.5, 1.1, 1.2), sharey=False)


def columns_of(axis, names, kinds, dots):
    """Stacked columns of kernel time, a dot beside each."""
    base, places = np.zeros(len(names)), np.arange(len(names))
    for kind, color in KINDS.items():
        heights = np.array([values.get(kind, 0.0) for values in kinds])
        axis.bar(places, heights, 0.6, bottom=base, color=color, label=kind)
        for place, height, low in zip(places, heights, base, strict=True):
            if height > 0.6:
                axis.text(place, low + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=7)
        base += heights
    axis.plot(places + 0.4, dots, "ko", ms=5, label="median of the whole")
    axis.set(xticks=places, xticklabels=names, ylabel="ms, forward + backward")
    axis.grid(False)


for axis, shape in zip(axes, shapes, strict=False):
    here = layers[(layers["shape"] == shape) & (layers["way"] == "forward_backward")]
    names = [f"{row['W']}\n{SHORT[row['schedule']]}" for _, row in here.iterrows()]
    columns_of(axis, names, here[list(KINDS)].to_dict("records"), here["ms"])
    axis.set(title=f"layer, shape {shape}", xlabel="waves, schedule")
alone = [part["forward_backward"] for part in gemm]
names = [f"{part['shape']}\n{part['parts']}" for part in gemm]
columns_of(axes[-1], names, [part["by_kind_ms"] for part in alone], [part["median_ms"] for part in alone])
axes[-1].set(title="products alone", xlabel="shape, parts", ylim=(0, 21))
axes[-1].legend(fontsize=8, loc="upper center", ncols=2)
show(figure)
display(effects[["shape", "way", "W", *effects.columns[8:11]]].round(1))

# %% [markdown]
# ## 3. Memory
#
# Temporary memory of the compiled forward and backward program.

# %%
figure, axes = plt.subplots(1, len(shapes), figsize=(9, 3.4))
for axis, shape in zip(axes, shapes, strict=True):
    here = layers[(layers["shape"] == shape) & (layers["way"] == "forward_backward")]
    places = np.arange(len(here))
    axis.bar(places, here["GiB"], 0.65, color=[COLORS[schedule] for schedule in here["schedule"]])
    for place, value in zip(places, here["GiB"], strict=True):
        axis.text(place, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
    names = [f"{row['W']}\n{SHORT[row['schedule']]}" for _, row in here.iterrows()]
    axis.set(xticks=places, xticklabels=names, xlabel="waves, schedule", ylabel="GiB a GPU")
    axis.set(title=f"temporary memory, shape {shape}", ylim=(0, 1.12 * here["GiB"].max()))
    axis.grid(False)
show(figure)

# %% [markdown]
# ## Verdict


# %%
def span(values, pattern="+z.0f"):
    """Least to largest."""
    low, high = f"{min(values):{pattern}}", f"{max(values):{pattern}}"
    return low if low == high else f"{low} to {high}"


def faster(effect, percent, clear):
    """How many cases are faster, clear of the spread."""
    return f"{((effect[percent] < 0) & effect[clear]).sum()} of {len(effect)}"


lines = []
for shape in shapes:
    here = layers[(layers["shape"] == shape) & (layers["way"] == "forward_backward")]
    unsplit, best, small = here[here["W"] == 1].iloc[0], here.loc[here["ms"].idxmin()], here.loc[here["GiB"].idxmin()]
    percent, clear = change(best, unsplit)
    fastest = f"the unsplit layer is the fastest, {unsplit['ms']:.1f} ms"
    if best["W"] > 1:
        sure = "clear of the spread of calls" if clear else "within the spread of calls"
        fastest = (
            f"{best['W']} {best['schedule']} waves are the fastest, {best['ms']:.1f} ms ({percent:+.1f} %, {sure}; "
            f"{best['ms'] - unsplit['ms']:+.1f} ms; kernel time of copies {best['copy'] - unsplit['copy']:+.1f} ms, of "
            f"exchanges {best['exchange'] - unsplit['exchange']:+.1f} ms)"
        )
    lines.append(
        f"* **Shape {shape}**: {fastest}. The smallest is {small['W']} {small['schedule']} waves, {small['GiB']:.1f} "
        f"instead of {unsplit['GiB']:.1f} GiB, for {change(small, unsplit)[0]:+.1f} % of time."
    )
both, forward = (effects[effects["way"] == WAYS[way]] for way in ("forward_backward", "forward"))
growth = pd.DataFrame(
    [
        {kind: sequential[kind] - unsplit[kind] for kind in KINDS}
        for unsplit, sequential, _ in (pair(row["shape"], "forward_backward", row["W"]) for _, row in both.iterrows())
    ]
)
grown = ", ".join(f"{kind} {span(growth[kind], '+.1f')}" for kind in KINDS)
at_once = layers[layers["W"] == 1].set_index("way")["side by side"]
products = pd.DataFrame([part["forward_backward"]["by_kind_ms"] for part in gemm])
products["whole"] = [part["forward_backward"]["median_ms"] for part in gemm]
products.index = pd.MultiIndex.from_tuples([(part["shape"], part["parts"]) for part in gemm])
slower = pd.concat([100 * (products.loc[shape].drop(1) / products.loc[shape, 1] - 1) for shape in shapes])
if forward["overlapping %"].max() >= 0:
    hiding = "Overlapping does not always hide exchanges, not even forward."
elif both["overlapping %"].max() < -2:
    hiding = "Overlapping hides exchanges, in training too."
else:
    hiding = "Overlapping hides exchanges in the forward pass, and next to nothing more in training."
around = "adding up partial weight gradients and joining pieces costs more than smaller products do"
if slower["whole"].min() <= slower["matmul"].max():
    around = "what surrounds the products is not the larger part of it"
devices = benchmark["devices"]
pays = both["overlapped against unsplit %"].max() < 0
verdict = "are worth it for speed" if pays else "are a tool for memory, not for speed"
display(
    Markdown(f"""
**On {devices["used_devices"]} x {devices["device_kind"]}, waves {verdict}.** Forward and backward:

{chr(10).join(lines)}

Percentages are least to largest over shapes and numbers of waves:

* **Overlapped against sequential**: {
        span(forward["overlapping %"])
    } % of time forward (faster beyond the spread of calls
  in {faster(forward, "overlapping %", "clear")} cases), {span(both["overlapping %"], "+.1f")} % forward and backward
  ({faster(both, "overlapping %", "clear")}). {hiding} The unsplit layer already runs
  {span(at_once["forward_backward"], ".1f")} ms of kernels side by side with others in training (presumably weight
  gradients, which need not wait for exchanges), {span(at_once["forward"], "z.1f")} ms forward.
* **Overlapped against unsplit**, which is what counts: {span(both["overlapped against unsplit %"])} % forward and
  backward ({faster(both, "overlapped against unsplit %", "clear ")} faster beyond the spread), and
  {span(forward["overlapped against unsplit %"])} % forward.
* **What splitting costs**, sequential against unsplit, forward and backward, ms of kernel time: {grown}.
* **Smaller products**: alone and in parts their kernels take {span(slower["matmul"], "+.1f")} % of time, with the
  element-wise kernels and copies around them {span(slower["whole"])} %: {around}.
* **Beside communication** product kernels take {span(forward["matmul beside communication %"])} % forward,
  {span(both["matmul beside communication %"])} % forward and backward; exchange kernels
  {span(forward["exchange beside matmul %"])} % forward, {span(both["exchange beside matmul %"])} % in both (waiting for
  the peer included).
* **Memory**: {span(both["memory, sequential %"])} % sequential, {
        span(both["memory, overlapped %"])
    } % overlapped, which
  keeps more than one wave's buffers alive.

Only here: two GPUs, where half of the rows stay and an exchange is short; one layer at a time; XLA's scheduler of JAX
{devices["versions"]["jax"]}. Where nearly all rows leave the GPU there is twice as much to hide. Copies
differ by a millisecond between sizes for reasons of their own (see `capacity_frontier`), and blur small differences.
""")
)
