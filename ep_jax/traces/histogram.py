"""Histograms of tokens per expert as traces.

Letters: N layers, S source shards, T tokens of a shard, K choices, E experts, G groups of tokens with a histogram each.

A JSON object {"num_experts": E, "experts_per_token": K, "tokens_per_shard": T, "counts": [N][E], of all
shards together, or [N][S][E]}. Assignments are drawn with exactly these counts and distinct experts in a token. Which
token, which experts together, in which order and, for [N][E], on which shard is random, so `order_known` is false:
nothing of the original is left there for policies that look at order, nor for documents.

What was drawn is said in the header's `source`.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ep_jax.traces.file import TraceError, TraceHeader, TraceStep, id_type
from ep_jax.traces.json_values import integer_of, is_nested, numbers_of, object_of, text_of

HISTOGRAM = ("num_experts", "experts_per_token", "tokens_per_shard", "counts")
SWAPS_PER_ASSIGNMENT = 4  # tried ones; experts then meet in tokens as often as if drawn independently (tested)


def read_histogram(
    path: str | Path, *, sequence_length: int | None = None, steps: int = 1, seed: int = 0
) -> Iterator[TraceStep]:
    """`steps` independent draws with the counts of a histogram, as steps 1 to `steps` of one ep group.

    sequence_length: columns of a packed row, a divisor of tokens_per_shard; the whole shard is one row if left out.
    Rows are documents, weights 1/K. Raises TraceError naming file, field and what is allowed, before the first step.
    """
    fields = object_of(str(path), text_of(Path(path)))
    for name in sorted(fields.keys() ^ set(HISTOGRAM)):
        problem = "is missing" if name in HISTOGRAM else "is unknown"
        raise TraceError(f"{path}: {name} {problem}; allowed are exactly {', '.join(HISTOGRAM)}")
    experts, choices, tokens = (integer_of(str(path), name, fields[name], 1) for name in HISTOGRAM[:3])
    for name, value, highest in (("num_experts", experts, 65536), ("experts_per_token", choices, experts)):
        if value > highest:
            raise TraceError(f"{path}: {name} = {value}; allowed is 1 to {highest}")
    length = tokens if sequence_length is None else sequence_length
    if length < 1 or tokens % length:
        raise TraceError(f"sequence_length = {length}: allowed is a divisor of tokens_per_shard = {tokens} in {path}")
    for name, value, lowest in (("steps", steps, 1), ("seed", seed, 0)):
        if value < lowest:
            raise TraceError(f"{name} = {value}: allowed is at least {lowest}")
    counts = fields["counts"]
    counts = numbers_of(str(path), "counts", counts, "integers", 3 if is_nested(counts, 3) else 2)
    shards = _check_counts(str(path), counts, experts, choices, tokens)
    header = TraceHeader(
        num_experts=experts,
        sequence_length=length,
        ep=shards,
        source=f"histogram {Path(path).name} seed {seed}; order, documents and which experts meet are random",
        order_known=False,
    )
    counts_NGE = counts if counts.ndim == 3 else counts[:, None]
    return (_histogram_step(header, counts_NGE, (shards, tokens, choices), step, seed) for step in range(1, steps + 1))


def _check_counts(where: str, counts: np.ndarray, experts: int, choices: int, tokens: int) -> int:
    """The number of shards. Refuses counts that no assignment of distinct experts can have."""
    if counts.shape[-1] != experts:
        raise TraceError(f"{where}: counts: found {counts.shape[-1]} experts; allowed is num_experts = {experts}")
    sums = counts.sum(axis=-1)
    whole = tokens * choices
    for place in np.ndindex(sums.shape):
        wrong = sums[place] != whole if counts.ndim == 3 else sums[place] != sums[0] or sums[0] % whole or not sums[0]
        if wrong:
            wanted = f"{whole}" if counts.ndim == 3 else f"a multiple of {whole}, the same in all layers"
            raise TraceError(
                f"{where}: counts{list(place)} sums to {sums[place]}; allowed is {wanted} "
                f"(tokens_per_shard x experts_per_token)"
            )
    shards = counts.shape[1] if counts.ndim == 3 else int(sums[0]) // whole
    most = tokens if counts.ndim == 3 else tokens * shards
    for place in np.argwhere((counts < 0) | (counts > most))[:1]:
        raise TraceError(
            f"{where}: counts{place.tolist()} = {counts[tuple(place)]}; allowed is 0 to {most}, the tokens"
        )
    return shards


def _histogram_step(
    header: TraceHeader, counts_NGE: np.ndarray, sizes: tuple[int, int, int], step: int, seed: int
) -> TraceStep:
    shards, tokens, choices = sizes
    layers, groups, _ = counts_NGE.shape
    rng = np.random.default_rng([seed, step])
    drawn = [
        _draw(rng, counts_E, shards * tokens // groups, choices)
        for counts_E in counts_NGE.reshape(-1, header.num_experts)
    ]
    ids_NMSTK = np.stack(drawn).reshape(layers, 1, shards, tokens, choices)
    row_MST = np.arange(shards * tokens).reshape(1, shards, tokens) // header.sequence_length
    return TraceStep(
        header=header,
        step=step,
        expert_ids_NMSTK=ids_NMSTK.astype(id_type(header.num_experts)),
        weights_NMSTK=np.full(ids_NMSTK.shape, 1 / choices, np.float32),
        valid_MST=np.ones(row_MST.shape, bool),
        document_MST=row_MST + (step - 1) * (shards * tokens // header.sequence_length),
        position_MST=np.broadcast_to(np.arange(tokens) % header.sequence_length, row_MST.shape),
    )


def _draw(rng: np.random.Generator, counts_E: np.ndarray, tokens: int, choices: int) -> np.ndarray:
    """int64 [T,K]: ids with exactly these counts, distinct within a token, in random order.

    Laid out one expert after the other, assignment i goes to token i mod T: no expert has more than T, so none meets
    itself. Few different sets of experts arise that way, so random pairs of tokens then exchange random choices,
    wherever neither has the other's already, which keeps the counts.
    """
    experts = rng.permutation(len(counts_E))
    ids_TK = np.repeat(experts, counts_E[experts]).reshape(choices, tokens).T.copy()
    half = tokens // 2
    for _ in range(SWAPS_PER_ASSIGNMENT * choices if half else 0):
        pairs = rng.permutation(tokens)[: 2 * half].reshape(2, half)
        (a, b), (i, j) = pairs, rng.integers(choices, size=(2, half))
        x, y = ids_TK[a, i], ids_TK[b, j]
        free = ~((ids_TK[a] == y[:, None]) | (ids_TK[b] == x[:, None])).any(axis=1)
        ids_TK[a[free], i[free]], ids_TK[b[free], j[free]] = y[free], x[free]
    return rng.permuted(rng.permutation(ids_TK), axis=1)
