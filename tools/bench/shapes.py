"""Named layer shapes and routings of the benchmarks.

Letters: S ep shards, T tokens per shard, H row width, F expert hidden width, E experts, K choices.

A, B and C are those on which other stacks were measured on the same boxes; "hero" is what one GPU of the published
535-billion-parameter run holds (6 of its 384 experts), with the tokens of one wave; "toy" is for machines without GPUs.
"""

import dataclasses

import numpy as np

from ep_jax.fields import ConfigError


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
        Shape(name="hero", tokens=16_384, width=3072, hidden=3072, experts=6, choices=8, experts_per_shard=True),
        Shape(name="toy", tokens=128, width=64, hidden=32, experts=16, choices=4, sequence_length=32),
    )
}
ROUTINGS = ("uniform", "skewed", "balanced")


def shape_of(name: str) -> Shape:
    """Raises ConfigError for a name that is not there."""
    if name not in SHAPES:
        raise ConfigError(f"--shapes {name}: allowed are {', '.join(SHAPES)}")
    return SHAPES[name]


def routing(kind: str, shape: Shape, shards: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(expert ids int32, combine weights float32) [S*T, K] of one layer.

    uniform: K distinct experts at random. skewed: the same with popularity exp(0.5 N(0,1)). balanced: token t to the
    experts t*K .. t*K+K-1 mod E. Weights are a softmax of normal numbers.
    """
    rng = np.random.default_rng(seed)
    tokens, experts = shards * shape.tokens, shape.num_experts(shards)
    if kind == "balanced":
        ids = (np.arange(tokens)[:, None] * shape.choices + np.arange(shape.choices)) % experts
    elif kind in ROUTINGS:
        scores = rng.gumbel(size=(tokens, experts)).astype(np.float32)
        if kind == "skewed":
            scores += 0.5 * rng.standard_normal(experts).astype(np.float32)
        ids = np.argpartition(-scores, shape.choices - 1, axis=1)[:, : shape.choices]
    else:
        raise ConfigError(f"--routing {kind}: allowed are {', '.join(ROUTINGS)}")
    logits = rng.standard_normal(ids.shape)
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return ids.astype(np.int32), weights.astype(np.float32)
