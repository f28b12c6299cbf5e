"""Replays recorded routing through policies: what each would have dropped, where, and who pays.

Letters: G groups (an ep group in one microbatch of a step), N layers, P stages (valid, sender, receiver), E experts, S
source shards, R packed rows of a shard, C bins of columns, D documents, d those of one group, T tokens of a shard, K
choices, I sender factors, J receiver factors.

What is kept is decided by the transports' own plan functions (`factors.py`); this file hands them one layer of one
group after the other and adds up what `tally.py` counts. Nothing is sampled; counts are int64 and exact.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ep_jax.ep.settings import EPConfig
from ep_jax.replay.factors import simulate_factors
from ep_jax.replay.policies import Family
from ep_jax.replay.resharding import Group
from ep_jax.replay.tally import Counts, Where, count_drops, count_valid, locate

MOST_FATES_BYTES = 2**28  # at once; when all pairs of factors need more, one sender factor is replayed after the other


@dataclasses.dataclass(frozen=True)
class Request:
    """A family at pairs of factors: each sender factor with each receiver factor of its own. 1.0 for one not used."""

    family: Family
    senders: tuple[float, ...]  # [I]
    receivers: tuple[tuple[float, ...], ...]  # [I][J]

    @classmethod
    def grid(cls, family: Family, senders: Sequence[float], receivers: Sequence[float]) -> "Request":
        """All pairs of these factors; those of a kind that the family does not use are left out."""
        senders = tuple(senders) if family.uses_sender else (1.0,)
        return cls(family, senders, (tuple(receivers) if family.uses_receiver else (1.0,),) * len(senders))

    @classmethod
    def of_pairs(cls, family: Family, pairs: Sequence[tuple[float, float]]) -> "Request":
        """These (sender, receiver) pairs, each once; a factor that the family does not use is left out."""
        used = dict.fromkeys((s if family.uses_sender else 1.0, r if family.uses_receiver else 1.0) for s, r in pairs)
        return cls(family, tuple(sender for sender, _ in used), tuple((receiver,) for _, receiver in used))

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """(sender, receiver), in the order of the outcomes."""
        return [
            (sender, receiver)
            for sender, with_it in zip(self.senders, self.receivers, strict=True)
            for receiver in with_it
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What one policy did to a trace. Counts are int64; rates are of sums over groups, never means of rates."""

    family: Family
    sender: float  # factors; 1.0 where unused
    receiver: float
    steps_G: np.ndarray  # `Group.step`
    counts_GNP: np.ndarray
    expert_NPE: np.ndarray
    source_PS: np.ndarray
    place_PR: np.ndarray
    column_PC: np.ndarray
    documents_D: np.ndarray  # numbers as in the trace
    document_PD: np.ndarray
    weight_NP: np.ndarray  # float64, combine weight
    away_P: np.ndarray  # assignments whose expert is on another shard than the sender
    shard_imbalance_GN: np.ndarray  # most kept rows of a destination shard over their mean
    expert_imbalance_GN: np.ndarray  # the same of experts
    wanted_shard_imbalance_GN: np.ndarray  # of all valid rows, kept or not
    wanted_expert_imbalance_GN: np.ndarray

    @property
    def settings(self) -> EPConfig:
        return self.family.at(self.sender, self.receiver)

    @property
    def total_P(self) -> np.ndarray:
        return self.counts_GNP.sum(axis=(0, 1))

    @property
    def kept_away(self) -> int:
        """Rows that leave their shard, in all groups and layers."""
        return int(self.away_P[0] - self.away_P[1:].sum())

    @property
    def lost_weight_2(self) -> np.ndarray:
        """Dropped combine weight over all valid weight, of senders and of receivers."""
        total_P = self.weight_NP.sum(axis=0)
        return total_P[1:] / total_P[0] if total_P[0] > 0 else np.zeros(2)


def replay(
    groups: Iterable[Group], requests: Sequence[Request], *, num_experts: int, sequence_length: int
) -> list[list[Outcome]]:
    """Outcomes [request][pair] over all groups, whose number of shards is that of the requests' families."""
    sums = [[_Sum() for _ in request.pairs] for request in requests]
    sizes = dict(num_experts=num_experts, sequence_length=sequence_length)
    waiting = None  # the layer before is counted while the plans of this one are made
    for group in groups:
        where = locate(group, sequence_length)
        for layer in range(len(group.expert_ids_NSTK)):
            launched = [list(_launch(request, group, layer, sizes)) for request in requests]
            if waiting:
                _add(sums, requests, *waiting)
            waiting = (group, layer, where, num_experts, launched)
    if waiting:
        _add(sums, requests, *waiting)
    return [
        [total.outcome(request.family, *pair) for pair, total in zip(request.pairs, of_request, strict=True)]
        for request, of_request in zip(requests, sums, strict=True)
    ]


