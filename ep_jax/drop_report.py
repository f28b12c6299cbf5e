"""Reads drops: who lost how much, how fairly, whether it is too much, and a figure of it.

Letters: N layers, P stages (valid, sender, receiver), E experts, D source shards, R packed rows of a shard (places in
the shard's order), C bins of columns. Arrays are host counts of one step (`ep_jax.step.LayerDrops`) or sums of several.
Starts no JAX backend; matplotlib is needed for `draw` only. Counting is in `ep/drops.py`, files in `trackers.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

STAGE_NAMES = ("sender", "receiver")
ARRAYS = ("counts_NPE", "source_counts_NDP", "profile_NPRC")


def rates(counts_P: np.ndarray) -> np.ndarray:
    """Drop rate from counts [P, ...]: (sender + receiver) / valid, 0 where nothing is valid; float64 [...]."""
    counts_P = np.asarray(counts_P).astype(np.int64)
    return (counts_P[1] + counts_P[2]) / np.maximum(counts_P[0], 1)


def fairness(rate_X: np.ndarray) -> float:
    """Jain's index of drop rates: 1 when all lose alike (or nobody loses), 1/n when one of n loses everything."""
    total, squares = float(np.sum(rate_X)), float(np.sum(np.square(rate_X)))
    return total**2 / (np.size(rate_X) * squares) if squares > 0 else 1.0


def scalars(drops: Mapping[str, Any]) -> dict[str, float]:
    """Nine numbers about one step's drops, however large model and mesh are: worst and fairness by where they fell."""
    counts_NPE = np.asarray(drops["counts_NPE"]).astype(np.int64)
    by = {
        "layer": rates(counts_NPE.sum(axis=2).T),
        "expert": rates(np.moveaxis(counts_NPE, 1, 0)),
        "source": rates(np.asarray(drops["source_counts_NDP"]).astype(np.int64).sum(axis=0).T),
        "row": rates(np.asarray(drops["profile_NPRC"]).astype(np.int64).sum(axis=(0, 3))),
        "column": rates(np.asarray(drops["profile_NPRC"]).astype(np.int64).sum(axis=(0, 2))),
    }
    worst = {f"drop_worst_{name}": float(rate.max()) for name, rate in by.items()}
    return worst | {f"drop_fairness_{name}": fairness(by[name]) for name in ("expert", "source", "row", "column")}


def alarm(step: int, counts_NPE: Any, threshold: float) -> str | None:
    """One line when more than `threshold` (0 to 1; 0 = never) of the valid assignments dropped, None otherwise."""
    counts_NPE = np.asarray(counts_NPE).astype(np.int64)
    total_P = counts_NPE.sum(axis=(0, 2))
    rate = float(rates(total_P))
    if threshold == 0 or rate <= threshold:
        return None
    layer_N = rates(counts_NPE.sum(axis=2).T)
    layer = int(layer_N.argmax())
    expert_E = rates(counts_NPE[layer])
    stage = STAGE_NAMES[int(np.argmax(total_P[1:]))]
    return (
        f"WARNING: step {step}: {100 * rate:.2f} % of assignments dropped, alarm above {100 * threshold:g} %; mostly "
        f"at the {stage}; worst layer {layer} {100 * layer_N[layer]:.2f} %, its worst expert {int(expert_E.argmax())} "
        f"{100 * expert_E.max():.2f} %; ep.{stage}_factor is the setting"
    )


def load(folder: str | Path) -> dict[int, dict[str, np.ndarray]]:
    """The arrays of a run folder by step. Raises FileNotFoundError when it has none."""
    files = sorted((Path(folder) / "arrays").glob("step_*.npz"))
    if not files:
        raise FileNotFoundError(f"{folder}: no arrays/step_*.npz; is it a run folder?")
    found = {}
    for file in files:
        with np.load(file) as arrays:
            found[int(file.stem.removeprefix("step_"))] = {name: arrays[name] for name in arrays.files}
    return found


def draw(by_step: Mapping[int, Mapping[str, np.ndarray]], *, last: int = 5) -> Any:
    """A figure of a run's drops: over steps by stage, and for the last logged steps by layer and expert, by source
    shard, by place in the shard and by column. Returns the matplotlib figure."""
    from matplotlib.figure import Figure

    steps = sorted(by_step)
    totals_tP = np.array([by_step[step]["counts_NPE"].sum(axis=(0, 2)) for step in steps])
    recent = {name: np.sum([by_step[step][name] for step in steps[-last:]], axis=0, dtype=np.int64) for name in ARRAYS}
    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(2, 3)

    share_t = 100 / np.maximum(totals_tP[:, 0], 1)
    axes[0, 0].stackplot(steps, totals_tP[:, 1] * share_t, totals_tP[:, 2] * share_t, labels=STAGE_NAMES)
    axes[0, 0].set(title="dropped by stage", xlabel="step", ylabel="% of valid assignments", ylim=(0, None))
    axes[0, 0].legend()

    image = axes[0, 1].imshow(100 * rates(np.moveaxis(recent["counts_NPE"], 1, 0)), aspect="auto", cmap="magma_r")
    axes[0, 1].set(
        title=f"by layer and expert, last {len(steps[-last:])} logged steps", xlabel="expert", ylabel="layer"
    )
    figure.colorbar(image, ax=axes[0, 1], label="% dropped")

    layer_P = recent["counts_NPE"].sum(axis=2)
    _bars(axes[0, 2], layer_P.T, "by layer", "layer")
    _bars(axes[1, 0], recent["source_counts_NDP"].sum(axis=0).T, "by source shard", "shard in mesh order")
    _bars(axes[1, 1], recent["profile_NPRC"].sum(axis=(0, 3)), "by place in the shard", "packed row of the shard")
    _bars(axes[1, 2], recent["profile_NPRC"].sum(axis=(0, 2)), "by column of the packed row", "bin of columns")
    for axis in axes.flat:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 1].yaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"Dropped assignments, steps {steps[0]} to {steps[-1]}")
    return figure


def _bars(axis: Any, counts_PX: np.ndarray, title: str, label: str) -> None:
    """Stacked bars of both stages' drop rates over X."""
    share_X = 100 / np.maximum(counts_PX[0], 1)
    places, sender_X = np.arange(counts_PX.shape[1]), counts_PX[1] * share_X
    axis.bar(places, sender_X, label="sender")
    axis.bar(places, counts_PX[2] * share_X, bottom=sender_X, label="receiver")
    axis.set(title=title, xlabel=label, ylabel="% dropped", xmargin=0.01)
