"""The scaling ladder compares what it says: per rung two arms of equal compute and equal everything else, and the same
number of tokens per active parameter in every rung. Sizes are read from the files, nothing is trained."""

import dataclasses
import re
from pathlib import Path

import pytest

from ep_jax.config import check_run, load
from ep_jax.flops import flops_per_token, num_parameters
from ep_jax.planning.memory import memory
from ep_jax.planning.sizes import Sizes

FOLDER = Path(__file__).parents[1] / "configs" / "ladder"
WIDTHS = (192, 288, 384)
EPOCH_TOKENS = 30_000_000  # a little below what the default source holds in rows of 512
MEMORY_SHARE_BYTES = 0.15 * 139 * 2**30  # XLA_PYTHON_CLIENT_MEM_FRACTION=.15 of an H200


def arm(name, width):
    return load(str(FOLDER / f"{name}_d{width}.toml"))


def arms(width):
    """(expert-parallel arm, FSDP arm)"""
    return arm("ep", width), arm("fsdp", width)


def training_flops(config):
    return flops_per_token(config.model, config.router, config.data.sequence_length).training


def training_tokens(config):
    return config.train.steps * config.train.sequences_per_step * config.data.sequence_length


def test_the_folder_holds_three_rungs_of_two_arms():
    expected = {f"{name}_d{width}.toml" for width in WIDTHS for name in ("ep", "fsdp")}
    assert {path.name for path in FOLDER.iterdir()} == expected


@pytest.mark.parametrize("width", WIDTHS)
def test_both_arms_start_on_one_device(width):
    for name in ("ep", "fsdp"):
        config = arm(name, width)
        assert config.mesh.shape == (1, 1, 1)
        check_run(config)
        assert config.run_dir == f"runs/ladder/{name}_d{width}"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_token_costs_the_same_in_both_arms(width):
    ep, fsdp = arms(width)
    assert training_flops(fsdp) == pytest.approx(training_flops(ep), rel=0.01)
    # By hand, where the arms differ: router, latent projections and routed experts of a layer, multiply-adds.
    D = width
    ep_layer = 96 * D + 2 * D * D // 2 + 8 * 3 * (D // 2) * (D // 2)
    fsdp_layer = 32 * D + 4 * 3 * D * fsdp.model.expert_hidden_dim
    difference = 3 * 2 * ep.model.num_layers * (fsdp_layer - ep_layer)
    assert training_flops(fsdp) - training_flops(ep) == pytest.approx(difference)


@pytest.mark.parametrize("width", WIDTHS)
def test_arms_differ_in_their_experts_only(width):
    ep, fsdp = arms(width)
    for section in ("train", "mesh", "data", "optimizer", "checkpoint", "log"):
        assert getattr(ep, section) == getattr(fsdp, section), section
    sizes = {"latent_dim": fsdp.model.latent_dim, "expert_hidden_dim": fsdp.model.expert_hidden_dim}
    assert dataclasses.replace(ep.model, **sizes) == fsdp.model
    assert dataclasses.replace(ep.router, num_experts=32, experts_per_token=4) == fsdp.router


@pytest.mark.parametrize("width", WIDTHS)
def test_arms_are_the_published_models_in_miniature(width):
    """Ratios of the two published configurations, but for the FSDP arm's expert width, which equal compute sets."""
    ep, fsdp = arms(width)
    hero, published = load("hero_535b"), load("fsdp_360b")
    for name in ("latent_dim", "expert_hidden_dim", "shared_hidden_dim"):
        assert getattr(ep.model, name) / width == getattr(hero.model, name) / hero.model.model_dim
    assert ep.model.num_shared_experts == hero.model.num_shared_experts
    for config, original in ((ep, hero), (fsdp, published)):
        assert config.router.experts_per_token == original.router.experts_per_token
        assert (config.router.balancing, config.router.weight_sum) == ("quantile", hero.router.weight_sum)
        assert config.model.init_std == pytest.approx(0.5 / width**0.5, rel=2e-3)
        assert config.model.has_latent == original.model.has_latent
        assert config.ep.transport == original.ep.transport
    assert ep.router.num_experts / ep.ep.emulated_shards == hero.router.num_experts / hero.mesh.ep == 6
    assert (ep.ep.sender_factor, ep.ep.receiver_factor) == (hero.ep.sender_factor, hero.ep.receiver_factor)


def test_every_rung_sees_as_many_tokens_per_active_parameter_and_none_twice():
    ratios = []
    for width in WIDTHS:
        (_, active_ep), (_, active_fsdp) = (num_parameters(c.model, c.router) for c in arms(width))
        assert active_fsdp == pytest.approx(active_ep, rel=0.01)
        ep, fsdp = arms(width)
        assert training_tokens(ep) == training_tokens(fsdp) <= EPOCH_TOKENS
        ratios.append(training_tokens(ep) / active_ep)
        assert ep.optimizer.warmup_steps == round(0.1 * ep.train.steps)
    assert max(ratios) == pytest.approx(min(ratios), rel=0.01)


def test_the_rungs_differ_in_size_and_steps_only():
    for name in ("ep", "fsdp"):
        first, *others = (arm(name, width) for width in WIDTHS)
        for other in others:
            assert (other.data, other.mesh, other.ep, other.router) == (first.data, first.mesh, first.ep, first.router)
            assert dataclasses.replace(other.train, steps=first.train.steps) == first.train
            rates = {key: getattr(first.optimizer, key) for key in ("learning_rate", "warmup_steps")}
            assert dataclasses.replace(other.optimizer, **rates) == first.optimizer


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["ep", "fsdp"])
def test_the_header_states_the_sizes(name, width):
    """Millions of parameters, all and active, MFLOP and tokens; the ratio of the arms' totals follows from them."""
    config = arm(name, width)
    total, active = num_parameters(config.model, config.router)
    tokens = training_tokens(config)
    stated = re.search(
        r"^# (.+) M parameters, (.+) M active; (.+) MFLOP a token and training step; (.+) M tokens, (.+) per active",
        (FOLDER / f"{name}_d{width}.toml").read_text(),
        flags=re.M,
    )
    found = (total / 1e6, active / 1e6, training_flops(config) / 1e6, tokens / 1e6, tokens / active)
    assert stated
    for text, value in zip(stated.groups(), found, strict=True):
        decimals = len(text.partition(".")[2])
        assert text == f"{value:.{decimals}f}"


@pytest.mark.parametrize("width", WIDTHS)
def test_six_runs_share_one_h200(width):
    """The planned peak of each fits its share (measured on one H200: 2.8 GiB for ep_d384). Emulated shards compute like
    `dense`, and are planned as such."""
    for config in arms(width):
        planned = dataclasses.replace(config, ep=dataclasses.replace(config.ep, transport="dense"))
        assert memory(Sizes(planned)).peak < MEMORY_SHARE_BYTES
