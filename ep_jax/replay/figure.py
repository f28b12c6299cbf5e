"""A figure of a replay: how much factors help, where drops happen, and who pays for them. Needs matplotlib.

Letters: P stages (valid, sender, receiver), X things of one scope.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ep_jax.drop_report import rates
from ep_jax.replay.recommend import draw_steps, interval
from ep_jax.replay.results import Result
from ep_jax.replay.search import ALL
from ep_jax.replay.study import Question, Study

MOST_FAMILIES = 4  # more cannot be told apart where each has two lines
MOST_BARS = 12
MOST_MARKERS = 32
TICKS = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # %


def draw(question: Question, studies: Sequence[Study], title: str) -> Any:
    """The figure of the first MOST_FAMILIES studies of one question.

    Above: drops against the factor, by stage, by layer, by expert. Below, who pays: by source shard, packed row of the
    shard, column of the packed row, document. Lines are each family's first result and the recommended one. Rates are
    linear below the target and logarithmic above. Returns the matplotlib figure.
    """
    from matplotlib.figure import Figure

    studies = studies[:MOST_FAMILIES]
    colours = [f"C{place}" for place in range(len(studies))]
    figure = Figure(figsize=(18, 9), layout="constrained")
    axes = figure.subplots(2, 4)
    _draw_curves(axes[0, 0], question, studies, colours)
    _draw_stages(axes[0, 1], studies, colours)
    lines = _lines(studies, colours)
    outcomes = [result.outcome for result, _ in lines]
    panels = (
        (axes[0, 2], "by layer", "layer", [outcome.counts_GNP.sum(axis=0).T for outcome in outcomes]),
        (axes[1, 0], "by source shard", "shard of the ep group", [outcome.source_PS for outcome in outcomes]),
        (axes[1, 1], "by place in the shard", "packed row of the shard", [outcome.place_PR for outcome in outcomes]),
        (axes[1, 2], "by column", "bin of columns of the packed row", [outcome.column_PC for outcome in outcomes]),
    )
    for axis, name, label, counts in panels:
        for counts_PX, (_, style) in zip(counts, lines, strict=True):
            axis.plot(100 * rates(counts_PX), marker="." if counts_PX.shape[1] <= MOST_MARKERS else "", **style)
        axis.set(title=f"dropped {name}", xlabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    sorted_panels = (
        (axes[0, 3], "expert of a layer", "experts", [outcome.expert_NPE.swapaxes(0, 1) for outcome in outcomes]),
        (axes[1, 3], "document", "documents", [outcome.document_PD for outcome in outcomes]),
    )
    for axis, name, label, counts in sorted_panels:
        for counts_PX, (_, style) in zip(counts, lines, strict=True):
            worst_first_X = np.sort(100 * rates(counts_PX), axis=None)[::-1]
            axis.plot(100 * (np.arange(worst_first_X.size) + 0.5) / worst_first_X.size, worst_first_X, **style)
        axis.set(title=f"dropped by {name}, worst first", xlabel=f"% of all {label}", xlim=(0, 100))
    for axis in (axes[0, 2], axes[0, 3], *axes[1]):
        _scale(axis, question.target, "% of its assignments")
    figure.legend(*axes[0, 2].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title)
    return figure


def _draw_curves(axis: Any, question: Question, studies: Sequence[Study], colours: Sequence[str]) -> None:
    """Drop rates over the sender factor at one receiver factor, or over the receiver factor where it is alone."""
    right = 1.1
    for study, colour in zip(studies, colours, strict=True):
        family, tried, choice = study.family, study.candidates, study.choices[ALL]
        along_X, shown_X, note = tried.senders_X, np.ones(len(tried.senders_X), bool), ""
        if family.uses_sender and family.uses_receiver:
            receiver = _common_receiver(study)
            shown_X, note = tried.receivers_X == receiver, f", receiver {receiver:g}"
        elif family.uses_receiver:
            along_X, note = tried.receivers_X, " (x: receiver)"
        along_X, first_X = np.unique(along_X[shown_X], return_index=True)
        drops_UX = tried.drops_UX[:, shown_X][:, first_X]
        found = interval(drops_UX, study.valid_U, draw_steps(len(study.valid_U), question.seed))
        style = dict(color=colour, linestyle="-" if family.uses_sender else "--")
        axis.plot(along_X, 100 * found.rate, marker=".", label=f"{family.name}{note}", **style)
        axis.fill_between(along_X, 100 * found.low, 100 * found.high, color=colour, alpha=0.2, linewidth=0)
        enough = along_X[found.rate <= question.target / 10]
        right = max(right, enough[0] if enough.size else along_X[-1])
        if choice:
            at = choice.sender if family.uses_sender else choice.receiver
            axis.plot(at, 100 * choice.interval.rate, color=colour, marker="*", markersize=14)
    _scale(axis, question.target, "% of valid assignments")
    axis.set(title="dropped against the factor (star: recommended)", xlabel="sender factor")
    left = min(study.candidates.senders_X.min() for study in studies)
    axis.set(xlim=(left - 0.03 * (right - left), right), ylim=(0, axis.get_ylim()[1] * 6))  # room for the legend
    axis.legend(fontsize="small", loc="upper right")


def _common_receiver(study: Study) -> float:
    """The receiver factor that was tried with most sender factors; of several the smallest not below the choice."""
    choice, tried = study.choices[ALL], study.candidates
    pairs = np.unique([tried.receivers_X, tried.senders_X], axis=1)
    receivers, counts = np.unique(pairs[0], return_counts=True)
    common = receivers[counts == counts.max()]
    enough = common[common >= (choice.receiver if choice else common[-1])]
    return float(enough[0] if enough.size else common[-1])


def _draw_stages(axis: Any, studies: Sequence[Study], colours: Sequence[str]) -> None:
    """Bars of the results: the sender's part full, the receiver's pale."""
    pairs = [(result, colour) for study, colour in zip(studies, colours, strict=True) for result in study.results]
    pairs = pairs[:MOST_BARS]
    places = np.arange(len(pairs))[::-1]
    for place, (result, colour) in zip(places, pairs, strict=True):
        valid, sender, receiver = result.outcome.total_P.tolist()
        share = [100 * part / max(valid, 1) for part in (sender, receiver)]
        axis.barh(place, share[0], color=colour)
        axis.barh(place, share[1], left=share[0], color=colour, alpha=0.4)
    axis.set_yticks(places, [_label(result).replace(" at ", "\n") for result, _ in pairs], fontsize="x-small")
    axis.set(title="dropped by the sender (full), receiver (pale)", xlabel="% of valid assignments")


def _lines(studies: Sequence[Study], colours: Sequence[str]) -> list[tuple[Result, dict[str, Any]]]:
    """Each family's first result, dotted, and its recommended one."""
    found = []
    for study, colour in zip(studies, colours, strict=True):
        chosen = study.recommended
        if chosen is not study.results[0]:
            found.append((study.results[0], dict(color=colour, linestyle=":", label=_label(study.results[0]))))
        if chosen:
            found.append((chosen, dict(color=colour, linestyle="-", label=f"{_label(chosen)}, recommended")))
    return found


def _label(result: Result) -> str:
    outcome = result.outcome
    factors = [outcome.sender] * outcome.family.uses_sender + [outcome.receiver] * outcome.family.uses_receiver
    return f"{outcome.family.name} at {' / '.join(f'{factor:g}' for factor in factors)}"


def _scale(axis: Any, target: float, label: str) -> None:
    """Rates in %, linear up to the target, which is drawn, and logarithmic above."""
    goal = 100 * target or 0.1
    axis.axhline(goal, color="black", linewidth=1, label="target" if target else None)
    axis.set_yscale("symlog", linthresh=goal)
    top = max(axis.dataLim.y1, 1.5 * goal) * 1.2
    axis.set_ylim(0, top)
    axis.set_yticks([tick for tick in TICKS if tick == 0 or goal / 5 <= tick <= top], minor=False)
    axis.set_yticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel(label)
