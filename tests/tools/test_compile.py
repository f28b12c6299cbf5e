"""`tools.compile` without a CUDA plugin: what it refuses, what it reads out of a compiled program, what it prints.

Compiling itself is tested in tests/gpu/test_gpu_compile.py.
"""

import contextlib
import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.extend.backend
import pytest
from jax.experimental import topologies

from ep_jax import xla_flags
from ep_jax.config import load
from ep_jax.exits import REFUSED
from ep_jax.fields import ConfigError
from ep_jax.planning.hardware import load_hardware, shipped_hardware
from ep_jax.planning.plan import make_plan, place
from tests.train.tiny_run import tiny_config
from tools import compile as tool
from tools import pretend

ROOT = Path(__file__).parents[2]
GIB = 2**30
H200 = load_hardware("h200_8")
HLO = """HloModule jit_step, is_scheduled=true

%inner (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  ROOT %exp.0 = f32[8]{0} exponential(%p.0)
}

%fused_computation (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %nested = f32[8]{0} fusion(%p.1), kind=kLoop, calls=%inner
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.0 = f32[] add(%a, %b)
}

%body (carried.1: (f32[8], s32[])) -> (f32[8], s32[]) {
  %carried.1 = (f32[8]{0}, s32[]) parameter(0)
  %rows.1 = f32[8]{0} get-tuple-element(%carried.1), index=0
  %turn = s32[] get-tuple-element(%carried.1), index=1
  %put.1 = (f32[8]{0}, /*index=1*/f32[8]{0}) custom-call(%rows.1), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/shard_map/while/body/jvp(dispatch)/rowwise_put"}
  %one = f32[8]{0} get-tuple-element(%put.1), index=0
  %all-reduce-start = f32[8]{0} all-reduce-start(%one), to_apply=%sum
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %put.2 = f32[8]{0} custom-call(%all-reduce-done), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/shard_map/while/body/jvp(dispatch)/rowwise_put"}
  ROOT %pair = (f32[8]{0}, s32[]) tuple(%put.2, %turn)
}

ENTRY %main (weights.1: f32[8]) -> f32[] {
  %weights.1 = f32[8]{0} parameter(0)
  %fusion.1 = f32[8]{0} fusion(%weights.1), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(step)/add"}
  %fusion-start.1 = ((f32[8]{0}), f32[8]{0}, u32[]) fusion-start(%fusion.1), kind=kLoop, calls=%inner
  %fusion-done.1 = f32[8]{0} fusion-done(%fusion-start.1)
  %gathered = f32[8]{0} all-gather(%fusion-done.1), dimensions={0}
  ROOT %called = f32[] custom-call(%gathered), custom_call_target="triton_kernel_call"
}
"""
LIVES = """HloLiveRange (max 9):
  Live ranges at 7 (peak):
    weights.1{}: 9000 bytes (cumulative: 9000 bytes)
    put.1{0}: 4000 bytes (cumulative: 13000 bytes)
    put.2{}: 3000 bytes (cumulative: 16000 bytes)
    carried.1{0}: 2000 bytes (cumulative: 18000 bytes)
    gathered{}: 1000 bytes (cumulative: 19000 bytes)
    made{}: 900 bytes (cumulative: 19900 bytes)
  Stack trace breakdown for peak usage: 19 000 bytes
    main (100.0%, total: 19 000 bytes, current: 0 bytes, remaining: 19 000 bytes)
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 9000, page 0, parameter 0, shape |f32[8]| at ShapeIndex {}, maybe-live-out:
 value: <1 weights.1 @0> (size=9000,offset=0): f32[8]{0}
 value: <2 made @0> (size=900,offset=0): f32[8]{0}
allocation 1: size 10000, page 0, preallocated-temp:
 value: <3 put.1{} @0> (size=16,offset=0): (f32[8]{0}, f32[8]{0})
 value: <4 put.1{0} @0> (size=4000,offset=16): f32[8]{0}
 value: <5 put.2 @0> (size=3000,offset=4016): f32[8]{0}
 value: <6 carried.1{0} (phi) @0> (size=2000,offset=7016): f32[8]{0}
 value: <7 gathered @0> (size=1000,offset=9016): f32[8]{0}
allocation 2: size 4, page 0, thread-local:
 value: <8 elsewhere @0> (size=4,offset=0): f32[]
"""


