"""Problems, meshes and the oracle's answers for the tests of ep_jax.ep.

A problem is one layer's global arrays in mesh order; the router is part of it, so that its gradient is tested too. The
program under test is one jitted function per (mesh, settings, shapes); the oracle is `ep_jax.ep.reference_values` per
ep group plus the chain rule of a softmax router, all in NumPy float64.

Letters: D devices, G ep groups, S ep shards, T tokens (of all shards; of one behind an S), K choices, E experts,
H routed width, F expert hidden width, P stages of the drop report.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ep_jax.ep import EPConfig, reference_values, routed_experts
from ep_jax.ep.reference import INVALID, KEPT, RECEIVER, SENDER, Policy
from ep_jax.mesh import MeshConfig, make_mesh

NUM_DEVICES = 8
QUICK = {"xla_backend_optimization_level": 0}  # LLVM's optimisations take longer than all else here; XLA's own stay
MESHES = ((1, 1, 8), (1, 2, 4), (1, 4, 2), (1, 8, 1), (2, 2, 2))
GRADIENTS = ("rows", "extra_weights", "w_router", "w_gate_up", "w_down")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a problem. The defaults give every mesh of 8 devices several experts and sequences a shard."""

    tokens: int = 16  # per shard
    sequence_length: int = 8
    choices: int = 3
    experts: int = 16
    width: int = 8
    hidden: int = 6


class Problem(NamedTuple):
    """Arguments of `program`, in its order; NumPy arrays of all shards."""

    rows: np.ndarray  # [T,H]
    extra_weights: np.ndarray  # [T,K], added to the router's weights
    w_router: np.ndarray  # [H,E]
    w_gate_up: np.ndarray  # [E,H,2F]
    w_down: np.ndarray  # [E,F,H]
    ids: np.ndarray  # int32 [T,K]
    valid: np.ndarray  # bool [T]
    d_out: np.ndarray  # [T,H]


class Answer(NamedTuple):
    """What the layer must return; fates and values at the original places."""

    out: np.ndarray  # [T,H]
    fate: np.ndarray  # [T,K]
    counts_PE: np.ndarray
    source_counts_DP: np.ndarray
    lost: tuple[float, float]  # dropped / all valid weight, at the sender and at the receiver
    gradients: dict[str, np.ndarray]


@functools.cache
def mesh_of(replica: int, fsdp: int, ep: int):
    return make_mesh(MeshConfig(replica=replica, fsdp=fsdp, ep=ep))


# --- routings: (rng, sizes) -> ids [T,K], valid [T] -------------------------------------------------------------------


def uniform(rng, sizes: Sizes):
    """Balanced routing, every token valid."""
    scores = rng.gumbel(size=(NUM_DEVICES * sizes.tokens, sizes.experts))
    return top(scores, sizes), np.ones(len(scores), bool)


