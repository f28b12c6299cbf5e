"""The protocol in plain Python: who sends what, what is dropped, and where each row lands.

This is the oracle that every transport is tested against (with reference_values.py for what comes out), and the place
to learn the protocol from. It follows the specification event by event: an event is one `Assignment`, a (token, choice)
pair of a valid token. It is slow, it moves no data between devices, and it shares no code with the transports.

One call describes one ep group; groups along the `fsdp` and `replica` axes are separate calls.

Shapes: S ep shards, T tokens per shard, K choices per token, E experts (e = E / S on each shard). Expert g lives on
shard g // e.

Where the specification leaves room, this file decides:
 * Limits at run time keep the upper bounds of the buffers (T tokens, static sender pool): what can occur is never more,
   so no fate depends on the choice.
 * A row that the receiver of `pooled_wave` drops was sent: it has a destination, wave and slot, and row -1. An
   assignment dropped at its sender, or by agreement before any row moves, has -1 everywhere.
 * Rows are numbered from 0 in each wave, with the static capacities. Receive `expert`: local_expert * R + rank. Receive
   `pool`: no gaps, an expert starts where the one before it ends. `fixed_cell`: (local_expert * S + source) * C + slot.
 * Ragged waves: groups of ceil(e / W) experts can use up the experts in fewer than W waves; there are no empty waves.
   A wave's pool is ceil(cr * K * V * experts_in_wave / E), at most S * T * min(K, experts_in_wave).
 * `dense` moves nothing: the destination is the token's own shard, and wave, slot and row are -1; pre-mix is ignored.
 * Lost weight is 0 where no valid weight exists. Order `weight` compares numbers, so -0.0 ties with 0.0.
 * Pre-mix: position and validity travel with the row; two rows of one position are ranked by their place in the mixed
   shard, which for unmixed shards is the order of their sequences. Fates are reported at the original shard and token.
 * Expert ids and weights of invalid tokens are never looked at.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

KEPT, SENDER, RECEIVER, INVALID = range(4)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One row of the transport table with its settings; settings that the transport does not use are ignored.

    The defaults are the published protocol, not the defaults of the training stack. Raises ValueError for an unknown
    name, waves < 1, and waves of `ring`, which has one.
    """

    transport: str
    sender_factor: float = 1.15
    receiver_factor: float = 1.15
    order: str = "sequence"
    slots: str = "assignment"
    receive: str = "expert"
    agreed: str = "round_robin"
    waves: int = 1
    rescale: bool = False
    premix: int = 1

    def __post_init__(self):
        tables = {"transport": TRANSPORTS, "order": ORDERS, "slots": SLOTS, "receive": RECEIVERS, "agreed": AGREEMENTS}
        for name, table in tables.items():
            if getattr(self, name) not in table:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(table)}")
        if self.waves < 1 or (self.transport == "ring" and self.waves > 1):
            raise ValueError(f"waves = {self.waves}: must be at least 1, and 1 for ring")


@dataclass(frozen=True)
class Sizes:
    """The static sizes of one ep group."""

    shards: int
    tokens: int
    choices: int
    experts: int

    @property
    def local_experts(self) -> int:
        return self.experts // self.shards


@dataclass(slots=True)
class Assignment:
    """One choice of one valid token, on its way through the protocol.

    home, home_token: where the token lives. source, token: where it is sent from (elsewhere only under pre-mix).
    The second block is what the protocol decides.
    """

    home: int
    home_token: int
    source: int
    token: int
    choice: int
    expert: int
    weight: float
    position: int

    fate: int = KEPT
    destination: int = -1
    wave: int = -1
    slot: int = -1
    row: int = -1


@dataclass(frozen=True)
class Fates:
    """What happened to each assignment, at its original place: arrays [S,T,K], -1 where there is nothing to say.

    fate: int8, 0 kept, 1 dropped at the sender, 2 dropped at the receiver, 3 invalid token. The others are int64:
    destination shard, wave, slot in the sender's pool or cell, row in the receiver's expert buffer of that wave.
    """

    fate: np.ndarray
    destination: np.ndarray
    wave: np.ndarray
    slot: np.ndarray
    row: np.ndarray