def run(*arguments: str) -> None:
    tool.main(arguments)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--hardware: is missing; allowed is a file, h100_8 or h200_8"),
        (("--hardware", "h300"), "--hardware = 'h300': no such file"),
        (("--hardware", "b200_8"), "hardware.device_kind = 'NVIDIA B200': the kernels need compute capability 9.0"),
        (("--hardware", "gb200_nvl72"), "allowed here is NVIDIA H100 or NVIDIA H200, as in h100_8 and h200_8"),
        (("--hardware", "h200_8", "--devices", "0"), "--devices = '0': allowed is 1 to 8"),
        (("--hardware", "h200_8", "--devices", "9"), "--devices = '9': allowed is 1 to 8"),
        (("--hardware", "h200_8", "--devices", "two"), "--devices = 'two': allowed is 1 to 8"),
        (("--hardware", "h200_8", "--device", "2"), "did you mean --devices?"),
        (("--hardware", "h200_8", "--devices", "2", "--mesh.ep", "4"), "found 2|has 1 x 2"),
        (("--hardware", "h200_8", "--mesh.fsdp", "8", "--ep.waves", "0"), "ep.waves = 0"),
    ],
)
def test_wrong_arguments_are_refused_on_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ({*pretend.PLUGINS, "jax_triton"}, "jax_cuda13_plugin, jax_triton"),
        ({*pretend.PLUGINS}, "jax_cuda13_plugin"),
        ({"jax_cuda13_plugin", "jax_triton"}, "jax_triton"),  # the plugin for CUDA 12 is there
    ],
)
def test_a_missing_package_is_named_with_what_to_install(missing, named, monkeypatch):
    """After everything that can be refused without it, and before flags are set or JAX is told anything."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else SimpleNamespace())
    monkeypatch.setattr(xla_flags, "prepare", lambda *_, **__: pytest.fail("flags were set"))
    with pytest.raises(ConfigError) as caught:
        run("--config", "h200", "--hardware", "h200_8", "--devices", "2")
    assert str(caught.value) == f"compiling for GPUs: {named} not installed: pip install 'ep-jax[cuda]'"


def test_the_command_refuses_with_the_exit_code_of_a_wrong_configuration():
    command = [sys.executable, "-m", "tools.compile", "--hardware", "b200_8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert done.stderr.startswith("refused: hardware.device_kind = 'NVIDIA B200'")
    assert len(done.stderr.splitlines()) == 1


# --- the GPU that is described ----------------------------------------------------------------------------------------


def test_every_shipped_hopper_is_described_and_no_other_gpu_is():
    described = set()
    for name in shipped_hardware():
        hardware = load_hardware(name)
        try:
            pretend.check_hardware(hardware)
        except ConfigError:
            continue
        described.add(name)
        text = pretend.target_config(hardware)
        assert f'device_description_str: "{hardware.device_kind}"' in text
    assert described == {"h100_8", "h200_8"}


def test_a_description_is_lines_of_keys_and_values():
    depth = 0
    for line in pretend.target_config(H200).splitlines():
        opens, fields = (
            re.fullmatch(r"\s*(?:(\w+ \{)|\}|(?:\w+: [\w.\"]+(?: \w+)*\"?|\w+ \{(?: \w+: \d+)+ \}))", line),
            line,
        )
        assert opens, fields
        depth += line.count("{") - line.count("}")
        assert depth in (0, 1)
    assert depth == 0


@pytest.fixture
def triton(monkeypatch):
    """A stand-in for jax-triton's door to the GPU."""
    library = SimpleNamespace(get_compute_capability=lambda device: pytest.fail("a GPU was asked"))
    inner = SimpleNamespace(triton_kernel_call_lib=library)
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_lib=inner))
    monkeypatch.setitem(sys.modules, "jax_triton.triton_lib", inner)
    return library


def test_everybody_is_told_of_the_described_gpus_and_only_for_a_while(triton, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        topologies, "get_topology_desc", lambda **words: asked.update(words) or SimpleNamespace(devices="ab")
    )
    before = jax.devices()
    with pretend.pretended(H200, 2) as devices:
        assert devices == ["a", "b"]
        assert (jax.default_backend(), jax.devices(), jax.extend.backend.get_default_device()) == ("gpu", devices, "a")
        assert triton.get_compute_capability(0) == 90
    assert (jax.default_backend(), jax.devices()) == ("cpu", before)
    assert asked == {"platform": "cuda", "topology": "1x1x2", "target_config": pretend.target_config(H200)}


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, ImportError])
def test_a_plugin_that_does_not_work_is_refused_on_one_line(error, triton, monkeypatch):
    def broken(**_):
        raise error("no driver\nand much more")

    monkeypatch.setattr(topologies, "get_topology_desc", broken)
    with pytest.raises(ConfigError) as caught, pretend.pretended(H200, 2):
        pytest.fail("it went on")
    assert str(caught.value) == "compiling for GPUs: JAX's CUDA plugin does not work here: no driver"
    assert jax.default_backend() == "cpu"