def by_document(rng, sizes: Sizes):
    """Each document (half a sequence) prefers its own few experts; a tenth of the tokens is invalid."""
    tokens, length = NUM_DEVICES * sizes.tokens, sizes.sequence_length // 2
    taste = np.repeat(rng.gumbel(size=(tokens // length, sizes.experts)) * 3, length, axis=0)
    return top(taste + rng.gumbel(size=taste.shape), sizes), rng.random(tokens) < 0.9


def one_expert(rng, sizes: Sizes):
    """Every token chooses the same expert first."""
    ids, valid = uniform(rng, sizes)
    star = sizes.experts // 2
    clash = ids == star
    ids = np.where(clash, ids[:, :1], ids)
    ids[:, 0] = star
    return ids, valid


def empty_shard(rng, sizes: Sizes):
    """Shard 1 holds padding only, the last half of every other sequence too."""
    ids, valid = uniform(rng, sizes)
    by_row = valid.reshape(-1, sizes.sequence_length)
    by_row[::2, sizes.sequence_length // 2 :] = False
    valid[sizes.tokens : 2 * sizes.tokens] = False
    return ids, valid


def nothing_valid(rng, sizes: Sizes):
    """Padding only, on all shards."""
    ids, valid = uniform(rng, sizes)
    return ids, np.zeros_like(valid)


ROUTINGS = (uniform, by_document, one_expert, empty_shard, nothing_valid)


def top(scores, sizes: Sizes):
    """The K best of each row, int32, best first."""
    return np.argsort(-scores, axis=1)[:, : sizes.choices].astype(np.int32)


def problem(routing, sizes: Sizes, seed: int = 0, dtype=np.float32) -> Problem:
    """Random values with the routes of `routing`; `dtype` of rows and expert weights, the rest float32 or wider."""
    rng = np.random.default_rng(seed)
    ids, valid = routing(rng, sizes)
    tokens, wide = len(ids), np.float64 if dtype == np.float64 else np.float32
    return Problem(
        rows=rng.normal(size=(tokens, sizes.width)).astype(dtype),
        extra_weights=rng.random(ids.shape).astype(wide),
        w_router=rng.normal(size=(sizes.width, sizes.experts)).astype(wide),
        w_gate_up=rng.normal(scale=0.5, size=(sizes.experts, sizes.width, 2 * sizes.hidden)).astype(dtype),
        w_down=rng.normal(scale=0.5, size=(sizes.experts, sizes.hidden, sizes.width)).astype(dtype),
        ids=ids,
        valid=valid,
        d_out=rng.normal(size=(tokens, sizes.width)).astype(dtype),
    )


# --- the program under test -------------------------------------------------------------------------------------------


def layer(settings: EPConfig, mesh, sequence_length: int):
    """(problem arrays) -> (sum(out * d_out), (out, DropReport)), not jitted."""

    def loss(rows, extra_weights, w_router, w_gate_up, w_down, ids, valid, d_out):
        scores = jax.nn.softmax(jnp.dot(rows.astype(w_router.dtype), w_router, precision="highest"), axis=-1)
        weights = jnp.take_along_axis(scores, ids, axis=1) + extra_weights
        out, report = routed_experts(
            rows, ids, weights, valid, w_gate_up, w_down, sequence_length=sequence_length, mesh=mesh, settings=settings
        )
        return jnp.sum(out * d_out), (out, report)

    return loss


def program(settings: EPConfig, mesh, sequence_length: int):
    """Jitted (problem arrays) -> ((loss, (out, DropReport)), gradients of the first five)."""
    step = jax.value_and_grad(layer(settings, mesh, sequence_length), argnums=tuple(range(5)), has_aux=True)
    return jax.jit(step, compiler_options=QUICK)


# --- the oracle -------------------------------------------------------------------------------------------------------


def policy_of(settings: EPConfig) -> Policy:
    names = (
        "transport",
        "sender_factor",
        "receiver_factor",
        "order",
        "slots",
        "receive",
        "agreed",
        "waves",
        "rescale",
        "premix",
    )
    return Policy(**{name: getattr(settings, name) for name in names})


def oracle(given: Problem, settings: EPConfig, shards: int, sequence_length: int) -> Answer:
    """The answer of the reference, one ep group of `shards` after the other, and of the router's chain rule."""
    rows, w_router = given.rows.astype(np.float64), given.w_router.astype(np.float64)
    scores_TE = softmax(rows @ w_router)
    weights_TK = np.take_along_axis(scores_TE, given.ids, axis=1) + given.extra_weights
    options = {"sequence_length": sequence_length, "policy": policy_of(settings)}
    out, fate, grads = [], [], []
    for group in range(NUM_DEVICES // shards):
        parts = grouped(shards, group, rows, given.ids, weights_TK, given.valid, given.d_out)
        inputs = (*parts[:4], given.w_gate_up, given.w_down)
        out_STH, fates = reference_values.forward(*inputs, **options)
        out.append(out_STH)
        fate.append(fates.fate)
        grads.append(reference_values.gradients(*inputs, parts[4], **options))
    fate_TK = np.concatenate(fate).reshape(given.ids.shape)
    joined = {name: np.concatenate([g[name] for g in grads]) for name in ("rows", "weights")}
    d_weights_TK = joined["weights"].reshape(given.ids.shape)
    d_logits_TE = d_softmax(scores_TE, given.ids, d_weights_TK)
    gradients = {
        "rows": joined["rows"].reshape(rows.shape) + d_logits_TE @ w_router.T,
        "extra_weights": d_weights_TK,
        "w_router": rows.T @ d_logits_TE,
        "w_gate_up": sum(g["w_gate_up"] for g in grads),
        "w_down": sum(g["w_down"] for g in grads),
    }
    return Answer(
        out=np.concatenate(out).reshape(rows.shape),
        fate=fate_TK,
        counts_PE=np.stack([np.bincount(given.ids[m], minlength=len(given.w_down)) for m in stages(fate_TK)]),
        source_counts_DP=np.stack([m.reshape(NUM_DEVICES, -1).sum(axis=1) for m in stages(fate_TK)], axis=1),
        lost=lost_weight(fate_TK, weights_TK),
        gradients=gradients,
    )


def grouped(shards: int, group: int, *arrays):
    """The part [S,T,...] of one ep group of each global array [all tokens, ...] in mesh order."""
    return [x.reshape(-1, shards, len(x) // NUM_DEVICES, *x.shape[1:])[group] for x in arrays]


def stages(fate_TK):
    """Masks of valid assignments, sender drops and receiver drops."""
    return fate_TK != INVALID, fate_TK == SENDER, fate_TK == RECEIVER


def lost_weight(fate_TK, weights_TK) -> tuple[float, float]:
    valid, sender, receiver = (weights_TK[mask].sum() for mask in stages(fate_TK))
    return (sender / valid, receiver / valid) if valid else (0.0, 0.0)


def softmax(logits_TE):
    exponent = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    return exponent / exponent.sum(axis=1, keepdims=True)


def d_softmax(scores_TE, ids_TK, d_weights_TK):
    """Gradient for the logits of weights[t,k] = scores[t, ids[t,k]]."""
    d_scores_TE = np.zeros_like(scores_TE)
    np.put_along_axis(d_scores_TE, ids_TK, d_weights_TK, axis=1)  # ids are distinct within a row
    return scores_TE * (d_scores_TE - (d_scores_TE * scores_TE).sum(axis=1, keepdims=True))


# --- comparisons ------------------------------------------------------------------------------------------------------


def check_answer(result, wanted: Answer, values: float = 1e-5, gradients: float = 2e-5) -> None:
    """Asserts that a program's result is the oracle's: fates and counts exactly, numbers within relative errors."""
    (_, (out, report)), grads = result
    np.testing.assert_array_equal(np.asarray(report.fate_TK), wanted.fate)
    check_counts(report, wanted)
    np.testing.assert_allclose(report.lost_weight, wanted.lost, rtol=0, atol=1e-5)
    check_close("out", out, wanted.out, values)
    for name, gradient in zip(GRADIENTS, grads, strict=True):
        check_close(name, gradient, wanted.gradients[name], gradients)


def check_counts(report, wanted: Answer) -> None:
    """Counts per expert and per source shard are exact int32, and every valid assignment has one fate."""
    assert report.counts_PE.dtype == report.source_counts_DP.dtype == jnp.int32
    np.testing.assert_array_equal(report.counts_PE, wanted.counts_PE)
    np.testing.assert_array_equal(report.source_counts_DP, wanted.source_counts_DP)
    kept = int((np.asarray(report.fate_TK) == KEPT).sum())
    valid, sender, receiver = (int(x) for x in (report.valid, report.sender, report.receiver))
    assert kept + sender + receiver == valid == int((wanted.fate != INVALID).sum())
    assert float(report.drop_rate) == (np.float32(sender + receiver) / np.float32(valid) if valid else 0.0)


def check_close(name: str, found, wanted, tolerance: float) -> None:
    """Largest absolute error over the largest wanted value; exactly zero where everything wanted is zero."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    error, scale = np.abs(found - wanted).max(), np.abs(wanted).max()
    assert error <= tolerance * scale, f"{name}: error {error / scale if scale else error:.2e} above {tolerance}"


def check_same_bits(first, second) -> None:
    """Asserts that two pytrees of arrays are equal bit for bit."""
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)
