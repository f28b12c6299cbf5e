"""What each layer's drops cost: held-out loss when drops take effect in some layers and nowhere else.

A counterfactual names the layers that drop. There the transport decides what is dropped of the routes that the layer
then has, and computes the rest, exactly as in training; all other layers compute dropless. Two of them tell about a
layer: it alone drops (what that costs), and it alone does not (what sparing it saves). They differ where layers
interact: a layer behind drops gets other rows, and routes and corrects them otherwise.

Letters: N layers, C counterfactuals, B batches, P stages (valid, sender, receiver), E experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ep_jax.config import RunConfig
from ep_jax.data import Batch
from ep_jax.ep import EPConfig, routed_experts_local
from ep_jax.ep.settings import dropless
from ep_jax.evaluation import ORDER_NAMES, Estimate, Pair, per_target
from ep_jax.metrics import drop_rates
from ep_jax.step import EvalSums, eval_sums
from ep_jax.traces.config import TraceConfig

CounterfactualStep = Callable[[Any, jax.Array, Batch, np.ndarray], EvalSums]


def make_counterfactual_step(config: RunConfig, mesh: Mesh, ep: EPConfig) -> CounterfactualStep:
    """The compiled evaluation (params, router bias, batch, bool [N]) -> EvalSums: layers that are True drop.

    One program for all of them. Its drops are those that took effect: with all False they and the loss are the
    dropless evaluation's, with all True those under `ep`.
    """

    def experts(*arrays, layer_input: jax.Array, **sizes):
        policy, free = (
            functools.partial(routed_experts_local, **sizes, settings=settings) for settings in (ep, dropless(ep))
        )
        # All devices take the same branch, so each may hold exchanges of its own.
        return lax.cond(layer_input, policy, free, *arrays)

    return jax.jit(eval_sums(dataclasses.replace(config, trace=TraceConfig()), mesh, experts))


@dataclasses.dataclass(frozen=True, eq=False)
class Attribution:
    """The cost of drops by layer on some held-out rows. All losses are of the same rows, so differences are paired."""

    pair: Pair
    dropping_NB: np.ndarray  # float64, nats summed over a batch's targets when layer n alone drops
    spared_NB: np.ndarray  # float64, the same when all layers but n drop
    counts_NPE: np.ndarray  # int64, drops of layer n when it alone drops

    def lost_alone(self, layer: int) -> Estimate:
        """What drops in this layer alone cost."""
        return self._mean(self.dropping_NB[layer] - self.pair.free.nats_B)

    def saved_alone(self, layer: int) -> Estimate:
        """What would be saved were this layer alone spared."""
        return self._mean(self.pair.policy.nats_B - self.spared_NB[layer])

    @property
    def sum_alone(self) -> Estimate:
        """The layers' single costs added up."""
        return self._mean(self._summed_B)

    @property
    def interaction(self) -> Estimate:
        """The whole cost minus the sum of the single ones; positive where layers' drops aggravate each other."""
        return self._mean(self.pair.policy.nats_B - self.pair.free.nats_B - self._summed_B)

    def share(self, layer: int) -> float | None:
        """The layer's single cost over the whole cost; None where the whole is not positive or may be noise."""
        whole = self.pair.cost
        return None if whole.nats <= 0 or whole.is_noise else self.lost_alone(layer).nats / whole.nats

    @property
    def _summed_B(self) -> np.ndarray:
        return np.sum(self.dropping_NB - self.pair.free.nats_B[None], axis=0)

    def _mean(self, nats_B: np.ndarray) -> Estimate:
        return per_target(nats_B, self.pair.free.targets_B)

    def as_json(self) -> dict[str, Any]:
        layers = [
            {
                "layer": layer,
                **drop_rates(self.counts_NPE[layer : layer + 1]),
                "lost_alone": self.lost_alone(layer).as_json(),
                "share": self.share(layer),
                "saved_alone": self.saved_alone(layer).as_json(),
            }
            for layer in range(len(self.counts_NPE))
        ]
        return {
            "layers": layers,
            "sum_alone": self.sum_alone.as_json(),
            "cost": self.pair.cost.as_json(),
            "interaction": self.interaction.as_json(),
        }


def attribute(
    step: CounterfactualStep, params: Any, router_bias: Any, batches: Iterable[Batch], pair: Pair
) -> Attribution:
    """Runs all single-layer counterfactuals, two a layer, on the batches that the pair was evaluated on."""
    layers = pair.policy.counts_NPE.shape[0]
    alone_NN = np.eye(layers, dtype=bool)
    counts_NPE = np.zeros_like(pair.policy.counts_NPE)
    nats_BC = []
    for batch in batches:
        sums_C = [jax.device_get(step(params, router_bias, batch, drops_N)) for drops_N in (*alone_NN, *~alone_NN)]
        counts_NPE += np.stack([sums_C[layer].drops.counts_NPE[layer] for layer in range(layers)])
        nats_BC.append([float(sums.cross_entropy) for sums in sums_C])
    dropping_NB, spared_NB = np.split(np.array(nats_BC, np.float64).T, 2)
    return Attribution(pair, dropping_NB, spared_NB, counts_NPE)


def table(attribution: Attribution, order: str) -> str:
    """A line a layer: its drops, what they cost alone, their share of the whole cost, and what sparing it saves."""
    pair = attribution.pair
    lines = [
        f"cost of drops by layer on {ORDER_NAMES[order]}, nats per token ± one standard error over "
        f"{len(pair.free.nats_B)} batches",
        f"{'layer':>5}{'dropped %':>12}{'lost, it alone drops':>24}{'share of cost %':>18}"
        f"{'saved, it alone spared':>26}",
    ]
    for layer, counts_PE in enumerate(attribution.counts_NPE):
        dropped, share = 100 * drop_rates(counts_PE[None])["drop_rate"], attribution.share(layer)
        lines.append(
            f"{layer:>5}{dropped:>12.3f}{attribution.lost_alone(layer)!s:>24}"
            f"{'-' if share is None else f'{100 * share:.1f}':>18}{attribution.saved_alone(layer)!s:>26}"
        )
    lines.append(
        f"sum of single layers {attribution.sum_alone}, whole cost {pair.cost}, interaction {attribution.interaction}"
    )
    return "\n".join(lines)


def draw(attributions: Mapping[str, Attribution]) -> Any:
    """A figure: what each layer's drops cost alone, a bar an order of rows, with standard errors. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(attributions)
    for place, (order, attribution) in enumerate(attributions.items()):
        layers = np.arange(len(attribution.counts_NPE))
        costs = [attribution.lost_alone(layer) for layer in range(len(layers))]
        whole = attribution.pair.cost
        axis.bar(
            layers + (place - (len(attributions) - 1) / 2) * width,
            [cost.nats for cost in costs],
            width,
            yerr=[cost.standard_error_nats or 0.0 for cost in costs],
            capsize=3,
            label=f"{ORDER_NAMES[order]}: whole cost {whole}",
        )
    axis.set(
        title="What drops cost when one layer alone drops (± one standard error over batches)",
        xlabel="layer",
        ylabel="nats per token lost",
    )
    axis.axhline(0, color="black", linewidth=0.8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=len(attributions))
    return figure
