"""Can a later token of a sequence change the fate of an earlier one? The table of ARCHITECTURE.md, row by row.

The ids and weights of one sequence are redrawn from some token on, everything else (validity too: padding is the
packing's) stays. For a safe row no earlier fate of that sequence ever changes; for an unsafe one a witness is found.
"""

import numpy as np
import pytest

from ep_jax.ep import EPConfig
from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.settings import AGREEMENTS
from tests.ep import vmapped
from tests.ep.vmapped import LENGTH

SHAPE = LayerShape(num_shards=4, num_experts=16, experts_per_token=3, tokens=8)
ONE_EACH = LayerShape(num_shards=4, num_experts=4, experts_per_token=2, tokens=8)
TIGHT = dict(sender_factor=0.8, receiver_factor=0.7)
MANY, FEW = 120, 400  # perturbations tried on a safe row; at most on an unsafe one


def pooled(**options):
    return EPConfig(transport="pooled_wave", **TIGHT, **options)


def cells(**options):
    return EPConfig(transport="fixed_cell", **TIGHT, **options)


def agreed(transport, **options):
    return EPConfig(transport=transport, **TIGHT, **options)


SAFE = [
    *[(SHAPE, pooled(order=order, waves=waves)) for order, waves in (("sequence", 1), ("position", 3))],
    *[(SHAPE, pooled(order=order, waves=waves, slots="token")) for order, waves in (("sequence", 2), ("position", 1))],
    *[(SHAPE, cells(order=order, waves=waves)) for order, waves in (("sequence", 2), ("position", 1))],
    (SHAPE, cells(order="position", premix=2)),
    (SHAPE, cells(order="sequence", premix=4)),
    *[(SHAPE, agreed("rowwise", agreed=policy, waves=4)) for policy in AGREEMENTS],  # one expert a wave
    (ONE_EACH, agreed("ring", agreed="tail")),
    (SHAPE, EPConfig(transport="dense")),
]
UNSAFE = [
    *[(SHAPE, pooled(order=order)) for order in ("choice", "weight")],
    *[(SHAPE, pooled(order=order, slots="token")) for order in ("choice", "weight")],
    *[(SHAPE, pooled(order=order, receive="pool")) for order in ("sequence", "position")],
    *[(SHAPE, cells(order=order)) for order in ("choice", "weight")],
    *[(SHAPE, pooled(order=order, premix=premix)) for order, premix in (("sequence", 2), ("position", 4))],
    *[(SHAPE, agreed("rowwise", agreed=policy)) for policy in AGREEMENTS],
    (SHAPE, agreed("ragged", agreed="round_robin", waves=2)),
    (SHAPE, agreed("ring", agreed="water_fill")),
    (SHAPE, agreed("rowwise", agreed="round_robin", waves=4, premix=2)),
    (SHAPE, agreed("rowwise", agreed="tail", waves=4, premix=2)),
]


@pytest.fixture(autouse=True)
def on_one_device(monkeypatch):
    vmapped.patch(monkeypatch)


def case_name(case) -> str:
    shape, settings = case
    policies = [getattr(settings, name) for name in ("order", "receive", "agreed") if name in settings.used]
    return "-".join([settings.transport, *policies, f"e{shape.local_experts}-W{settings.waves}-g{settings.premix}"])


def perturbed(shape: LayerShape, settings: EPConfig, seed: int) -> tuple[int, bool]:
    """(dropped assignments among the earlier tokens, did one of their fates change) for one random perturbation."""
    rng = np.random.default_rng(seed)
    ids, weights, valid = vmapped.draw_routes(seed, shape, skew=1.0)
    shard, sequence = rng.integers(shape.num_shards - 1), rng.integers(shape.tokens // LENGTH)
    first, end = sequence * LENGTH + rng.integers(1, LENGTH), (sequence + 1) * LENGTH
    other_ids, other_weights, _ = vmapped.draw_routes(seed + 10**6, shape, skew=1.0)
    later = (shard, slice(first, end))
    new_ids, new_weights = ids.copy(), weights.copy()
    new_ids[later], new_weights[later] = other_ids[later], other_weights[later]
    earlier = (shard, slice(sequence * LENGTH, first))
    before = vmapped.fates_of(shape, settings, ids, weights, valid)[earlier]
    after = vmapped.fates_of(shape, settings, new_ids, new_weights, valid)[earlier]
    return int(np.isin(before, (1, 2)).sum()), bool((before != after).any())


@pytest.mark.parametrize("case", SAFE, ids=case_name)
def test_a_later_token_changes_nothing(case):
    shape, settings = case
    found = [perturbed(shape, settings, seed) for seed in range(MANY)]
    assert not any(changed for _, changed in found)
    assert settings.transport == "dense" or sum(dropped for dropped, _ in found) > MANY // 4, "no capacity bound"


@pytest.mark.parametrize("case", UNSAFE, ids=case_name)
def test_a_later_token_can_change_an_earlier_fate(case):
    shape, settings = case
    assert any(perturbed(shape, settings, seed)[1] for seed in range(FEW))


@pytest.mark.parametrize("options", [dict(order="weight", receive="pool"), dict(transport="rowwise", agreed="tail")])
def test_never_where_no_capacity_binds(options):
    settings = EPConfig(**options, sender_factor=1000.0, receiver_factor=1000.0)
    assert all(perturbed(SHAPE, settings, seed) == (0, False) for seed in range(20))
