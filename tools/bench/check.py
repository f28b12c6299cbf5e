"""Whether a layer computed the right thing: outputs and all four gradients against float32, on a sample.

Letters: T tokens of all shards, t checked tokens, n assignments of one expert, H row width, F expert hidden width,
E experts, K choices.

Outputs and the gradients of rows and combine weights are checked for some tokens; gradients of expert weights for two
experts in whole: the most chosen one, and the last one, behind which the unused tail of a buffer lies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ep_jax.ep.drops import KEPT

CHECKED_TOKENS = 32
# These run once a variant; to choose their fastest kernels would take longer.
UNTUNED = functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
# By the dtype of the rows, or by `ep.payload` where that is narrower: e4m3 alone costs about 4 %.
TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-5, "float8_e4m3": 8e-2}


def check(
    problem: Any, fates_TK: np.ndarray, out_TH: Any, gradients: Any, payload: str = "compute"
) -> tuple[float, float]:
    """(relative error of the outputs, the largest one of the gradients) against a float32 layer that drops alike.

    problem: a `tools.bench.layer.Problem`. gradients: of rows, combine weights, w_in and w_out. payload: as
    `ep.payload`. Raises ArithmeticError when an error is too large or not a number.
    """
    d_rows_TH, d_weights_TK, d_in_EH2F, d_last_EFH = gradients
    kept_TK, ids_TK = fates_TK == KEPT, np.asarray(problem.ids_TK)
    tokens = np.random.default_rng(0).choice(len(ids_TK), CHECKED_TOKENS, replace=False)
    given = [np.asarray(x[tokens], np.float32) for x in (problem.rows_TH, problem.weights_TK, problem.d_out_TH)]
    wanted = _token_reference(*given, ids_TK[tokens], kept_TK[tokens], problem.w_in_EH2F, problem.w_out_EFH)
    pairs = {
        name: (got[tokens], want)
        for name, got, want in zip(
            ("output", "gradient of rows", "gradient of combine weights"),
            (out_TH, d_rows_TH, d_weights_TK),
            wanted,
            strict=True,
        )
    }
    counts = np.bincount(ids_TK.ravel(), minlength=problem.w_in_EH2F.shape[0])
    for expert in {int(counts.argmax()), len(counts) - 1}:
        d_in_H2F, d_last_FH = _expert_gradients(problem, ids_TK, kept_TK, expert)
        pairs[f"gradient of w_in of expert {expert}"] = d_in_EH2F[expert], d_in_H2F
        pairs[f"gradient of w_out of expert {expert}"] = d_last_EFH[expert], d_last_FH
    errors = {name: relative_error(got, want) for name, (got, want) in pairs.items()}
    allowed = TOLERANCE[problem.rows_TH.dtype.name if payload == "compute" else payload]
    for name, error in errors.items():
        if not error <= allowed:
            raise ArithmeticError(f"{name}: relative error {error:.1e}, allowed {allowed:.0e}")
    return errors.pop("output"), max(errors.values())


def relative_error(got: Any, want: Any) -> float:
    """|got - want| / |want| in the Euclidean norm; 0 where both are zero, infinite where only `want` is."""
    difference, size = _norms(got, want)
    return float(difference / size) if size else float("inf") if difference else 0.0


@UNTUNED
def _norms(got, want):
    got, want = got.astype(jnp.float32), jnp.asarray(want)
    return jnp.linalg.norm((got - want).reshape(-1)), jnp.linalg.norm(want.reshape(-1))


def _expert_gradients(problem: Any, ids_TK: np.ndarray, kept_TK: np.ndarray, expert: int) -> tuple[Any, Any]:
    """Float32 gradients of one expert's weights, from every assignment to it; dropped ones count nothing."""
    token_n, choice_n = np.nonzero(ids_TK == expert)
    weight_n = np.where(kept_TK[token_n, choice_n], np.asarray(problem.weights_TK)[token_n, choice_n], 0)
    rows_nH, d_out_nH = problem.rows_TH[token_n], problem.d_out_TH[token_n]
    return _expert_reference(rows_nH, weight_n, d_out_nH, problem.w_in_EH2F[expert], problem.w_out_EFH[expert])


@UNTUNED
def _expert_reference(rows_nH, weight_n, d_out_nH, w_in_H2F, w_out_FH):
    rows_nH, d_out_nH, w_in, w_out = (x.astype(jnp.float32) for x in (rows_nH, d_out_nH, w_in_H2F, w_out_FH))
    _, pull = jax.vjp(lambda w_in, w_out: _expert(rows_nH, w_in, w_out), w_in, w_out)
    return pull(weight_n[:, None] * d_out_nH)


@UNTUNED
def _token_reference(rows_tH, weights_tK, d_out_tH, ids_tK, kept_tK, w_in_EH2F, w_out_EFH):
    """Outputs, row gradients and weight gradients of t tokens in float32, one expert after the other."""

    def token(x_H, weight_K, id_K, keep_K):
        def one_expert(expert):
            return _expert(x_H, w_in_EH2F[expert].astype(jnp.float32), w_out_EFH[expert].astype(jnp.float32))

        return jnp.sum(jnp.where(keep_K, weight_K, 0)[:, None] * lax.map(one_expert, id_K), axis=0)

    def with_gradients(arguments):
        x_H, weight_K, d_out_H, id_K, keep_K = arguments
        out, pull = jax.vjp(lambda x, weight: token(x, weight, id_K, keep_K), x_H, weight_K)
        return out, *pull(d_out_H)

    return lax.map(with_gradients, (rows_tH, weights_tK, d_out_tH, ids_tK, kept_tK))


def _expert(x, w_in_H2F, w_out_FH):
    gate, up = jnp.split(jnp.matmul(x, w_in_H2F, precision="highest"), 2, axis=-1)
    return jnp.matmul(jax.nn.silu(gate) * up, w_out_FH, precision="highest")
