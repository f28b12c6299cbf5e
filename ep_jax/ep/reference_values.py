"""What comes out of a layer under the protocol, and its gradients, in NumPy float64: the second half of the oracle.

Who is dropped says reference.py. Shapes as there, H row width, F expert hidden width. Rescale: "valid sum" is the sum
of all K weights of a valid token; survivors whose weights sum to 0 give 0.
"""

import numpy as np

from ep_jax.ep.reference import KEPT, Policy, fates


def forward(rows, expert_ids, weights, valid, w_gate_up, w_down, *, sequence_length: int, policy: Policy):
    """Returns (routed output, float64 [S,T,H]; Fates). The output is each token's survivors, weighted and summed.

    rows: [S,T,H]. w_gate_up: [E,H,2F], gate in the first F columns, up in the last F. w_down: [E,F,H]. Others as in
    `fates`. An expert is SwiGLU: (silu(row @ gate) * (row @ up)) @ down. Invalid tokens get zero.
    """
    settings = {"num_experts": len(w_gate_up), "sequence_length": sequence_length, "policy": policy}
    result = fates(expert_ids, weights, valid, **settings)
    expert_ids = np.asarray(expert_ids)
    x_STH, w_STK, gate_up_EH2F, down_EFH = float64(rows, weights, w_gate_up, w_down)
    out_STH = np.zeros_like(x_STH)
    for s, t in np.argwhere(valid).tolist():
        scale = rescale(w_STK[s, t], result.fate[s, t] == KEPT, policy)
        for k in np.flatnonzero(result.fate[s, t] == KEPT):
            expert = expert_ids[s, t, k]
            hidden_F = swiglu(x_STH[s, t] @ gate_up_EH2F[expert])
            out_STH[s, t] += scale * w_STK[s, t, k] * (hidden_F @ down_EFH[expert])
    return out_STH, result


def gradients(rows, expert_ids, weights, valid, w_gate_up, w_down, d_out, *, sequence_length: int, policy: Policy):
    """Gradients of sum(forward(...) * d_out) with the fates held fixed; d_out [S,T,H], the rest as in `forward`.

    Returns a dict of float64 arrays, "rows", "weights", "w_gate_up" and "w_down", each shaped as its argument.
    """
    settings = {"num_experts": len(w_gate_up), "sequence_length": sequence_length, "policy": policy}
    result = fates(expert_ids, weights, valid, **settings)
    expert_ids = np.asarray(expert_ids)
    x_STH, w_STK, gate_up_EH2F, down_EFH, d_out_STH = float64(rows, weights, w_gate_up, w_down, d_out)
    d_x_STH, d_w_STK = np.zeros_like(x_STH), np.zeros_like(w_STK)
    d_gate_up_EH2F, d_down_EFH = np.zeros_like(gate_up_EH2F), np.zeros_like(down_EFH)
    for s, t in np.argwhere(valid).tolist():
        x_H, d_out_H = x_STH[s, t], d_out_STH[s, t]
        kept_K = result.fate[s, t] == KEPT
        scale = rescale(w_STK[s, t], kept_K, policy)
        d_scale = 0.0
        for k in np.flatnonzero(kept_K):
            expert = expert_ids[s, t, k]
            gate_up_2F = x_H @ gate_up_EH2F[expert]
            hidden_F = swiglu(gate_up_2F)
            agreement = hidden_F @ down_EFH[expert] @ d_out_H
            d_w_STK[s, t, k] += scale * agreement
            d_scale += w_STK[s, t, k] * agreement
            d_y_H = scale * w_STK[s, t, k] * d_out_H
            d_gate_up_2F = d_swiglu(gate_up_2F, down_EFH[expert] @ d_y_H)
            d_down_EFH[expert] += np.outer(hidden_F, d_y_H)
            d_gate_up_EH2F[expert] += np.outer(x_H, d_gate_up_2F)
            d_x_STH[s, t] += gate_up_EH2F[expert] @ d_gate_up_2F
        d_w_STK[s, t] += d_scale * d_rescale(w_STK[s, t], kept_K, policy)
    return {"rows": d_x_STH, "weights": d_w_STK, "w_gate_up": d_gate_up_EH2F, "w_down": d_down_EFH}


def float64(*arrays) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(array, np.float64) for array in arrays)


def swiglu(gate_up_2F: np.ndarray) -> np.ndarray:
    """silu(gate) * up, [2F] -> [F]."""
    gate_F, up_F = np.split(gate_up_2F, 2)
    return gate_F * sigmoid(gate_F) * up_F


def d_swiglu(gate_up_2F: np.ndarray, d_hidden_F: np.ndarray) -> np.ndarray:
    """Gradient of `swiglu` for its input, [2F]."""
    gate_F, up_F = np.split(gate_up_2F, 2)
    s_F = sigmoid(gate_F)
    d_gate_F = d_hidden_F * up_F * (s_F + gate_F * s_F * (1 - s_F))
    return np.concatenate([d_gate_F, d_hidden_F * gate_F * s_F])


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def rescale(weights_K: np.ndarray, kept_K: np.ndarray, policy: Policy) -> float:
    """What multiplies a token's survivors: valid sum / kept sum, or 1 when rescaling is off."""
    if not policy.rescale:
        return 1.0
    kept_sum = weights_K[kept_K].sum()
    return weights_K.sum() / kept_sum if kept_sum else 0.0


def d_rescale(weights_K: np.ndarray, kept_K: np.ndarray, policy: Policy) -> np.ndarray:
    """Gradient of `rescale` for the weights, [K]. A dropped weight counts in the numerator, a kept one in both."""
    kept_sum = weights_K[kept_K].sum()
    if not policy.rescale or not kept_sum:
        return np.zeros_like(weights_K)
    return 1 / kept_sum - kept_K * weights_K.sum() / kept_sum**2
