"""The planner against published figures, the model's own shapes, compiled programs, and the hero's lowered step."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ep_jax.cli import split_args
from ep_jax.config import load
from ep_jax.ep import EPConfig
from ep_jax.ep.capacity import LayerShape
from ep_jax.exits import REFUSED
from ep_jax.fields import ConfigError
from ep_jax.model.transformer import parameter_kinds
from ep_jax.planning import advice, links
from ep_jax.planning.bounds import bounds, muon_flops
from ep_jax.planning.hardware import Hardware, load_hardware, shipped_hardware
from ep_jax.planning.memory import MEASURED_FACTOR, batch_bytes, memory, wave_rows
from ep_jax.planning.plan import make_plan, place
from ep_jax.planning.sizes import Sizes, members_in_domain
from ep_jax.state import state_shapes
from tests.tools.step_audit import audit
from tests.train.tiny_run import compiled_step, tiny_config
from tools.plan import lines, main

ROOT = Path(__file__).parents[2]
GIB = 2**30
GATE = {"ep.sender_factor": "1.05", "ep.receiver_factor": "1.33"}
RACK = {"mesh.replica": "1", "train.sequences_per_step": "1024"}
NVL72 = load_hardware("gb200_nvl72")
# Large enough that activations outweigh what a program has beside them, small enough to compile in seconds.
MIDDLE = {
    "model__model_dim": 128,
    "model__latent_dim": 64,
    "model__expert_hidden_dim": 128,
    "model__num_heads": 4,
    "model__head_dim": 32,
    "model__num_kv_heads": 2,
    "model__shared_hidden_dim": 128,
    "data__sequence_length": 128,
    "train__sequences_per_step": 32,
    "model__num_layers": 4,
    "router__num_experts": 16,
}
COMPILED = {
    "pooled-none-adamw": ((1, 2, 4), {"optimizer__name": "adamw"}),
    "pooled-exchanges-muon": ((1, 2, 4), {"optimizer__name": "muon", "model__remat": "exchanges", "ep__waves": 3}),
    "pooled-products": ((1, 2, 4), {"model__remat": "products"}),
    "dense-full": ((2, 4, 1), {"model__remat": "full", "ep__transport": "dense", "train__accumulation": 2}),
}


def hero(*changes: dict[str, str]):
    merged = {key: value for change in changes for key, value in change.items()}
    return load("hero_535b", list(merged.items()))


# --- published figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender", "receiver", "pool", "rows", "payload_gib", "input_gib"),
    [  # P and R exact; GiB as published, rounded to two decimals
        (1.05, 1.33, 2868, 38_740, 1.05, 1.33),
        (1.10, 1.15, 3004, 33_497, 1.10, 1.15),
        (1.15, 1.15, 3141, 33_497, 1.15, 1.15),
    ],
)
def test_published_buffers_of_the_hero(sender, receiver, pool, rows, payload_gib, input_gib):
    config = hero({"ep.sender_factor": str(sender), "ep.receiver_factor": str(receiver)})
    wave = make_plan(config, NVL72)["wave"]
    assert (wave["sender_pool_rows"], wave["expert_rows"], wave["rows"]["waves"]) == (pool, rows, 3)
    assert wave["bytes"]["sent"] / GIB == pytest.approx(payload_gib, abs=0.005)
    assert wave["bytes"]["expert input"] / GIB == pytest.approx(input_gib, abs=0.005)


def test_published_traffic_of_the_hero():
    gross = make_plan(hero(GATE), NVL72)["traffic"]["gross_forward_bytes"]
    # 384 experts of 3 x 3072 x 3072 in bfloat16, and 65,536 x 8 rows of 3072 there and back: exact.
    assert (gross["fsdp"] / GIB, gross["ep"] / GIB, gross["ep_full"] / GIB) == (20.25, 6.0, 12.0)
    layer = links.layer_traffic(Sizes(hero(GATE)), "ep", 64).forward
    # What really leaves a GPU: 5 % slack and headers more, 1/64 less.
    assert layer.rows.nvlink / GIB == pytest.approx(6.0 * 1.05 * 63 / 64, rel=0.001)
    fsdp = links.layer_traffic(Sizes(hero(GATE)), "fsdp", 64).forward
    assert fsdp.routed_weights.nvlink / GIB == pytest.approx(20.25 * 63 / 64, rel=1e-9)


def test_published_sizes():
    plan = make_plan(hero(), NVL72)
    model, step = plan["model"], plan["step"]
    tables = 2 * 128_256 * 6144
    assert model["parameters"] == pytest.approx(535.3e9, rel=0.001)
    assert model["active_parameters"] - tables == pytest.approx(22.76e9, rel=0.001)  # published without the tables
    assert step["tokens"] == 46_137_344
    assert model["flops_per_token"] * step["tokens"] * 390_251 == pytest.approx(2.7e24, rel=0.05)
    smaller = make_plan(load("fsdp_360b"), NVL72)["model"]
    assert smaller["parameters"] == pytest.approx(359.6e9, rel=0.001)
    routed = sum(p.copies * p.elements for p in Sizes(load("fsdp_360b")).parameters if p.routed)
    assert routed == pytest.approx(347.9e9, rel=0.001)


def test_published_state_by_optimizer():
    for optimizer, published in {"adamw": 16, "muon": 12}.items():
        plan = make_plan(hero({"optimizer.name": optimizer}), NVL72)
        assert plan["state"]["published_bytes_per_parameter"] == published
        found = plan["memory"]
        ours = found["weights_bytes"] + found["optimizer_bytes"] + found["gradients_bytes"]
        # Ours has another make-up and the same sum; what Muon leaves to Adam (tables, routers) makes 4 bytes more.
        assert ours / plan["state"]["parameters_per_gpu"] == pytest.approx(published, rel=0.02)


def test_published_speed_is_below_the_bounds():
    plan = make_plan(hero(), NVL72)
    own = plan["time"]["ep"]
    # 18.5 s a step is published as about 21.5 % MFU; the reports count FLOPs and peak a little differently.
    assert own["model_flops"] / (18.5 * NVL72.peak_flops) == pytest.approx(0.215, rel=0.05)
    assert 0.24 < own["mfu_ceiling_in_sequence"] < own["mfu_ceiling_overlapped"] < 1


# --- the model's own shapes and compiled programs ---------------------------------------------------------------------


@pytest.mark.parametrize("latent", [16, 32])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_the_models(latent, tied):
    config = tiny_config(model__latent_dim=latent, model__tie_embeddings=tied, model__num_shared_experts=1 - tied)
    kinds = parameter_kinds(config.model, config.router)
    shapes = state_shapes(config)["params"]
    stacked = jax.tree.leaves(jax.tree.map(lambda kind, leaf: (kind, leaf.size), kinds, shapes), is_leaf=_is_pair)
    planned = [(p.kind, p.copies * p.elements) for p in Sizes(config).parameters]
    assert sorted(stacked) == sorted(planned)


def _is_pair(x) -> bool:
    return isinstance(x, tuple)


@pytest.mark.parametrize("name", COMPILED)
def test_memory_of_compiled_programs(name):
    mesh, changes = COMPILED[name]
    config = tiny_config(mesh, drops=True, **MIDDLE | changes)
    measured, sizes = compiled_step(config).memory_analysis(), Sizes(config)
    found = memory(sizes)
    assert measured.argument_size_in_bytes == found.state.total + batch_bytes(sizes)
    metrics = measured.output_size_in_bytes - found.state.total
    assert 0 < metrics < 0.01 * found.state.total
    assert 1 / MEASURED_FACTOR < found.temporaries / measured.temp_size_in_bytes < MEASURED_FACTOR


BEFORE = {
    "model.remat": "exchanges",
    "model.scan": "true",
    "train.sequences_per_step": "32",
    "train.accumulation": "1",
    "ep.transport": "pooled_wave",
    "ep.slots": "assignment",
    "ep.receive": "expert",
    "ep.kernels": "xla",
}


def measured_on_h200(gpus, settings):
    """(peak in GiB, step in s, MFU) of a training of configs/h200.toml."""
    if settings:
        run = json.loads((ROOT / "benchmarks/train_h200_20261129.json").read_text())["runs"][f"{gpus}_gpu"]
        return run["peak_memory_gib_of_first_gpu"], run["step_ms"]["median_of_last_50_steps"] / 1000, run["mfu"]
    file = {1: "train_placed_h200_20261130.json", 2: "train_placed_h200x2_20261130.json"}[gpus]
    [run] = json.loads((ROOT / "benchmarks" / file).read_text())["results"]
    return run["peak_memory_gib"], run["step_ms"]["median_ms"] / 1000, run["mfu"]


@pytest.mark.parametrize(("gpus", "settings"), [(1, BEFORE), (2, BEFORE), (1, {}), (2, {})])
def test_training_measured_on_h200(gpus, settings):
    """Peak within 15 %, a step above both bounds and below four times the looser one."""
    peak_gib, step_s, utilisation = measured_on_h200(gpus, settings)
    hardware = load_hardware("h200_8")
    plan = make_plan(place(load("h200", [("mesh.ep", str(gpus)), *settings.items()]), hardware), hardware)
    assert plan["memory"]["peak_bytes"] / GIB == pytest.approx(peak_gib, rel=0.15)
    own = plan["time"]["ep"]
    assert own["overlapped_s"] <= own["in_sequence_s"] < step_s < 4 * own["overlapped_s"]
    assert utilisation < own["mfu_ceiling_in_sequence"]


@pytest.mark.parametrize(
    ("settings", "peak_gib"),
    [
        ({"ep.transport": "rowwise"}, 87.22),
        ({"ep.transport": "pooled_wave", "ep.slots": "assignment"}, 95.33),
        ({"ep.transport": "pooled_wave"}, 90.55),
        ({"ep.transport": "ragged"}, 106.29),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_peaks_that_xla_allots_for_two_h200(settings, peak_gib):
    """`python -m tools.compile --config configs/h200.toml --hardware h200_8 --devices 2` says them, jaxlib 0.11.2."""
    hardware = load_hardware("h200_8")
    config = place(load("h200", [("mesh.ep", "2"), *settings.items()]), hardware)
    assert memory(Sizes(config)).peak / GIB == pytest.approx(peak_gib, rel=0.09)


def test_weights_cross_as_planned():
    """Bytes of all gathers, scatters and sums over replicas in the program, for one layer and the tables."""
    config = tiny_config((2, 2, 2), model__remat="exchanges", model__num_layers=2, ep__waves=2)
    sizes = Sizes(config)
    layer = links.layer_traffic(sizes, "ep", 8)
    tables = links.tables_traffic(sizes, 8)
    moved = leaving(audit(config), config.mesh)
    planned = layer.forward.total + layer.backward.total + tables
    assert moved["weights"] == planned.total - (layer.forward.rows + layer.backward.rows).total
    assert moved["rows"] == (layer.forward.rows + layer.backward.rows).total


def leaving(found: dict[str, int], mesh) -> dict[str, float]:
    """Bytes that leave a device, from an audit: of rows (all-to-all) and of weights (all else but small sums)."""
    moved = {"rows": 0.0, "weights": 0.0}
    for name, count in found.items():
        kind, axes, operand = name.split()
        group = 1
        for axis in axes.split("+"):
            group *= getattr(mesh, axis)
        share = {"all_to_all": (group - 1) / group, "all_gather": group - 1, "reduce_scatter": (group - 1) / group}
        share["all_reduce"] = 2 * (group - 1) / group
        if kind == "all_reduce" and axes != "replica":
            continue  # scalars, statistics, and the gradients of norms and routers, which no plan counts
        moved["rows" if kind == "all_to_all" else "weights"] += share[kind] * int(operand) * count
    return moved


def test_the_hero_lowers_for_a_rack():
    """The whole configuration, all layers and full widths, for 64 devices: one replica with its 1024 sequences."""
    overrides = [f"--{key}={value}" for key, value in RACK.items()]
    command = [sys.executable, "-m", "tests.tools.step_audit", "--config", "hero_535b", *overrides]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "64"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    sizes = Sizes(hero(RACK))
    block, waves = sizes.config.model.global_every, sizes.config.ep.waves
    row_bytes = 3072 * 2
    rows = wave_rows(sizes.config.ep, sizes.shape, 3072)
    exchanges = {name: count for name, count in found.items() if name.startswith("all_to_all")}
    # 2 W forward and 2 W backward a layer: remat repeats none. Header rows there and back happen to be equally many.
    assert rows.sent == rows.back
    assert exchanges == {f"all_to_all ep {rows.sent * row_bytes}": 4 * waves * block}
    layer, tables = links.layer_traffic(sizes, "ep", 64), links.tables_traffic(sizes, 64)
    moved = leaving(found, sizes.config.mesh)
    assert moved["rows"] == (layer.forward.rows + layer.backward.rows).total * block
    assert moved["weights"] == (layer.forward.dense_weights + layer.backward.dense_weights).total * block + tables.total


# --- formulas by hand -------------------------------------------------------------------------------------------------


def test_groups_over_domains():
    mesh = hero().mesh  # 11 x 1 x 64
    assert members_in_domain(mesh, ("ep",), 64) == 64
    assert members_in_domain(mesh, ("fsdp", "ep"), 8) == 8
    assert members_in_domain(mesh, ("replica",), 64) == 1
    assert members_in_domain(mesh, ("replica",), 704) == 11


def test_fsdp_over_boxes_uses_the_network():
    config = load("fsdp_360b")
    inside, across = (links.layer_traffic(Sizes(config), "fsdp", domain).forward for domain in (64, 8))
    shard = 128 * 3 * 6144 * 3072 * 2 / 64
    assert (inside.routed_weights.nvlink, inside.routed_weights.network) == (63 * shard, 0)
    assert (across.routed_weights.nvlink, across.routed_weights.network) == (56 * shard, 7 * shard)


def test_replicas_sum_gradients_over_the_network():
    layer = links.layer_traffic(Sizes(hero()), "ep", 64)
    # A layer on a GPU: 6 experts, and 1/64 of the dense matrices.
    dense = 2 * 6144 * 6144 + 2 * 6144 * 1536 + 2 * 6144 * 3072 + 2 * 3 * 6144 * 3072
    elements = 6 * 3 * 3072 * 3072 + dense / 64
    assert layer.backward.replicas.network == pytest.approx(2 * 10 / 11 * elements * 4)
    assert layer.forward.replicas.total == layer.backward.replicas.nvlink == 0


def test_remat_full_repeats_the_exchange_forward():
    kept, repeated = (links.layer_traffic(Sizes(hero({"model.remat": r})), "ep", 64) for r in ("exchanges", "full"))
    assert repeated.backward.rows.total == kept.backward.rows.total + kept.forward.rows.total
    none = links.layer_traffic(Sizes(hero({"model.remat": "none"})), "ep", 64)
    assert none.backward.dense_weights.total == kept.backward.dense_weights.total - kept.forward.dense_weights.total


def test_padding_and_remat_flops():
    own = bounds(Sizes(hero(GATE)), NVL72, "ep")
    routed = 3 * 65_536 * 48 * 2 * 8 * 3 * 3072 * 3072
    assert own.padding_flops == pytest.approx(0.33 * routed, rel=0.001)
    assert bounds(Sizes(hero(GATE)), NVL72, "fsdp").padding_flops == 0
    assert bounds(Sizes(hero({"model.remat": "none"})), NVL72, "ep").remat_flops == 0
    config = tiny_config((1, 2, 4), optimizer__name="muon")
    assert 0 < muon_flops(Sizes(config)) == 2 * muon_flops(Sizes(tiny_config((1, 4, 4), optimizer__name="muon")))


# --- what fits --------------------------------------------------------------------------------------------------------


def test_advice_fits_and_nothing_nearer_is_hidden():
    config = place(hero(), NVL72)
    assert not advice.fits(config, NVL72)
    offers = advice.nearest(config, NVL72)
    assert offers
    for offer in offers:
        typed = split_args(offer.text.split(), command="", description="").overrides
        again = place(hero(dict(typed)), NVL72)
        assert advice.fits(again, NVL72)
        assert memory(Sizes(again)).peak == offer.peak_bytes
    assert advice.nearest(place(hero(dict(typed)), NVL72), NVL72) == []  # it fits: no advice


def test_a_small_gpu_gets_fewer_layers():
    small = Hardware(**{**vars(NVL72), "memory_gb": 60.0})
    config = place(hero(), small)
    offers = advice.nearest(config, small)
    assert [key for key, _ in offers[0].changes][-1] == "model.num_layers"
    tiny = Hardware(**{**vars(NVL72), "memory_gb": 1.0})
    assert advice.nearest(config, tiny) == []
    assert "No setting tried here" in "\n".join(lines(make_plan(config, tiny)))


@pytest.mark.parametrize("memory_gb", [80.0, 186.0, 400.0])
def test_the_largest_model_is_the_largest(memory_gb):
    hardware = Hardware(**{**vars(NVL72), "memory_gb": memory_gb})
    frugal = advice.frugal(place(hero(), hardware))
    layers = advice.largest(frugal, hardware)
    assert layers
    assert layers % 4 == 0
    assert advice.fits(advice.changed(frugal, (("model.num_layers", layers),)), hardware)
    assert not advice.fits(advice.changed(frugal, (("model.num_layers", layers + 4),)), hardware)


def test_ragged_dot_is_named_where_it_fills_the_memory():
    plan = make_plan(place(load("fsdp_360b", [("ep.kernels", "xla")]), NVL72), NVL72)
    assert not plan["fit"]["fits"]
    assert any("ragged_dot" in warning for warning in plan["warnings"])


# --- the command ------------------------------------------------------------------------------------------------------


def test_command_starts_no_backend(tmp_path):
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "tools.plan", "--config", "configs/hero_535b.toml", "--json", str(out)]
    command += ["--hardware", "configs/hardware/gb200_nvl72.toml", "--ep.waves", "1"]
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}  # any use of a device would fail
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert json.loads(out.read_text()) == make_plan(place(hero({"ep.waves": "1"}), NVL72), NVL72)
    assert "Not planned: drops, without a trace" in done.stdout


@pytest.mark.parametrize("name", shipped_hardware())
@pytest.mark.parametrize("transport", ["pooled_wave", "fixed_cell", "ragged", "rowwise", "ring", "dense", "auto"])
def test_every_transport_plans_on_every_hardware(name, transport, capsys):
    main(["--config", "h200", "--hardware", name, "--mesh.ep", "8", "--ep.transport", transport])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert load_hardware(name).name in out
    assert ("rowwise: planned as" in out) == (transport in ("rowwise", "auto"))


def test_slots_of_tokens_need_smaller_buffers():
    """Two shards and 8 choices: a pool of all tokens instead of 1.15 times four assignments of each."""
    shape = LayerShape(num_shards=2, num_experts=64, experts_per_token=8, tokens=4096)
    assignments, tokens = (wave_rows(EPConfig(slots=slots), shape, 1024) for slots in ("assignment", "token"))
    assert tokens.sent == tokens.received == 2 * 4096
    assert tokens.returned == 2 * (4096 + 4)  # 8 flags fit one lane of a slot
    assert (tokens.kept_back, assignments.kept_back) == (4096, assignments.returned)
    assert assignments.sent > 4.5 * tokens.sent
    assert assignments.experts == tokens.experts


def test_auto_is_planned_as_it_would_be_chosen():
    """One-sided on up to 8 GPUs with kernels and rows that they move; nothing sent where one holds all experts."""

    def planned(**changes):
        changes = {"ep.transport": "auto", **{name.replace("__", "."): value for name, value in changes.items()}}
        return place(load(str(ROOT / "configs/h200.toml"), list(changes.items())), load_hardware("h200_8")).ep.transport

    assert planned() == planned(mesh__ep="2") == "rowwise"
    assert planned(mesh__ep="1") == "dense"
    assert planned(ep__kernels="xla") == planned(model__latent_dim="1088") == "pooled_wave"
    more = dataclasses.replace(load_hardware("h200_8"), domains=2)
    config = load(str(ROOT / "configs/h200.toml"), [("mesh.fsdp", "2"), ("mesh.ep", "8")])
    assert place(config, more).ep.transport == "pooled_wave"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--hardware: is missing"),
        (["--hardware", "tpu"], "no such file; shipped are b200_8"),
        (["--hardware", "h200_8", "--config", "hero_535b"], "needs 704 GPUs, the hardware has 1 x 8"),
        (["--hardware", "gb200_nvl72", "--mesh.ep", "128", "--router.num_experts", "128"], "must divide the 64 GPUs"),
        (["--hardware", "h200_8", "--ep.wave", "2"], "did you mean ep.waves"),
        (["--hardware", "h200_8", "--json", "/no/such/folder/plan.json"], "cannot be written"),
    ],
)
def test_refusals(argv, message):
    with pytest.raises(ConfigError, match=message):
        main(argv)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("memory_gb = -1", "hardware.memory_gb = -1"),
        ("memory_tb = 1", "hardware.memory_tb = 1: no such key"),
        ('device_kind = "abacus"', "PEAK_FLOPS"),
        ("domains = 1.5", "expected an integer"),
    ],
)
def test_hardware_files_are_strict(tmp_path, change, message):
    key = change.split(" ")[0]
    kept = [line for line in shipped_hardware()["h200_8"].read_text().splitlines() if not line.startswith(f"{key} ")]
    (tmp_path / "mine.toml").write_text("\n".join([*kept, change]))
    with pytest.raises(ConfigError, match=message):
        load_hardware(str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").write_text("\n".join(line for line in kept if "memory_gb" not in line))
    with pytest.raises(ConfigError, match=r"hardware\.memory_gb: is missing|is missing"):
        load_hardware(str(tmp_path / "mine.toml"))


def test_refused_command_line_has_its_exit_code():
    command = [sys.executable, "-m", "tools.plan", "--hardware", "tpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert done.stderr.startswith("refused: --hardware")
    assert done.stderr.count("\n") == 1
