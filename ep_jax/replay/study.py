"""From trace to answer: what policies drop with so many shards, and which factors keep drops under a target.

Letters: G groups, U steps, N layers, X candidates. `tools/replay.py` prints what is computed here; notebooks call it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.settings import EPConfig
from ep_jax.ep.traffic import Widths
from ep_jax.replay.cost import price_bytes
from ep_jax.replay.policies import Family
from ep_jax.replay.recommend import Candidates, Choice, by_step, choose, draw_steps
from ep_jax.replay.replay import Outcome, Request, replay
from ep_jax.replay.resharding import Dealing, Group, groups
from ep_jax.replay.results import Result, result_of
from ep_jax.replay.search import ALL, Problem, search
from ep_jax.traces.file import TraceStep


@dataclasses.dataclass(frozen=True)
class Question:
    """A trace dealt to shards, and what is wanted of it. steps reads the trace, once a call."""

    steps: Callable[[], Iterable[TraceStep]]
    dealing: Dealing
    widths: Widths
    target: float  # drop rate, 0 to 1
    seed: int = 0  # of the bootstrap

    @property
    def shape(self) -> LayerShape:
        dealing = self.dealing
        tokens = dealing.rows * dealing.header.sequence_length
        return LayerShape(dealing.shards, dealing.header.num_experts, dealing.recorded.choices, tokens)

    def groups(self) -> Iterable[Group]:
        return groups(self.dealing, self.steps())


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """The answer for one family."""

    family: Family
    results: list[Result]
    candidates: Candidates  # all pairs of factors that were tried, for all layers together
    valid_U: np.ndarray  # int64, valid assignments of all layers
    choices: dict[int, Choice | None]  # the cheapest good pair, by scope: `search.ALL` or a layer

    @property
    def recommended(self) -> Result | None:
        """The result of the cheapest pair of factors that keeps drops under the target; None without one."""
        choice = self.choices[ALL]
        if choice is None:
            return None
        factors = (choice.sender, choice.receiver)
        return next(r for r in self.results if (r.outcome.sender, r.outcome.receiver) == factors)


def study_grid(
    question: Question, families: Sequence[Family], senders: Sequence[float], receivers: Sequence[float]
) -> list[Study]:
    """Replays every pair of these factors and chooses among them."""
    requests = [Request.grid(family, senders, receivers) for family in families]
    return [
        _chosen_among(question, request, outcomes)
        for request, outcomes in zip(requests, _replay(question, requests), strict=True)
    ]


def study_search(
    question: Question, families: Sequence[Family], base: EPConfig, say: Callable[[str], None]
) -> list[Study]:
    """Searches factors, and replays 1.0, those of `base` and the recommended ones. say is told what comes next."""
    found, requests = [], []
    for family in families:
        problem = Problem(
            family,
            question.groups,
            question.dealing.recorded.layers,
            question.shape,
            question.dealing.header.sequence_length,
            question.widths,
            question.target,
            question.seed,
        )
        found.append(search(problem, say))
        shown = [(1.0, 1.0), (base.sender_factor, base.receiver_factor)]
        if choice := found[-1].choices[ALL]:
            shown.append((choice.sender, choice.receiver))
        requests.append(Request.of_pairs(family, shown))
    say(f"replaying {sum(len(request.pairs) for request in requests)} policies")
    return [
        Study(request.family, _results(question, outcomes), one.candidates[ALL], one.valid_U, one.choices)
        for request, one, outcomes in zip(requests, found, _replay(question, requests), strict=True)
    ]


def _replay(question: Question, requests: Sequence[Request]) -> list[list[Outcome]]:
    header = question.dealing.header
    sizes = dict(num_experts=header.num_experts, sequence_length=header.sequence_length)
    return replay(question.groups(), requests, **sizes)


def _results(question: Question, outcomes: Sequence[Outcome]) -> list[Result]:
    return [
        result_of(outcome, question.shape, question.dealing.rows, question.widths, question.seed)
        for outcome in outcomes
    ]


def _chosen_among(question: Question, request: Request, outcomes: Sequence[Outcome]) -> Study:
    """The cheapest good pairs of a grid, of all layers and of each."""
    prices_X = np.array([price_bytes(o.settings, question.shape, question.widths) for o in outcomes])
    counts_XUNP = np.stack([by_step(outcome.counts_GNP, outcome.steps_G) for outcome in outcomes])
    drops_NUX = counts_XUNP[..., 1:].sum(axis=-1).transpose(2, 1, 0)
    valid_U, layers = counts_XUNP[0, :, 0, 0], len(drops_NUX)
    senders_X, receivers_X = (np.array(x) for x in zip(*request.pairs, strict=True))

    def candidates(drops_UX: np.ndarray) -> Candidates:
        return Candidates(senders_X, receivers_X, prices_X, drops_UX)

    drawn_BU = draw_steps(len(valid_U), question.seed)
    of_all = candidates(drops_NUX.sum(axis=0))
    choices = {ALL: choose(of_all, valid_U * layers, drawn_BU, question.target)}
    if layers > 1:
        for layer, drops_UX in enumerate(drops_NUX):
            choices[layer] = choose(candidates(drops_UX), valid_U, drawn_BU, question.target)
    return Study(request.family, _results(question, outcomes), of_all, valid_U * layers, choices)
