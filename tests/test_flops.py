"""FLOPs and parameter counts against numbers worked out by hand (BL-71), peaks and utilisation.

pytest tests/test_flops.py
"""

import dataclasses
import math

import jax
import pytest

from ep_jax.flops import (
    Flops,
    device_peak_flops,
    flops_per_token,
    mean_keys,
    mfu,
    mfu_kept,
    num_parameters,
)
from ep_jax.model.config import ModelConfig, RouterConfig
from ep_jax.model.transformer import init_params

SMALL = ModelConfig(
    num_layers=2,
    model_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
    latent_dim=64,
    expert_hidden_dim=128,
    num_shared_experts=0,
)
SMALL_ROUTER = RouterConfig(num_experts=8, experts_per_token=2)

# 4 layers, two of them local with a window of 8; latent half width; 2 shared experts; 3 query heads a kv head.
WIDE = ModelConfig(
    num_layers=4,
    model_dim=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=100,
    window=8,
    global_every=2,
    latent_dim=24,
    expert_hidden_dim=40,
    num_shared_experts=2,
    shared_hidden_dim=56,
)
WIDE_ROUTER = RouterConfig(num_experts=12, experts_per_token=3)


def test_training_flops_of_the_hand_computed_model():
    flops = flops_per_token(SMALL, SMALL_ROUTER, sequence_length=32)
    assert flops.training == 866_304
    assert flops.training * 8 * 32 == 221_773_824


@pytest.mark.parametrize(
    ("wrong", "total"),
    [("all experts", 2_635_776), ("full attention", 890_880), ("kv as query heads", 915_456), ("embedding", 964_608)],
)
def test_known_wrong_counts_differ_by_exactly_the_part_they_get_wrong(wrong, total):
    flops = flops_per_token(SMALL, SMALL_ROUTER, sequence_length=32)
    all_heads = flops_per_token(dataclasses.replace(SMALL, num_kv_heads=4), SMALL_ROUTER, 32)
    error = {
        "all experts": 3 * (8 / 2 - 1) * flops.routed_experts,
        "full attention": 3 * flops.attention_scores,
        "kv as query heads": all_heads.training - flops.training,
        "embedding": 3 * flops.head,
    }[wrong]
    assert flops.training + error == total


def test_every_part_of_a_model_with_latent_shared_experts_window_and_grouped_heads():
    flops = flops_per_token(WIDE, WIDE_ROUTER, sequence_length=32)
    assert flops == Flops(
        attention_projections=4 * 2 * (48 * 60 + 48 * 20 + 48 * 20 + 60 * 48),  # 61,440
        attention_scores=2 * 4 * 60 * 16 + 2 * 4 * 60 * 7,  # global: 32/2 keys; local: 8 - 8*8/(2*32) = 7 keys
        router=4 * 2 * 48 * 12,
        latent_projections=4 * 2 * (48 * 24 + 24 * 48),
        routed_experts=4 * 2 * 3 * (24 * 80 + 40 * 24),
        shared_experts=4 * 2 * 2 * (48 * 112 + 56 * 48),
        head=2 * 48 * 100,
    )
    assert flops.forward == 61_440 + 11_040 + 4_608 + 18_432 + 69_120 + 129_024 + 9_600
    assert flops.training == 909_792


def test_mean_keys_is_the_average_over_queries_of_a_causal_window():
    length, window = 2048, 512
    exact = sum(min(position + 1, window) for position in range(length)) / length
    assert mean_keys(length, window) == pytest.approx(exact, rel=2e-3)
    assert mean_keys(length, 0) == mean_keys(length, length) == mean_keys(length, 2 * length) == length / 2


def test_tied_embeddings_change_parameters_but_not_flops():
    tied = dataclasses.replace(SMALL, tie_embeddings=True)
    assert flops_per_token(tied, SMALL_ROUTER, 32) == flops_per_token(SMALL, SMALL_ROUTER, 32)
    untied_total, untied_active = num_parameters(SMALL, SMALL_ROUTER)
    assert num_parameters(tied, SMALL_ROUTER) == (untied_total - 256 * 64, untied_active - 256 * 64)


def test_parameters_counted_by_hand():
    attention = 48 * 60 + 48 * 20 + 48 * 20 + 60 * 48 + 10 + 10
    moe_without_experts = 48 * 12 + 48 * 24 + 24 * 48 + 2 * 3 * 48 * 56
    norms = 48 + 48 + 24
    fixed = 100 * 48 + 48 * 100 + 48 + 4 * (attention + moe_without_experts + norms)
    one_expert = 3 * 24 * 40
    assert num_parameters(WIDE, WIDE_ROUTER) == (fixed + 4 * 12 * one_expert, fixed + 4 * 3 * one_expert)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("model", "router"), [(SMALL, SMALL_ROUTER), (WIDE, WIDE_ROUTER)], ids=["small", "wide"])
def test_parameters_are_those_of_the_model(model, router, tied):
    model = dataclasses.replace(model, tie_embeddings=tied)
    shapes = jax.eval_shape(lambda: init_params(model, router, 0)[0])
    assert num_parameters(model, router)[0] == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5e12),
        ("NVIDIA H200", "bfloat16", 989.5e12),
        ("NVIDIA B200", "bfloat16", 2.25e15),
        ("NVIDIA GB200", "bfloat16", 2.5e15),
        ("NVIDIA H200", "float32", None),
        ("cpu", "bfloat16", None),
        ("NVIDIA A10", "bfloat16", None),
    ],
)
def test_device_peaks(kind, dtype, peak):
    assert device_peak_flops(kind, dtype) == peak


def test_utilisation_counts_all_devices_and_kept_takes_off_dropped_routed_work():
    flops = flops_per_token(WIDE, WIDE_ROUTER, sequence_length=32)
    used = mfu(1e6, flops, 1e12, num_devices=2)
    assert used == pytest.approx(1e6 * 909_792 / 2e12)
    assert mfu_kept(used, flops, drop_rate=0.25) == pytest.approx(used * (1 - 69_120 / 303_264 * 0.25))
    assert mfu_kept(used, flops, drop_rate=0.0) == used
    assert mfu(1e6, flops, None, 2) is None
    assert mfu_kept(None, flops, 0.1) is None
