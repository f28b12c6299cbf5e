"""The cheapest factors that keep drops under a target, with confidence over steps.

Letters: U steps (units that are drawn again), B bootstrap samples, X candidates, each a pair of factors.

A drop rate is a sum of drops over a sum of valid assignments. Its interval comes from drawing the trace's steps again
with replacement (percentile bootstrap, seeded): groups of one step share a router and stay together. A candidate is
good enough when the upper end of its 95 % interval is at most the target. From one step there is no interval; the rate
itself is compared then. Plain NumPy.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

SAMPLES = 2000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A drop rate and the ends of its interval, 0 to 1; arrays [X] where they are of many candidates."""

    rate: Any
    low: Any
    high: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """Pairs of factors that were tried on the same steps."""

    senders_X: np.ndarray
    receivers_X: np.ndarray
    prices_X: np.ndarray  # what "cheapest" compares
    drops_UX: np.ndarray  # int64, both stages

    def joined(self, other: "Candidates") -> "Candidates":
        """Both."""
        names = [field.name for field in dataclasses.fields(self)]
        return Candidates(*[np.concatenate([getattr(self, n), getattr(other, n)], axis=-1) for n in names])


class Choice(NamedTuple):
    """The cheapest good pair."""

    sender: float
    receiver: float
    price: float
    interval: Interval  # of floats


def draw_steps(num_steps: int, seed: int, samples: int = SAMPLES) -> np.ndarray:
    """int64 [B,U]: how often each step is drawn in each bootstrap sample."""
    return np.random.default_rng(seed).multinomial(num_steps, np.full(num_steps, 1 / num_steps), size=samples)


def interval(drops_UX: np.ndarray, valid_U: np.ndarray, drawn_BU: np.ndarray) -> Interval:
    """Drop rates and their intervals."""
    rate_X = drops_UX.sum(axis=0) / max(valid_U.sum(), 1)
    drawn_BU = drawn_BU.astype(np.float64)  # exact below 2^53
    sample_BX = (drawn_BU @ drops_UX) / np.maximum(drawn_BU @ valid_U, 1)[:, None]
    low_X, high_X = np.quantile(sample_BX, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return Interval(rate_X, low_X, high_X)


def by_step(counts_GX: np.ndarray, steps_G: np.ndarray) -> np.ndarray:
    """[U,...]: sums over the groups of each step; steps_G ascends."""
    firsts = np.flatnonzero(np.diff(steps_G, prepend=steps_G[0] - 1))
    return np.add.reduceat(counts_GX, firsts, axis=0)


def choose(candidates: Candidates, valid_U: np.ndarray, drawn_BU: np.ndarray, target: float) -> Choice | None:
    """The cheapest candidate that is good enough, of equally cheap ones that with fewest drops; None without one."""
    found = interval(candidates.drops_UX, valid_U, drawn_BU)
    good_X = np.flatnonzero(found.high <= target)
    if not good_X.size:
        return None
    best = good_X[np.lexsort((found.rate[good_X], candidates.prices_X[good_X]))[0]]
    of_best = Interval(*(float(values_X[best]) for values_X in found))
    return Choice(
        float(candidates.senders_X[best]),
        float(candidates.receivers_X[best]),
        float(candidates.prices_X[best]),
        of_best,
    )
