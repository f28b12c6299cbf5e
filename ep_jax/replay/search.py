"""Searches the cheapest factors of a family for a drop target: for all layers together, and for each layer alone.

Letters: U steps, N layers, I sender factors, J receiver factors, X candidates.

A coarse grid first, a few sender factors at a time from small to large, until no larger one can be cheaper; then a
finer grid around what was found. Sender and receiver interact (a receiver cannot drop what was not sent, and gets more
from larger pools), so pairs are tried, not one factor after the other. Counts are exact, of every step.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.settings import EPConfig
from ep_jax.ep.traffic import Widths
from ep_jax.replay.cost import price_bytes
from ep_jax.replay.factors import count_factors
from ep_jax.replay.policies import Family
from ep_jax.replay.recommend import Candidates, Choice, by_step, choose, draw_steps
from ep_jax.replay.resharding import Group

RECEIVERS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)
SENDERS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 3.5, 4.0, 5.0, 6.0)
CELLS = (*SENDERS, 8.0, 12.0, 16.0, 24.0)  # a cell holds fewer rows than a pool, so it needs more slack
SENDERS_AT_ONCE = 4
CLOSER_PASSES = 3  # the first for every scope, the others for ALL
CLOSER_SENDERS, CLOSER_RECEIVERS = 4, 15
MOST_BUFFER_BYTES = 2**30  # of the senders' buffers that are counted at once
ALL = -1  # the scope of all layers together; the other scopes are layers


class Grid(NamedTuple):
    """All pairs of these factors."""

    senders: tuple[float, ...]
    receivers: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is searched for. groups makes the groups anew, once a pass."""

    family: Family
    groups: Callable[[], Iterable[Group]]
    num_layers: int
    shape: LayerShape
    sequence_length: int
    widths: Widths
    target: float  # 0 to 1
    seed: int

    @property
    def scopes(self) -> tuple[int, ...]:
        """ALL and the layers; one layer is all."""
        return (ALL, *range(self.num_layers)) if self.num_layers > 1 else (ALL,)

    def price(self, sender: float, receiver: float) -> int:
        return price_bytes(self.family.at(sender, receiver), self.shape, self.widths)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What a search found, by scope; valid assignments of a step are the same in every layer."""

    candidates: dict[int, Candidates]
    choices: dict[int, Choice | None]
    valid_U: np.ndarray  # of ALL


def search(problem: Problem, say: Callable[[str], None]) -> Found:
    """The cheapest factors whose drops stay under the target, by scope; None where no factor tried does.

    say is told what comes next.
    """
    family = problem.family
    senders = (CELLS if family.settings.transport == "fixed_cell" else SENDERS) if family.uses_sender else (1.0,)
    receivers = RECEIVERS if family.uses_receiver else (1.0,)
    found = None
    for first in range(0, len(senders), SENDERS_AT_ONCE):
        some = senders[first : first + SENDERS_AT_ONCE]
        if found and _settled(found, problem.price(some[0], receivers[0])):
            break
        say(f"{family.name}: searching" + (f", sender {some[0]:g} to {some[-1]:g}" if family.uses_sender else ""))
        found = _add(problem, found, dict.fromkeys(problem.scopes, Grid(some, receivers)))
    assert found
    for closer in range(CLOSER_PASSES):
        say(f"{family.name}: searching closer")
        found = _add(problem, found, _closer(found, problem.scopes if closer == 0 else (ALL,), receivers))
    return found


def _closer(found: Found, scopes: tuple[int, ...], receivers: tuple[float, ...]) -> dict[int, Grid]:
    """Grids around choices, also at the next coarse receiver factor, so that drops by sender can be compared."""
    grids = {}
    for scope in scopes:
        if choice := found.choices[scope]:
            tried = found.candidates[scope]
            near = _around(choice.receiver, tried.receivers_X, CLOSER_RECEIVERS)
            common = next(factor for factor in receivers if factor >= choice.receiver)
            grids[scope] = Grid(_around(choice.sender, tried.senders_X, CLOSER_SENDERS), (*near, common))
    return grids


def _settled(found: Found, next_price: int) -> bool:
    """Whether every scope has a choice and nothing of `next_price` or above can be cheaper."""
    return all(choice is not None and choice.price <= next_price for choice in found.choices.values())


def _around(value: float, tried_X: np.ndarray, count: int) -> tuple[float, ...]:
    """`count` factors between the tried neighbours of `value`, of two decimals; the last again where they are few."""
    tried = np.unique(tried_X)
    if len(tried) == 1:
        return (value,)
    place = int(np.searchsorted(tried, value))
    low, high = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
    values = sorted({round(float(x), 2) for x in np.linspace(low, high, count + 1)[1:]})
    return (*values, *[values[-1]] * (count - len(values)))


def _add(problem: Problem, before: Found | None, grids: Mapping[int, Grid]) -> Found:
    """Counts the drops of grids by scope and chooses again among all candidates."""
    if before and not grids:
        return before
    steps_G, valid_G, drops_G = [], [], []
    largest = problem.family.at(
        max(max(grid.senders) for grid in grids.values()), max(max(grid.receivers) for grid in grids.values())
    )
    for group in problem.groups():
        steps_G.append(group.step)
        valid_G.append(int(group.valid_ST.sum()) * problem.shape.experts_per_token)
        drops_G.append(_count_group(problem, group, grids, largest))
    steps_G, valid_G = np.array(steps_G), np.array(valid_G)
    valid_U = by_step(valid_G, steps_G)
    drawn_BU = draw_steps(len(valid_U), problem.seed)
    candidates, choices = (dict(before.candidates), dict(before.choices)) if before else ({}, {})
    for scope, grid in grids.items():
        drops_UX = by_step(np.stack([drops[scope] for drops in drops_G]), steps_G).reshape(len(valid_U), -1)
        new = _candidates(problem, grid, drops_UX)
        candidates[scope] = candidates[scope].joined(new) if scope in candidates else new
        scale = problem.num_layers if scope == ALL else 1
        choices[scope] = choose(candidates[scope], valid_U * scale, drawn_BU, problem.target)
    return Found(candidates, choices, valid_U * problem.num_layers)


def _candidates(problem: Problem, grid: Grid, drops_UX: np.ndarray) -> Candidates:
    senders_X, receivers_X = (x.reshape(-1) for x in np.meshgrid(*grid, indexing="ij"))
    prices_X = np.array([problem.price(*map(float, pair)) for pair in zip(senders_X, receivers_X, strict=True)])
    return Candidates(senders_X, receivers_X, prices_X, drops_UX)


def _count_group(problem: Problem, group: Group, grids: Mapping[int, Grid], largest: EPConfig) -> dict[int, np.ndarray]:
    """int64 [I,J] by scope: both stages' drops in one group."""
    layers = {scope: range(problem.num_layers) if scope == ALL else (scope,) for scope in grids}
    needed = {(layer, grids[scope]) for scope, layers_of in layers.items() for layer in layers_of}
    launched = {key: list(_launch(problem, group, *key, largest)) for key in sorted(needed)}
    drops = {
        key: np.concatenate([np.asarray(part) for part in parts]).sum(axis=-1, dtype=np.int64)
        for key, parts in launched.items()
    }
    return {scope: np.sum([drops[n, grids[scope]] for n in of_scope], axis=0) for scope, of_scope in layers.items()}


def _launch(problem: Problem, group: Group, layer: int, grid: Grid, largest: EPConfig):
    """Counts [I,J,2] on their way, of as many senders at once as memory allows."""
    ids_STK = group.expert_ids_NSTK[layer]
    together = len(grid.senders)
    while together > 1 and together * largest.sender_factor * ids_STK.size * 16 > MOST_BUFFER_BYTES:
        together = -(-together // 2)
    for first in range(0, len(grid.senders), together):
        some = grid.senders[first : first + together]
        yield count_factors(
            ids_STK,
            group.weights_NSTK[layer],
            group.valid_ST,
            num_experts=problem.shape.num_experts,
            sequence_length=problem.sequence_length,
            settings=largest,
            senders=some,
            receivers=[grid.receivers] * len(some),
        )
