"""Named layer shapes and routings of the benchmarks.

Letters: S ep shards, T tokens per shard, H row width, F expert hidden width, E experts, K choices.

A, B and C are those on which other stacks were measured on the same boxes; "h200" is a layer of configs/h200.toml with
16 sequences on a GPU, whose rows are short; "hero" is what one GPU of the published 535-billion-parameter run holds (6
of its 384 experts), with the tokens of one wave. "few1" and "few2" have 1 and 2 experts and 16 documents a GPU, and the
work of A: with document routing, few2 on 8 GPUs drops by factor about what that run's layer drops on 64 (an NVL72
rack), since fewer experts of a destination even out less. "toy" is for machines without GPUs.
"""

import dataclasses
import functools

import numpy as np

from ep_jax.fields import ConfigError
from ep_jax.traces.file import Trace
from ep_jax.traces.synthetic import generate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One MoE layer on S shards; everything but `tokens` is of the whole ep group."""

    name: str
    tokens: int  # T, per shard
    width: int  # H
    hidden: int  # F
    experts: int  # E, or per shard where `experts_per_shard`
    choices: int  # K
    sequence_length: int = 2048
    experts_per_shard: bool = False

    def num_experts(self, shards: int) -> int:
        return self.experts * shards if self.experts_per_shard else self.experts

    @property
    def rows(self) -> int:
        """Routed rows of a shard."""
        return self.tokens * self.choices

    def flops(self, rows: float, *, backward: bool) -> float:
        """Of the experts' three matrix products on `rows` rows; a backward pass is twice the forward one."""
        return rows * 6 * self.width * self.hidden * (3 if backward else 1)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="A", tokens=16_384, width=3072, hidden=3072, experts=16, choices=4),
        Shape(name="B", tokens=8_192, width=3072, hidden=3072, experts=128, choices=8),
        Shape(name="C", tokens=32_768, width=2048, hidden=1024, experts=64, choices=8),
        Shape(name="h200", tokens=32_768, width=1024, hidden=1024, experts=64, choices=8),
        Shape(name="hero", tokens=16_384, width=3072, hidden=3072, experts=6, choices=8, experts_per_shard=True),
        Shape(name="few1", tokens=32_768, width=3072, hidden=3072, experts=1, choices=2, experts_per_shard=True),
        Shape(name="few2", tokens=32_768, width=3072, hidden=3072, experts=2, choices=2, experts_per_shard=True),
        Shape(name="toy", tokens=128, width=64, hidden=32, experts=16, choices=4, sequence_length=32),
    )
}
ROUTINGS = ("uniform", "skewed", "balanced", "document")
TRACE = "trace:"  # trace:PATH[:LAYER]


def shape_of(name: str) -> Shape:
    """Raises ConfigError for a name that is not there."""
    if name not in SHAPES:
        raise ConfigError(f"--shapes {name}: allowed are {', '.join(SHAPES)}")
    return SHAPES[name]


def check_routing(kind: str) -> str:
    """Raises ConfigError for a kind that is not there; a trace is opened only when it is needed."""
    if kind not in ROUTINGS and not kind.startswith(TRACE):
        raise ConfigError(f"--routing {kind}: allowed are {', '.join(ROUTINGS)}, {TRACE}PATH[:LAYER]")
    return kind


@functools.cache
def routing(kind: str, shape: Shape, shards: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(expert ids int32, combine weights float32) [S*T, K] of one layer.

    uniform: K distinct experts at random. skewed: the same with popularity exp(0.5 N(0,1)). balanced: token t to the
    experts t*K .. t*K+K-1 mod E. Weights of these are a softmax of normal numbers. document: every packed row is a
    document with a taste of its own, experts equally popular over all of them (`ep_jax.traces.synthetic`).
    trace:PATH[:LAYER]: recorded ids and weights of a layer (0 if left out): the valid tokens of all steps in order,
    the first S*T of them, T to each shard.

    Raises ConfigError for another kind, and for a trace that does not fit the shape.
    """
    check_routing(kind)
    if kind.startswith(TRACE):
        ids, weights = _recorded(kind, shape, shards)
    elif kind == "document":
        ids, weights = _by_document(shape, shards, seed)
    else:
        ids, weights = _at_random(kind, shape, shards, seed)
    return ids.astype(np.int32), weights.astype(np.float32)


def _at_random(kind: str, shape: Shape, shards: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens, experts = shards * shape.tokens, shape.num_experts(shards)
    if kind == "balanced":
        ids = (np.arange(tokens)[:, None] * shape.choices + np.arange(shape.choices)) % experts
    else:
        scores = rng.gumbel(size=(tokens, experts)).astype(np.float32)
        if kind == "skewed":
            scores += 0.5 * rng.standard_normal(experts).astype(np.float32)
        ids = np.argpartition(-scores, shape.choices - 1, axis=1)[:, : shape.choices]
    logits = rng.standard_normal(ids.shape)
    return ids, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def _by_document(shape: Shape, shards: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    [step] = generate(
        "document_skew",
        shards=shards,
        rows_per_shard=shape.tokens // shape.sequence_length,
        sequence_length=shape.sequence_length,
        num_experts=shape.num_experts(shards),
        experts_per_token=shape.choices,
        seed=seed,
    )
    return step.expert_ids_NMSTK.reshape(-1, shape.choices), step.weights_NMSTK.reshape(-1, shape.choices)


def _recorded(kind: str, shape: Shape, shards: int) -> tuple[np.ndarray, np.ndarray]:
    path, colon, layer = kind.removeprefix(TRACE).rpartition(":")
    if not (colon and layer.isdecimal()):
        path, layer = kind.removeprefix(TRACE), "0"
    trace, wanted, found = Trace(path), shards * shape.tokens, 0
    ids, weights = [], []
    for step in trace:
        layers, *_, choices = step.expert_ids_NMSTK.shape
        have = {"experts": trace.header.num_experts, "choices": choices}
        need = {"experts": shape.num_experts(shards), "choices": shape.choices}
        if have != need or int(layer) >= layers:
            numbers = [f"{n['experts']} experts and {n['choices']} choices" for n in (have, need)]
            raise ConfigError(
                f"--routing {kind}: has {numbers[0]} in {layers} layers; shape {shape.name} on {shards} devices needs "
                f"{numbers[1]}, and a layer below {layers}"
            )
        ids.append(step.expert_ids_NMSTK[int(layer)][step.valid_MST])
        weights.append(step.weights_NMSTK[int(layer)][step.valid_MST])
        found += len(ids[-1])
        if found >= wanted:
            return np.concatenate(ids)[:wanted], np.concatenate(weights)[:wanted]
    raise ConfigError(
        f"--routing {kind}: has {found} valid tokens; shape {shape.name} on {shards} devices needs {wanted}"
    )
