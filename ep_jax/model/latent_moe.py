"""The Mixture-of-Experts layer: routed experts in a narrow latent width, shared experts at full width.

Which transport moves the rows is not known here: the routed experts are a function that the caller hands in.

Shapes: b sequences, L tokens of a sequence, T = b*L tokens, D model width, H routed (latent) width, E experts, e local
experts, F expert hidden width, S hidden width of all shared experts together, K choices, P gate and up.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from ep_jax.model.config import ModelConfig, RouterConfig
from ep_jax.model.norms import rms_norm
from ep_jax.model.parameters import gathered, norm_scale, weight
from ep_jax.model.router import RouterStats, route


class RoutedExperts(Protocol):
    """Runs each valid row through its chosen local or remote experts and adds up the weighted results."""

    def __call__(
        self,
        rows_TH: jax.Array,
        expert_ids_TK: jax.Array,
        weights_TK: jax.Array,
        valid_T: jax.Array,
        w_gate_up_eH2F: jax.Array,
        w_down_eFH: jax.Array,
        /,
        *,
        sequence_length: int,
        valid_in_group: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Returns rows [T, H], zero where invalid, and a pytree of arrays that says what was dropped."""
        ...


class LatentMoE(nnx.Module):
    """Router, latent projections, routed and shared experts of one layer."""

    def __init__(self, model: ModelConfig, router: RouterConfig, *, stack: tuple[int, ...] = ()):
        """stack: leading axes of each parameter (the scanned blocks)."""
        D, H, F, E = model.model_dim, model.latent_dim, model.expert_hidden_dim, router.num_experts
        S = model.num_shared_experts * model.shared_hidden_dim
        output_std = model.init_std * model.residual_scale
        self.model, self.router_config = model, router
        # Tokens arrive RMS-normed, so logits start with standard deviation 1 at every width.
        self.router = weight("router", (*stack, D, E), D**-0.5)
        if model.has_latent:
            self.latent_down = weight("dense", (*stack, D, H), model.init_std)
            self.latent_norm = norm_scale((*stack, H))
            self.latent_up = weight("dense", (*stack, H, D), output_std)
        self.expert_gate_up = weight("expert", (*stack, E, H, 2 * F), model.init_std)
        self.expert_down = weight("expert", (*stack, E, F, H), output_std)
        if S:
            self.shared_gate_up = weight("dense", (*stack, D, 2 * S), model.init_std)
            self.shared_down = weight("dense", (*stack, S, D), output_std)

    def __call__(
        self,
        x_bLD: jax.Array,
        bias_E: jax.Array,
        valid_bL: jax.Array,
        valid_in_group: jax.Array,
        routed_experts: RoutedExperts,
    ) -> tuple[jax.Array, RouterStats, Any]:
        """Normed activations [b, L, D] -> what the layer adds to them, router sums, and the drops of routed_experts.

        valid_in_group: int32 [], valid tokens of this device's ep group. Sums and drops are this device's own.
        """
        dtype, L = x_bLD.dtype, x_bLD.shape[1]
        x_TD, valid_T = x_bLD.reshape(-1, x_bLD.shape[-1]), valid_bL.reshape(-1)
        with jax.named_scope("router"):
            choices, stats = route(x_TD, self.router[...], bias_E, valid_T, self.router_config)
        with jax.named_scope("latent"):
            rows_TH = self._latent_rows(x_TD)
        combined_TH, drops = routed_experts(
            rows_TH,
            choices.expert_ids,
            choices.weights,
            valid_T,
            gathered(self.expert_gate_up, dtype),
            gathered(self.expert_down, dtype),
            sequence_length=L,
            valid_in_group=valid_in_group,
        )
        out_TD = combined_TH.astype(dtype)
        if self.model.has_latent:
            with jax.named_scope("latent"):
                out_TD = out_TD @ gathered(self.latent_up, dtype)
        if self.model.num_shared_experts:
            with jax.named_scope("shared_experts"):
                out_TD += swiglu(x_TD, gathered(self.shared_gate_up, dtype), gathered(self.shared_down, dtype))
        return out_TD.reshape(x_bLD.shape), stats, drops

    def _latent_rows(self, x_TD: jax.Array) -> jax.Array:
        """The rows that travel: projected down and normed, or the normed tokens themselves at full width."""
        if not self.model.has_latent:
            return x_TD
        return rms_norm(x_TD @ gathered(self.latent_down, x_TD.dtype), self.latent_norm[...], self.model.norm_epsilon)


def swiglu(x_TD: jax.Array, w_gate_up_D2F: jax.Array, w_down_FD: jax.Array) -> jax.Array:
    """(silu(x gate) * (x up)) down; the first half of the columns of gate_up is the gate."""
    return gate(x_TD @ w_gate_up_D2F) @ w_down_FD


@jax.custom_vjp
def gate(hidden_T2F: jax.Array) -> jax.Array:
    """silu(gate) * up [T, F] of columns [gate, up], computed in float32, in the dtype of hidden.

    Its gradient is written in one pass; derived by JAX, its halves are written and then put together.
    """
    gate_TF, up_TF = jnp.split(hidden_T2F.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate_TF) * up_TF).astype(hidden_T2F.dtype)


def _gate_forward(hidden_T2F):
    return gate(hidden_T2F), hidden_T2F


def _gate_backward(hidden_T2F, d_out_TF):
    wide_T2F, d_out_TF = hidden_T2F.astype(jnp.float32), d_out_TF.astype(jnp.float32)
    halves_TPF = wide_T2F.reshape(-1, 2, d_out_TF.shape[-1])
    partner_TPF = halves_TPF[:, ::-1]  # up for gate, gate for up
    is_gate_TPF = jax.lax.broadcasted_iota(jnp.int32, halves_TPF.shape, 1) == 0
    # Chosen before the sigmoid: on a GPU one for each number, not two, decides how long this takes.
    gate_TPF, up_TPF = jnp.where(is_gate_TPF, halves_TPF, partner_TPF), jnp.where(is_gate_TPF, partner_TPF, halves_TPF)
    sigmoid_TPF = jax.nn.sigmoid(gate_TPF)
    of_gate_TPF = up_TPF * (1 + gate_TPF * (1 - sigmoid_TPF))
    d_halves_TPF = d_out_TF[:, None] * sigmoid_TPF * jnp.where(is_gate_TPF, of_gate_TPF, gate_TPF)
    return (d_halves_TPF.reshape(hidden_T2F.shape).astype(hidden_T2F.dtype),)


gate.defvjp(_gate_forward, _gate_backward)