def _launch(request: Request, group: Group, layer: int, sizes: dict[str, int]) -> Iterator:
    """Fates [I,J,S,T,K] on their way, of all sender factors at once or of one after the other."""
    ids_STK = group.expert_ids_NSTK[layer]
    largest = request.family.at(max(request.senders), max(map(max, request.receivers)))
    together = len(request.senders) if ids_STK.size * len(request.pairs) <= MOST_FATES_BYTES else 1
    for first in range(0, len(request.senders), together):
        some = slice(first, first + together)
        factors = dict(settings=largest, senders=request.senders[some], receivers=request.receivers[some])
        yield simulate_factors(ids_STK, group.weights_NSTK[layer], group.valid_ST, **sizes, **factors)


def _add(sums, requests, group: Group, layer: int, where: Where, num_experts: int, launched) -> None:
    """Counts one layer of one group under all requests."""
    valid: dict[int, Counts] = {}  # by pre-mix: who sends depends on it
    for of_request, request, parts in zip(sums, requests, launched, strict=True):
        premix = request.family.premix
        if premix not in valid:
            valid[premix] = count_valid(group, layer, where, num_experts, premix)
        fates = (fate_STK for part in parts for fate_JSTK in np.asarray(part) for fate_STK in fate_JSTK)
        for total, fate_STK in zip(of_request, fates, strict=True):
            drops = count_drops(fate_STK, group, layer, where, num_experts, premix)
            total.add(group.step, layer, where, valid[premix], drops, request.family.shards)


class _Sum:
    """The sums of one policy, built up a layer at a time."""

    def __init__(self):
        self.steps: list[int] = []  # of a group
        self.counts: list[list[np.ndarray]] = []  # [group][layer] -> [P]
        self.imbalances: list[list[tuple[float, ...]]] = []
        self.layers: list[list[np.ndarray]] = []  # [layer] -> expert [P,E], weight [P]
        self.everywhere: list[np.ndarray] = []  # source, place, column, away
        self.documents: list[tuple[np.ndarray, np.ndarray]] = []  # of a group: numbers [d], counts [P,d]

    def add(self, step: int, layer: int, where: Where, valid: Counts, drops: Counts, shards: int) -> None:
        """One more layer of a group; layers come in order, a new group begins with layer 0."""
        both = Counts(*(np.concatenate([[one], two]) for one, two in zip(valid, drops, strict=True)))
        if layer == 0:
            self.counts.append([])
            self.imbalances.append([])
            self.steps.append(step)
            self.documents.append((where.documents_d, np.zeros_like(both.document)))
        self.counts[-1].append(both.expert.sum(axis=1))
        self.documents[-1][1][:] += both.document
        kept_E, wanted_E = both.expert[0] - both.expert[1:].sum(axis=0), both.expert[0]
        self.imbalances[-1].append(
            tuple(
                _most_over_mean(rows) for rows_E in (kept_E, wanted_E) for rows in (_by_shard(rows_E, shards), rows_E)
            )
        )
        if layer == len(self.layers):
            self.layers.append([np.zeros_like(both.expert), np.zeros_like(both.weight)])
        self.layers[layer][0] += both.expert
        self.layers[layer][1] += both.weight
        parts = (both.source, both.place, both.column, both.away)
        self.everywhere = [a + b for a, b in zip(self.everywhere, parts, strict=True)] if self.everywhere else [*parts]

    def outcome(self, family: Family, sender: float, receiver: float) -> Outcome:
        """What was added up."""
        source_PS, place_PR, column_PC, away_P = self.everywhere
        documents_D, index = np.unique(np.concatenate([numbers for numbers, _ in self.documents]), return_inverse=True)
        document_PD = np.zeros((3, len(documents_D)), np.int64)
        for stage_D, counts_D in zip(document_PD, np.concatenate([c for _, c in self.documents], axis=1), strict=True):
            np.add.at(stage_D, index, counts_D)
        shard, expert, wanted_shard, wanted_expert = np.moveaxis(np.array(self.imbalances), 2, 0)
        return Outcome(
            family=family,
            sender=sender,
            receiver=receiver,
            steps_G=np.array(self.steps),
            counts_GNP=np.array(self.counts),
            expert_NPE=np.stack([expert for expert, _ in self.layers]),
            source_PS=source_PS,
            place_PR=place_PR,
            column_PC=column_PC,
            documents_D=documents_D,
            document_PD=document_PD,
            weight_NP=np.stack([weight for _, weight in self.layers]),
            away_P=away_P,
            shard_imbalance_GN=shard,
            expert_imbalance_GN=expert,
            wanted_shard_imbalance_GN=wanted_shard,
            wanted_expert_imbalance_GN=wanted_expert,
        )


def _by_shard(rows_E: np.ndarray, shards: int) -> np.ndarray:
    return rows_E.reshape(shards, -1).sum(axis=1)


def _most_over_mean(rows: np.ndarray) -> float:
    """Largest over mean; 1 where there are none."""
    return float(rows.max() / rows.mean()) if rows.any() else 1.0