@pytest.mark.parametrize(("variables", "fraction"), [({}, 0.9), ({"XLA_CLIENT_MEM_FRACTION": "0.75"}, 0.75)])
def test_xla_is_told_the_memory_that_jax_may_take(variables, fraction, monkeypatch):
    """XLA itself takes 80 % of what stands in the description."""
    monkeypatch.setattr(xla_flags, "relevant_environment", lambda: variables)
    assert pretend.usable_bytes(H200) == int(150.1e9 * fraction)
    told = int(re.search(r"device_memory_size: (\d+)", pretend.target_config(H200))[1])
    assert told * 80 // 100 == pytest.approx(pretend.usable_bytes(H200), abs=1)


def test_a_memory_fraction_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setattr(xla_flags, "relevant_environment", lambda: {"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"})
    with pytest.raises(ConfigError, match="XLA_PYTHON_CLIENT_MEM_FRACTION = 'most': expected a number"):
        pretend.memory_fraction(H200)


# --- what is read out of a compiled program ---------------------------------------------------------------------------


def test_counts_of_a_program():
    """A fusion within a fusion, an instruction that ends what another started and a tuple's parts count nothing."""
    assert tool.count_program(HLO) == {
        "fusions": 2,
        "custom_calls": {"mosaic_gpu_v2": 2, "triton_kernel_call": 1},
        "collectives": {"all-reduce": 1, "all-gather": 1},
    }


def test_counts_of_a_program_without_any():
    assert tool.count_program("ENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n") == {
        "fusions": 0,
        "custom_calls": {},
        "collectives": {},
    }


def test_largest_buffers_have_their_place_in_the_model_and_are_no_arguments(tmp_path):
    assert tool.largest_at_peak(tmp_path, HLO) == []  # nothing was dumped
    (tmp_path / "module_0007.jit_step.sm_9.0a_gpu_after_optimizations-live-range.txt").write_text(LIVES)
    assert tool.largest_at_peak(tmp_path, HLO) == []
    (tmp_path / "module_0007.jit_step.sm_9.0a_gpu_after_optimizations-buffer-assignment.txt").write_text(ASSIGNMENT)
    (tmp_path / "module_0007.jit_step.sm_9.0a_gpu_after_optimizations-buffer-assignment-values.txt").write_text("x")
    assert tool.largest_at_peak(tmp_path, HLO) == [
        {"source": "jvp(dispatch)/rowwise_put", "buffers": 2, "bytes": 7000},
        {"source": "carried by a loop", "buffers": 1, "bytes": 2000},
        {"source": "all-gather", "buffers": 1, "bytes": 1000},
    ]


def test_outputs_that_lie_in_arguments_are_counted_once():
    stats = SimpleNamespace(
        argument_size_in_bytes=100, output_size_in_bytes=90, alias_size_in_bytes=80, temp_size_in_bytes=1000
    )
    assert tool.memory_bytes(stats) == {
        "arguments_bytes": 100,
        "temporary_bytes": 1000,
        "outputs_bytes": 10,
        "aliased_bytes": 80,
        "peak_bytes": 1110,
    }


def test_a_step_is_compiled_as_a_run_would_compile_it(monkeypatch):
    """For CPU devices in the place of the pretended ones: everything but the plugin."""

    @contextlib.contextmanager
    def cpus(hardware, num_devices):
        yield jax.devices()[:num_devices]

    monkeypatch.setattr(pretend, "pretended", cpus)
    hardware = dataclasses.replace(H200, devices_per_domain=2)
    found = tool.compile_step(tiny_config((1, 1, 2), train__accumulation=2, ep__transport="auto"), hardware)
    assert found["mesh"] == "replica 1 x fsdp 1 x ep 2"
    assert (found["microbatches"], found["tokens_per_gpu_and_microbatch"]) == (2, 32)  # 8 rows of 16 tokens a step
    assert found["notes"][0].startswith(
        "ep.transport = auto: pooled_wave, as rowwise cannot run: kernels are for NVIDIA"
    )
    assert found["protocol"].startswith("pooled_wave")
    assert found["memory"]["aliased_bytes"] > 0.9 * found["memory"]["arguments_bytes"]  # the state is donated
    assert found["program"]["collectives"]["all-to-all"] > 0
    assert 0 < sum(row["bytes"] for row in found["largest_at_peak"]) <= found["memory"]["temporary_bytes"]
    assert tool.lines(report(**found))


