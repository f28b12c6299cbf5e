"""Replaying routing without devices keeps exactly what the oracle keeps.

Run: python -m pytest tests/ep/test_simulate.py
"""

import itertools

import numpy as np
import pytest

from ep_jax.ep import EPConfig, reference
from ep_jax.ep.simulate import simulate

SHARDS, TOKENS, CHOICES, EXPERTS, LENGTH = 8, 32, 3, 16, 8
VARIANTS = (("tail", 1, 1), ("round_robin", 2, 2), ("water_fill", 3, 4))  # agreed, waves, premix
ORDERS = ("sequence", "position", "choice", "weight")


def policies():
    """Every order, kind of receiver and transport, the variants in turn: more of them are in `test_shards64`, and
    `test_properties` takes the same plans through the transports."""
    variant = itertools.cycle(VARIANTS)
    for order, receive in itertools.product(ORDERS, ("expert", "pool")):
        _, waves, premix = next(variant)
        yield dict(transport="pooled_wave", order=order, receive=receive, waves=waves, premix=premix)
    for order, receive in zip(ORDERS, ("expert", "pool", "pool", "expert"), strict=True):
        _, waves, premix = next(variant)
        yield dict(transport="pooled_wave", slots="token", order=order, receive=receive, waves=waves, premix=premix)
    for order in ORDERS:
        _, waves, premix = next(variant)
        yield dict(transport="fixed_cell", order=order, waves=waves, premix=premix)
    for agreed, waves, premix in VARIANTS:
        yield dict(transport="rowwise", agreed=agreed, waves=waves, premix=premix)
    agreed, waves, premix = VARIANTS[1]
    yield dict(transport="ragged", agreed=agreed, waves=waves, premix=premix)
    yield dict(transport="ring", agreed=agreed, premix=premix)
    yield dict(transport="dense")


@pytest.fixture(scope="module")
def routing():
    """Documents of eight tokens with their own taste; a tenth of the tokens is invalid."""
    rng = np.random.default_rng(0)
    taste = np.repeat(rng.gumbel(size=(SHARDS, TOKENS // 8, EXPERTS)) * 1.5, 8, axis=1)
    ids = np.argsort(-(taste + rng.gumbel(size=taste.shape)), axis=-1)[..., :CHOICES].astype(np.int32)
    return ids, rng.random(ids.shape).astype(np.float32), rng.random(ids.shape[:2]) < 0.9


@pytest.mark.parametrize("policy", list(policies()), ids=lambda policy: "-".join(map(str, policy.values())))
def test_simulation_equals_the_oracle(routing, policy):
    factors = dict(sender_factor=0.9, receiver_factor=0.95)
    found = simulate(*routing, num_experts=EXPERTS, sequence_length=LENGTH, settings=EPConfig(**policy, **factors))
    wanted = reference.fates(
        *routing, num_experts=EXPERTS, sequence_length=LENGTH, policy=reference.Policy(**policy, **factors)
    )
    np.testing.assert_array_equal(found, wanted.fate)
    assert found.dtype == np.int8
    if policy["transport"] != "dense":
        assert (wanted.fate > 0).sum() > (wanted.fate == reference.INVALID).sum(), "something must have dropped"