@dataclass(frozen=True)
class Counts:
    """Assignments by source shard and expert, int64 [S,E]: valid ones, and those each stage dropped.

    `.sum(0)` is per expert, `.sum(1)` per source shard. lost_*: dropped / all valid combine weight, before rescaling.
    """

    valid: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    lost_sender: float
    lost_receiver: float


# --- capacities -----------------------------------------------------------------------------------


def ceil_div(amount, parts: int) -> int:
    """The smallest integer that is not below amount / parts, for an int or an exact fraction."""
    return -(-amount // parts)


def capacity(factor: float, count: int | Fraction, parts: int, at_most: int) -> int:
    """ceil(factor * count / parts), at least 1, at most what can occur. The factor is exactly its decimal text."""
    return max(1, min(ceil_div(Fraction(repr(float(factor))) * count, parts), at_most))


def sender_pool(sizes: Sizes, policy: Policy, valid_tokens: int) -> int:
    """P: slots per (source, destination, wave). valid_tokens of the shard give the limit, T gives the buffer."""
    if policy.slots == "token":
        share = Fraction(repr(float(policy.sender_factor))) * visiting_share(sizes)
        rate = Fraction(ceil_div(1024 * share, 1), 1024)
        return capacity(1.0, rate * valid_tokens, policy.waves, ceil_div(sizes.tokens, policy.waves))
    at_most = ceil_div(sizes.tokens * min(sizes.choices, sizes.local_experts), policy.waves)
    return capacity(policy.sender_factor, sizes.choices * valid_tokens, sizes.shards * policy.waves, at_most)


def visiting_share(sizes: Sizes) -> Fraction:
    """Of tokens that choose an expert of one shard when all choices are equally likely."""
    elsewhere = Fraction(1)
    for choice in range(sizes.choices):  # each choice misses the shard, of the experts that are left
        elsewhere *= Fraction(sizes.experts - sizes.local_experts - choice, sizes.experts - choice)
    return 1 - elsewhere


def cell(sizes: Sizes, policy: Policy, valid_tokens: int) -> int:
    """C: slots per (source, expert, wave). valid_tokens of the shard give the limit, T gives the buffer."""
    at_most = ceil_div(sizes.tokens, policy.waves)
    return capacity(policy.sender_factor, sizes.choices * valid_tokens, sizes.experts * policy.waves, at_most)


def expert_rows(sizes: Sizes, policy: Policy, valid_tokens: int) -> int:
    """R: rows per (expert, wave). valid_tokens of the ep group give the limit, S * T gives the buffer."""
    at_most = sizes.shards * min(sender_pool(sizes, policy, sizes.tokens), sizes.tokens)
    return capacity(policy.receiver_factor, sizes.choices * valid_tokens, sizes.experts * policy.waves, at_most)


def destination_pool(sizes: Sizes, policy: Policy, valid_tokens: int, experts_in_wave: int) -> int:
    """N: rows per (destination, wave). valid_tokens of the ep group give the limit, S * T gives the buffer."""
    at_most = sizes.shards * sizes.tokens * min(sizes.choices, experts_in_wave)
    return capacity(policy.receiver_factor, sizes.choices * valid_tokens * experts_in_wave, sizes.experts, at_most)


def fill(n: list[int], pool: int) -> list[int]:
    """Shares `pool` among claims n: the same level for all, nobody more than it claims, leftovers to the first in line.

    fill([5, 1, 4], 8) is [4, 1, 3]: level 3 takes 3 + 1 + 3, and the one left goes to the first that claims more.
    """
    level = 0
    while level < max(n, default=0) and sum(min(claim, level + 1) for claim in n) <= pool:
        level += 1
    shares = [min(claim, level) for claim in n]
    left = pool - sum(shares)
    for i, claim in enumerate(n):
        if claim > level and left > 0:
            shares[i] += 1
            left -= 1
    return shares


# --- sender and receiver --------------------------------------------------------------------------

# Who goes first. `token` increases with the sequence, so it stands for it among tokens of one position.
ORDERS = {
    "sequence": lambda a: (a.token, a.choice),
    "position": lambda a: (a.position, a.token, a.choice),
    "choice": lambda a: (a.choice, a.position, a.token),
    "weight": lambda a: (-a.weight, a.token, a.choice),
}


def send(queue: list[Assignment], slots: int, sizes: Sizes, policy: Policy) -> None:
    """Deals the assignments of one pool or cell over the waves, like cards; those past the last slot are dropped."""
    for rank, a in enumerate(sorted(queue, key=ORDERS[policy.order])):
        slot, wave = divmod(rank, policy.waves)
        if slot < slots:
            a.destination, a.wave, a.slot = a.expert // sizes.local_experts, wave, slot
        else:
            a.fate = SENDER


def send_tokens(queue: list[Assignment], slots: int, sizes: Sizes, policy: Policy) -> None:
    """As `send`, but one slot for all assignments of a token, which ranks as the first of them would."""
    of_token = {}
    for a in sorted(queue, key=ORDERS[policy.order]):
        of_token.setdefault(a.token, []).append(a)
    for rank, assignments in enumerate(of_token.values()):
        slot, wave = divmod(rank, policy.waves)
        for a in assignments:
            if slot < slots:
                a.destination, a.wave, a.slot = a.expert // sizes.local_experts, wave, slot
            else:
                a.fate = SENDER


SLOTS = {"assignment": send, "token": send_tokens}


def receive_expert(queues: list[list[Assignment]], sizes: Sizes, policy: Policy, valid_tokens: int) -> None:
    """Each expert has R rows of its own. queues: per local expert, the arrivals of one wave in acceptance order."""
    buffer_rows = expert_rows(sizes, policy, sizes.shards * sizes.tokens)
    limit = expert_rows(sizes, policy, valid_tokens)
    for local_expert, queue in enumerate(queues):
        accept(queue, quota=limit, first_row=local_expert * buffer_rows)


def receive_pool(queues: list[list[Assignment]], sizes: Sizes, policy: Policy, valid_tokens: int) -> None:
    """The experts of a shard share their rows: a quiet expert's rows go to busy ones."""
    rows = sizes.local_experts * expert_rows(sizes, policy, valid_tokens)
    per_slot = min(sizes.choices, sizes.local_experts) if policy.slots == "token" else 1
    arrivals = sizes.shards * sender_pool(sizes, policy, sizes.tokens) * per_slot
    first_row = 0
    for queue, quota in zip(queues, fill([len(queue) for queue in queues], min(rows, arrivals)), strict=True):
        accept(queue, quota, first_row)
        first_row += quota


def accept(queue: list[Assignment], quota: int, first_row: int) -> None:
    """The first `quota` of a queue get consecutive rows, the rest are dropped."""
    for rank, a in enumerate(queue):
        if rank < quota:
            a.row = first_row + rank
        else:
            a.fate = RECEIVER


RECEIVERS = {"expert": receive_expert, "pool": receive_pool}


# --- agreed acceptance ----------------------------------------------------------------------------
# counts[expert][source] of one destination and wave, and the rows of its pool -> kept[expert][source].
def tail(counts: list[list[int]], pool: int) -> list[list[int]]:
    """First come, first served: experts outer, sources inner, until the pool is full."""
    kept = []
    for per_source in counts:
        kept.append([])
        for count in per_source:
            kept[-1].append(min(count, pool))
            pool -= kept[-1][-1]
    return kept


def round_robin(counts: list[list[int]], pool: int) -> list[list[int]]:
    """Experts in order; inside an expert the sources take turns."""
    kept = []
    for per_source in counts:
        kept.append(fill(per_source, pool))
        pool -= sum(kept[-1])
    return kept


def water_fill(counts: list[list[int]], pool: int) -> list[list[int]]:
    """Experts share the pool evenly, and inside an expert the sources share its quota evenly."""
    quotas = fill([sum(per_source) for per_source in counts], pool)
    return [fill(per_source, quota) for per_source, quota in zip(counts, quotas, strict=True)]


AGREEMENTS = {"tail": tail, "round_robin": round_robin, "water_fill": water_fill}


# --- transports -----------------------------------------------------------------------------------
# valid_S: valid tokens of each source shard; their sum is V.
def pooled_wave(assignments: list[Assignment], valid_S: list[int], sizes: Sizes, policy: Policy) -> None:
    """A pool of slots per (source, destination, wave), then a decision at the receiver."""
    for (source, _), queue in group(assignments, lambda a: (a.source, a.expert // sizes.local_experts)).items():
        SLOTS[policy.slots](queue, sender_pool(sizes, policy, valid_S[source]), sizes, policy)
    waves = group([a for a in assignments if a.fate == KEPT], lambda a: (a.destination, a.wave))
    for (destination, _), arrivals in waves.items():
        # Slot p of every source goes before slot p + 1 of any.
        arrivals.sort(key=lambda a: (a.slot, a.source))
        queues = [[a for a in arrivals if a.expert == expert] for expert in experts_of(destination, sizes)]
        RECEIVERS[policy.receive](queues, sizes, policy, sum(valid_S))


def fixed_cell(assignments: list[Assignment], valid_S: list[int], sizes: Sizes, policy: Policy) -> None:
    """A cell of slots per (source, expert, wave). The receiver has a place for every slot, so it drops nothing."""
    for (source, _), queue in group(assignments, lambda a: (a.source, a.expert)).items():
        send(queue, cell(sizes, policy, valid_S[source]), sizes, policy)
    buffer_slots = cell(sizes, policy, sizes.tokens)
    for a in assignments:
        if a.fate == KEPT:
            local_expert = a.expert % sizes.local_experts
            a.row = (local_expert * sizes.shards + a.source) * buffer_slots + a.slot


def agreed(assignments: list[Assignment], valid_S: list[int], sizes: Sizes, policy: Policy) -> None:
    """All shards see all counts and agree what to keep before a row moves: `ragged`, `rowwise` and `ring`."""
    cells = group(sorted(assignments, key=ORDERS["sequence"]), lambda a: (a.expert, a.source))
    experts_per_wave = ceil_div(sizes.local_experts, policy.waves)
    for destination in range(sizes.shards):
        for wave, start in enumerate(range(0, sizes.local_experts, experts_per_wave)):
            experts = experts_of(destination, sizes)[start : start + experts_per_wave]
            queues = [[cells.get((expert, source), []) for source in range(sizes.shards)] for expert in experts]
            counts = [[len(queue) for queue in per_source] for per_source in queues]
            pool = destination_pool(sizes, policy, sum(valid_S), len(experts))
            store(queues, AGREEMENTS[policy.agreed](counts, pool), destination, wave)


def store(queues: list[list[list[Assignment]]], kept: list[list[int]], destination: int, wave: int) -> None:
    """Keeps the first assignments of each (expert, source) cell: rows expert-major, source-major, flat order."""
    row = 0
    for cells, kept_counts in zip(queues, kept, strict=True):
        for queue, kept_count in zip(cells, kept_counts, strict=True):
            accept(queue, kept_count, row)
            row += kept_count
            for a in queue[:kept_count]:
                a.destination, a.wave = destination, wave


def dense(assignments: list[Assignment], valid_S: list[int], sizes: Sizes, policy: Policy) -> None:
    """No expert parallelism: the weights come to the token, and nothing is ever dropped."""
    for a in assignments:
        a.destination = a.home


TRANSPORTS = {
    "pooled_wave": pooled_wave,
    "fixed_cell": fixed_cell,
    "ragged": agreed,
    "rowwise": agreed,
    "ring": agreed,
    "dense": dense,
}


def experts_of(shard: int, sizes: Sizes) -> range:
    """The global experts that live on a shard."""
    return range(shard * sizes.local_experts, (shard + 1) * sizes.local_experts)


def group(assignments: list[Assignment], key) -> dict:
    """Assignments by key, in ascending key order."""
    groups = {}
    for a in assignments:
        groups.setdefault(key(a), []).append(a)
    return dict(sorted(groups.items()))


# --- fates and counts -----------------------------------------------------------------------------


def fates(expert_ids, weights, valid, *, num_experts: int, sequence_length: int, policy: Policy) -> Fates:
    """The whole protocol for one ep group.

    expert_ids: integers [S,T,K], distinct in a row. weights: floats [S,T,K], the combine weights. valid: bool [S,T].
    Raises ValueError if S does not divide num_experts, pre-mix not S and T, or ids are out of range or repeated.
    """
    ids_STK, valid_ST = np.asarray(expert_ids), np.asarray(valid, bool)
    shards, tokens_per_shard, choices = ids_STK.shape
    sizes = Sizes(shards, tokens_per_shard, choices, num_experts)
    premix = 1 if policy.transport == "dense" else policy.premix
    if sizes.experts % sizes.shards:
        raise ValueError(f"num_experts = {sizes.experts}: must be a multiple of the {sizes.shards} shards")
    if premix < 1 or sizes.shards % premix or sizes.tokens % premix:
        raise ValueError(f"premix = {premix}: must divide {sizes.shards} shards and {sizes.tokens} tokens")
    for token_ids in ids_STK[valid_ST]:
        if len(set(token_ids)) < sizes.choices or min(token_ids) < 0 or max(token_ids) >= num_experts:
            raise ValueError(f"expert_ids {token_ids}: must be distinct, from 0 to {num_experts - 1}")

    assignments = list_assignments(ids_STK, np.asarray(weights), valid_ST, sequence_length, premix)
    tokens = {(a.source, a.token) for a in assignments}
    valid_S = [sum(source == shard for source, _ in tokens) for shard in range(sizes.shards)]
    TRANSPORTS[policy.transport](assignments, valid_S, sizes, policy)

    result = Fates(np.full(ids_STK.shape, INVALID, np.int8), *(np.full(ids_STK.shape, -1) for _ in range(4)))
    for a in assignments:
        for name in ("fate", "destination", "wave", "slot", "row"):
            getattr(result, name)[a.home, a.home_token, a.choice] = getattr(a, name)
    return result


def list_assignments(ids_STK, weights_STK, valid_ST, sequence_length: int, premix: int) -> list[Assignment]:
    """The assignments of all valid tokens. An invalid token takes part in nothing."""
    assignments = []
    for home, token in np.argwhere(valid_ST).tolist():
        source, source_token = mixed_place(home, token, valid_ST.shape[1], premix)
        for choice, (expert, weight) in enumerate(zip(ids_STK[home, token], weights_STK[home, token], strict=True)):
            place = (home, token, source, source_token)
            assignments.append(Assignment(*place, choice, int(expert), float(weight), token % sequence_length))
    return assignments


def mixed_place(home: int, token: int, tokens: int, premix: int) -> tuple[int, int]:
    """Where pre-mix puts a row: shard and token. Each member of a group deals its rows to all members in turn."""
    member = home % premix
    return home - member + token % premix, member * (tokens // premix) + token // premix


def counts(result: Fates, expert_ids, weights, *, num_experts: int) -> Counts:
    """The drop report: counts by (source shard, expert), and the weight each stage lost. Arguments as in `fates`."""
    expert_ids, weights = np.asarray(expert_ids), np.asarray(weights, np.float64)
    count_3SE = np.zeros((3, len(result.fate), num_experts), np.int64)
    weight_3 = np.zeros(3)
    for s, t, k in np.argwhere(result.fate != INVALID).tolist():
        fate = result.fate[s, t, k]
        count_3SE[fate, s, expert_ids[s, t, k]] += 1
        weight_3[fate] += weights[s, t, k]
    total = weight_3.sum()
    lost_3 = weight_3 / total if total else np.zeros(3)
    lost_sender, lost_receiver = lost_3[SENDER].item(), lost_3[RECEIVER].item()
    return Counts(count_3SE.sum(0), count_3SE[SENDER], count_3SE[RECEIVER], lost_sender, lost_receiver)
