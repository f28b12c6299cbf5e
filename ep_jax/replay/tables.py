"""Results of a replay as text of at most 120 columns: a table of policies, and a recommendation in plain words."""

import textwrap
from collections.abc import Sequence

import numpy as np

from ep_jax.replay.cost import SENDS_TRUE_ROWS, expert_rows, forward_bytes
from ep_jax.replay.policies import Family
from ep_jax.replay.recommend import Choice
from ep_jax.replay.results import Result
from ep_jax.replay.search import ALL
from ep_jax.replay.study import Question, Study

WIDTH = 118
_HEAD = (
    ("", "factors", "", "drop %", "95 % interval", "send", "recv", "lost", "worst", "worst", "sent by"),
    ("policy", "send", "recv", "", "over steps", "%", "%", "weight", "layer", "expert", "a GPU"),
)


def results_table(results: Sequence[Result]) -> str:
    """A line a policy: factors, drops in % of valid assignments with the interval over steps, who loses, bytes sent."""
    lines = [*_HEAD, *[_cells(result) for result in results]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        " ".join(
            [f"{line[0]:<{widths[0]}}", *[f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]]
        )
        for line in lines
    )


def _cells(result: Result) -> tuple[str, ...]:
    outcome, found = result.outcome, result.interval
    family, (valid, sender, receiver) = outcome.family, outcome.total_P.tolist()
    expert_NE = outcome.expert_NPE[:, 1:].sum(axis=1) / np.maximum(outcome.expert_NPE[:, 0], 1)
    return (
        family.name,
        f"{outcome.sender:g}" if family.uses_sender else "-",
        f"{outcome.receiver:g}" if family.uses_receiver else "-",
        f"{100 * found.rate:.3f}",
        f"{100 * found.low:.3f}-{100 * found.high:.3f}",
        *[f"{100 * part / max(valid, 1):.2f}" for part in (sender, receiver)],
        *[
            f"{100 * float(x):.2f}"
            for x in (outcome.lost_weight_2.sum(), result.layer_interval.rate.max(), expert_NE.max())
        ],
        bytes_text(result.forward_bytes),
    )


def imbalance_line(result: Result) -> str:
    """How uneven the routing itself is, whatever the policy."""
    outcome = result.outcome
    shard, expert = outcome.wanted_shard_imbalance_GN, outcome.wanted_expert_imbalance_GN
    return (
        f"routing: the busiest of {outcome.family.shards} shards is asked for {shard.mean():.2f} x the mean rows (at "
        f"worst {shard.max():.2f}), the busiest expert for {expert.mean():.2f} x (at worst {expert.max():.2f})"
    )


def recommendation(study: Study, question: Question) -> list[str]:
    """What a family needs to stay under the target, and what that costs against factors of 1.0."""
    family, chosen = study.family, study.recommended
    title, goal = f"{family.name} at EP{family.shards}", f"drops under {percent(question.target)}"
    if chosen is None:
        return wrap(f"{title}: no factors tried keep {goal}; fewest {percent(_fewest(study))}, {_tried(study)}")
    outcome, found = chosen.outcome, chosen.interval
    steps = len(study.valid_U)
    digits = 2 if found.high >= 0.001 else 4
    sure = f"95 % interval {100 * found.low:.{digits}f}-{100 * found.high:.{digits}f} % over {steps} steps"
    at_one = family.at(1.0, 1.0)
    sent = forward_bytes(at_one, question.shape, question.widths, kept_away=0.0)
    more = f"{_more(chosen.forward_bytes, sent)} factor 1.0"
    if at_one.transport in SENDS_TRUE_ROWS:
        more = "for rows that exist"
    rows = expert_rows(at_one, question.shape)
    keep = "keep" if family.uses_sender and family.uses_receiver else "keeps"
    lines = wrap(
        f"{title}: {_factors(family, outcome.sender, outcome.receiver)} {keep} {goal} "
        f"({100 * found.rate:.{digits}f} %, "
        f"{sure if steps > 1 else 'one step, so no interval'}); costs {bytes_text(chosen.forward_bytes)} per GPU and "
        f"layer forward, {more}, and {chosen.expert_rows:,} expert rows, "
        f"{_more(chosen.expert_rows, rows)} factor 1.0"
    )
    layers = [f"{layer}: {_pair(choice, family)}" for layer, choice in study.choices.items() if layer != ALL]
    return lines + (wrap("    each layer alone:  " + ",  ".join(layers)) if layers else [])


def _factors(family: Family, sender: float, receiver: float) -> str:
    named = [f"sender {sender:g}"] * family.uses_sender + [f"receiver {receiver:g}"] * family.uses_receiver
    return ", ".join(named)


def _fewest(study: Study) -> float:
    return float(study.candidates.drops_UX.sum(axis=0).min() / max(study.valid_U.sum(), 1))


def _tried(study: Study) -> str:
    tried = study.candidates
    return f"with factors up to {_factors(study.family, tried.senders_X.max(), tried.receivers_X.max())}"


def _pair(choice: Choice | None, family: Family) -> str:
    if choice is None:
        return "more"
    factors = [choice.sender] * family.uses_sender + [choice.receiver] * family.uses_receiver
    return " / ".join(f"{factor:g}" for factor in factors)


def _more(value: float, base: float) -> str:
    change = 100 * (value / base - 1) if base else 0.0
    if abs(change) < 0.05:
        return "as much as"
    return f"{change:.1f} % more than" if change > 0 else f"{-change:.1f} % less than"


def percent(rate: float) -> str:
    """0.005 as "0.50 %"; more digits where two would hide it."""
    value = 100 * rate
    return f"{value:.2f} %" if value >= 0.095 or value == 0 else f"{value:.2g} %"


def bytes_text(count: float) -> str:
    """A number of bytes in the largest unit in which it is at least 1."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.2f} {unit}" if count < 100 * size else f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def wrap(text: str) -> list[str]:
    """Lines of at most WIDTH columns, the later ones indented further."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        text.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
