"""Labelled synthetic routing: what a policy does to a skew whose cause is known, for tests and teaching.

Letters: N layers, S source shards, T tokens of a shard (t: some of them), K choices, E experts, d documents of a shard,
G = S*d documents of a step.

    balanced       valid token t of a shard goes to experts t*K .. t*K+K-1 mod E: every expert gets exactly the same
    uniform        every token chooses at random: the noise that is left when nothing is skewed
    global_skew    expert e is exp(sigma * N(0,1)) times as popular, with every token of every shard and step
    document_skew  each document has a taste of its own; over all documents of a step, experts are equally popular

Tokens choose by Gumbel top-k: the K experts with the largest score = logit + noise, in that order, distinct. Weights
are sigmoids of how far each score is above the best one left out, renormalised: about as flat as sigmoid routers make
them. In `document_skew` the logits of a document are sigma * N(0,1) + bias_E. The bias stands for a router whose
balancing has converged: with it, all experts expect the same load over the documents of the step. Scores are like
arrival times of a race at rates exp(logit), and a token takes the first K to arrive; so it takes an expert with
probability 1 - exp(-tau * rate), tau such that these sum to K. Bias and tau are found by iteration. Documents of a
shard are equally long up to a token and may run over several rows; every step and layer has new tastes. Nothing here
was recorded from a model.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from ep_jax.fields import ConfigError
from ep_jax.traces.file import TraceHeader, TraceStep, id_type

KINDS = ("balanced", "uniform", "global_skew", "document_skew")
SKEWED = ("global_skew", "document_skew")  # kinds that sigma matters to
BALANCE_TOLERANCE = 1e-3  # of an expert's expected load
BALANCE_ROUNDS = 200  # a dozen is enough for sigma below 2
TOKENS_AT_ONCE = 4096  # bounds memory: noise of so many tokens for all experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Skew:
    kind: str
    sigma: float
    seed: int
    documents: int  # of a shard
    padding: int  # columns of a row


def generate(
    kind: str,
    *,
    shards: int,
    rows_per_shard: int,
    sequence_length: int,
    num_experts: int,
    experts_per_token: int,
    num_layers: int = 1,
    steps: int = 1,
    documents_per_shard: int | None = None,
    sigma: float = 1.47,
    seed: int = 0,
    padding_fraction: float = 0.0,
) -> Iterator[TraceStep]:
    """Steps 1 to `steps` of one ep group of `shards`, a microbatch each; the same arguments give the same steps.

    Args:
        kind: one of KINDS.
        rows_per_shard: packed rows of a shard, of sequence_length tokens each.
        documents_per_shard: equally long ones; one a row if left out.
        sigma: strength of the skew, in logits; 1.47 resembles a published production run at 64 shards, 384 experts,
            top-8 and 16 documents a shard.
        padding_fraction: invalid columns at the end of each row, rounded to whole columns.

    Raises ConfigError, before the first step is made.
    """
    documents = rows_per_shard if documents_per_shard is None else documents_per_shard
    padding = round(padding_fraction * sequence_length)
    valid_tokens = rows_per_shard * (sequence_length - padding)
    sizes = (shards, rows_per_shard, sequence_length, num_layers, steps, documents)
    names = ("shards", "rows_per_shard", "sequence_length", "num_layers", "steps", "documents_per_shard")
    _check("kind", kind, kind in KINDS, f"one of {', '.join(KINDS)}")
    for name, size in zip(names, sizes, strict=True):
        _check(name, size, size >= 1, "at least 1")
    _check("num_experts", num_experts, 2 <= num_experts <= 65536, "2 to 65536")
    _check("experts_per_token", experts_per_token, 1 <= experts_per_token < num_experts, f"1 to {num_experts - 1}")
    _check("sigma", sigma, 0 <= sigma <= 5, "0 to 5")
    _check("seed", seed, seed >= 0, "at least 0")
    _check("padding_fraction", padding_fraction, padding_fraction >= 0 and padding < sequence_length, "0 to below 1")
    _check("documents_per_shard", documents, documents <= valid_tokens, f"at most {valid_tokens}, the valid tokens")
    whole = valid_tokens * experts_per_token % num_experts == 0
    _check(
        "num_experts",
        num_experts,
        whole or kind != "balanced",
        f"with balanced, a divisor of {valid_tokens * experts_per_token}, the valid assignments of a shard",
    )
    strength = f" sigma {sigma:g}" if kind in SKEWED else ""
    header = TraceHeader(
        num_experts=num_experts,
        sequence_length=sequence_length,
        ep=shards,
        source=f"synthetic {kind}{strength} seed {seed}",
    )
    shape = (num_layers, 1, shards, rows_per_shard * sequence_length, experts_per_token)
    skew = _Skew(kind=kind, sigma=sigma, seed=seed, documents=documents, padding=padding)
    return (_step(skew, header, shape, step) for step in range(1, steps + 1))


def _step(skew: _Skew, header: TraceHeader, shape: tuple[int, int, int, int, int], step: int) -> TraceStep:
    layers, _, shards, tokens, choices = shape
    valid_T, document_T, position_T = _place(tokens, header.sequence_length, skew)
    ids = np.empty(shape, id_type(header.num_experts))
    weights = np.full(shape, 1 / choices, np.float32)
    for layer in range(layers):
        rng = np.random.default_rng([skew.seed, step, layer])
        if skew.kind == "balanced":
            first_T1 = (np.cumsum(valid_T)[:, None] - 1) * choices
            ids[layer] = (first_T1 + np.arange(choices)) % header.num_experts
            continue
        logits_GE = _logits(skew, layer, shards * skew.documents, header.num_experts, choices, rng)
        for shard in range(shards):
            # A padded token chooses like one of the document before it.
            group_T = (shard * skew.documents + document_T) % len(logits_GE)
            ids[layer, 0, shard], weights[layer, 0, shard] = _choose(rng, logits_GE, group_T, choices)
    before_S = ((step - 1) * shards + np.arange(shards)) * skew.documents
    return TraceStep(
        header=header,
        step=step,
        expert_ids_NMSTK=ids,
        weights_NMSTK=weights,
        valid_MST=np.broadcast_to(valid_T, (1, shards, tokens)),
        document_MST=np.where(valid_T, before_S[None, :, None] + document_T, -1),
        position_MST=np.broadcast_to(np.where(valid_T, position_T, -1), (1, shards, tokens)),
    )


def _place(tokens: int, row: int, skew: _Skew) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each token of a shard: validity, its document in the shard, its input in the document; bool and int64 [T]."""
    valid_T = np.arange(tokens) % row < row - skew.padding
    count, rank_T = int(valid_T.sum()), np.cumsum(valid_T) - 1
    document_T = rank_T * skew.documents // count
    first_T = -(-document_T * count // skew.documents)  # rank of the document's first token
    return valid_T, document_T, rank_T - first_T


def _logits(
    skew: _Skew, layer: int, documents: int, experts: int, choices: int, rng: np.random.Generator
) -> np.ndarray:
    """float64 [G,E], or [1,E] where all documents have the same taste."""
    if skew.kind == "document_skew":
        return balance(skew.sigma * rng.standard_normal((documents, experts)), choices)
    if skew.kind == "global_skew":
        return skew.sigma * np.random.default_rng([skew.seed, 0, layer]).standard_normal((1, experts))
    return np.zeros((1, experts))


def balance(logits_GE: np.ndarray, choices: int) -> np.ndarray:
    """`logits_GE` plus one bias per expert, so that all experts expect the same load over equally long documents."""
    bias_E = np.zeros(logits_GE.shape[1])
    for _ in range(BALANCE_ROUNDS):
        load_E = chosen_probability(logits_GE + bias_E[None], choices).mean(axis=0) * bias_E.size / choices
        if np.abs(load_E - 1).max() < BALANCE_TOLERANCE:
            break
        bias_E -= np.log(load_E)
    return logits_GE + bias_E[None]


def chosen_probability(logits_GE: np.ndarray, choices: int) -> np.ndarray:
    """[G,E]: how likely Gumbel top-k chooses each expert, to within a percent or two; rows sum to `choices`."""
    rate_GE = np.exp(logits_GE - logits_GE.max(axis=1, keepdims=True))
    rate_GE /= rate_GE.sum(axis=1, keepdims=True)
    tau_G1 = np.full((len(rate_GE), 1), float(choices))  # below the root of a concave function: Newton goes up to it
    for _ in range(100):
        missed_GE = np.exp(-rate_GE * tau_G1)
        lacking_G1 = choices - (1 - missed_GE).sum(axis=1, keepdims=True)
        if lacking_G1.max() < 1e-6 * choices:
            break
        tau_G1 += lacking_G1 / (rate_GE * missed_GE).sum(axis=1, keepdims=True)
    return 1 - np.exp(-rate_GE * tau_G1)


def _choose(
    rng: np.random.Generator, logits_GE: np.ndarray, group_T: np.ndarray, choices: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T,K], best first, and weights float32 [T,K] of tokens whose logits are those of their group."""
    logits_GE = logits_GE.astype(np.float32)
    ids, weights = [], []
    for start in range(0, len(group_T), TOKENS_AT_ONCE):
        group_t = group_T[start : start + TOKENS_AT_ONCE]
        # -log of an exponential variable is a Gumbel variable; `tiny` keeps an exact zero out of the logarithm.
        noise_tE = rng.standard_exponential((len(group_t), logits_GE.shape[1]), dtype=np.float32)
        cost_tE = np.log(np.maximum(noise_tE, np.finfo(np.float32).tiny)) - logits_GE[group_t]
        # The chosen ones and, behind them, the best one left out.
        best_tE = np.argpartition(cost_tE, choices, axis=1)[:, : choices + 1]
        order_tE = np.argsort(np.take_along_axis(cost_tE, best_tE, axis=1), axis=1, kind="stable")
        best_tE = np.take_along_axis(best_tE, order_tE, axis=1)
        cost_tE = np.take_along_axis(cost_tE, best_tE, axis=1)
        weight_tK = 1 / (1 + np.exp(cost_tE[:, :-1] - cost_tE[:, -1:]))
        ids.append(best_tE[:, :-1])
        weights.append(weight_tK / weight_tK.sum(axis=1, keepdims=True))
    return np.concatenate(ids), np.concatenate(weights)


def _check(name: str, value: object, right: bool, allowed: str) -> None:
    if not right:
        raise ConfigError(f"{name} = {value!r}: allowed is {allowed}")