# --- what is printed --------------------------------------------------------------------------------------------------


def report(temporary: int = 70 * GIB, **changes):
    memory = {"arguments_bytes": 14 * GIB, "temporary_bytes": temporary, "outputs_bytes": 0, "aliased_bytes": 13 * GIB}
    rows = [{"source": "x/" * 100 + "rowwise_put", "buffers": 16, "bytes": 9 * GIB}] * 20
    return {
        "hardware": dataclasses.asdict(dataclasses.replace(H200, devices_per_domain=2)),
        "mesh": "replica 1 x fsdp 1 x ep 2",
        "microbatches": 8,
        "tokens_per_gpu_and_microbatch": 32768,
        "notes": ["ep.transport = auto: rowwise"],
        "flags": ["xla_gpu_enable_latency_hiding_scheduler=true"] * 4,
        "protocol": "rowwise, " * 20,
        "rows_and_experts": "Triton kernels",
        "attention": "tokamax",
        "tracing_s": 12.34,
        "compiling_s": 150.0,
        "memory": memory | {"peak_bytes": 14 * GIB + temporary},
        "usable_bytes": 125 * GIB,
        "memory_fraction": 0.9,
        "planned": {"temporary_bytes": 81 * GIB, "peak_bytes": 95 * GIB},
        "largest_at_peak": rows,
        "program": tool.count_program(HLO),
    } | changes


def test_a_report_fits_a_terminal_and_says_all():
    found = tool.lines(report())
    assert max(map(len, found)) <= 100
    text = "\n".join(found)
    assert "training step for 2 x NVIDIA H200, none of them used" in text
    assert "traced in 12.3 s, compiled in 150.0 s. XLA tunes kernels only on a GPU" in text
    assert re.search(r"temporary +70\.00  planned 81\.00\n", text)
    assert re.search(r"peak +84\.00  planned 95\.00\n", text)
    assert re.search(r"usable: 150\.1 GB x 0\.9 +125\.00\n", text)
    assert "It fits: 41.0 GiB are left." in found
    assert text.count("rowwise_put") == tool.LARGEST
    program = text[text.index("In the program") :].replace("\n ", "")
    assert "2 fusions; custom calls: 2 mosaic_gpu_v2, 1 triton_kernel_call; collectives: 1 all-" in program


def test_a_report_of_what_does_not_fit_and_of_one_gpu():
    empty = {"fusions": 3, "custom_calls": {}, "collectives": {}}
    found = tool.lines(report(temporary=120 * GIB, largest_at_peak=[], program=empty, flags=[], notes=[]))
    assert "It does not fit: 9.0 GiB too much." in found
    assert "flags: none added" in found
    assert found[-1] == "In the program, loops once: 3 fusions; custom calls: none; collectives: none"
    assert not any("when most is needed" in line for line in found)


def test_the_planner_is_asked_for_the_gpus_that_are_compiled_for(monkeypatch, capsys):
    """Everything around the compiler, with a stand-in for it; the planned numbers are those of tools.plan."""
    compiled = {
        name: value
        for name, value in report().items()
        if name not in ("hardware", "flags", "usable_bytes", "memory_fraction", "planned")
    }
    asked = []
    for name in ("check_packages", "stay_on_cpu"):
        monkeypatch.setattr(pretend, name, lambda: None)
    monkeypatch.setattr(xla_flags, "prepare", lambda *_, **__: ("a=1",))
    monkeypatch.setattr(tool, "compile_step", lambda config, hardware: asked.append(hardware) or compiled)
    run("--config", "h200", "--hardware", "h200_8", "--devices", "2", "--train.accumulation", "8")
    (hardware,) = asked
    assert hardware.num_devices == 2
    plan = make_plan(place(load("h200", [("train.accumulation", "8")]), hardware), hardware)
    assert f"planned {plan['memory']['peak_bytes'] / GIB:.2f}" in capsys.readouterr().out
