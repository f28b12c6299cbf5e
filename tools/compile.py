"""Compiles the training step for GPUs this machine does not have, and prints what the compiler knows of it.

    python -m tools.compile --config configs/h200.toml --hardware h200_8 --devices 2

Seconds to trace and compile, bytes of one GPU beside the planner's, the largest buffers, kernels and collectives. The
compiler is that of JAX's CUDA plugin (pip install 'ep-jax[cuda]'); transport, kernels and flags are those of a training
run on such GPUs, which pretend.py describes. Nothing runs. Any setting can be changed on the command line.
"""

import collections
import dataclasses
import json
import re
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_jax import xla_flags
from ep_jax.cli import Option, split_args
from ep_jax.config import RunConfig, check_run, load, placed
from ep_jax.exits import run_main
from ep_jax.fields import ConfigError
from ep_jax.launch import preset_of
from ep_jax.planning.hardware import Hardware, load_hardware
from ep_jax.planning.memory import memory
from ep_jax.planning.plan import place
from ep_jax.planning.sizes import Sizes
from tools import pretend

GIB = 2**30
WIDTH = 100
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
LARGEST = 8  # groups of buffers that are printed
SCAFFOLD = ("jit(step)", "shard_map", "while", "body", "eval_jaxpr", "jit(wrapper)", "checkpoint", "jvp()")
NOT_TUNED = (
    "XLA tunes kernels only on a GPU: that comes on top there, and may choose other kernels, which may need other "
    "temporary memory."
)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = .*?[\])}] ([a-z][a-z0-9-]*)\(")


def main(argv: Sequence[str]) -> None:
    """Compiles what a command line says. Raises ConfigError."""
    options = (
        Option("hardware", "PATH|NAME", "hardware file, or a shipped one: h100_8, h200_8"),
        Option("devices", "N", "GPUs of one process; without it those of an NVLink domain of the hardware"),
        Option("json", "FILE", "write all numbers to a file"),
    )
    description = (__doc__ or "").split("\n")[0]
    arguments = split_args(argv, command="python -m tools.compile", description=description, extra=options)
    if "hardware" not in arguments.options:
        raise ConfigError("--hardware: is missing; allowed is a file, h100_8 or h200_8")
    hardware = load_hardware(arguments.options["hardware"])
    pretend.check_hardware(hardware)
    most = hardware.devices_per_domain
    text = arguments.options.get("devices", str(most))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"--devices = {text!r}: allowed is 1 to {most}, the GPUs of an NVLink domain")
    hardware = dataclasses.replace(hardware, devices_per_domain=int(text), domains=1)
    config = load(arguments.config, arguments.overrides)
    placement = place(config, hardware)
    planned = memory(Sizes(placement))
    # Placed, but with the transport as it was asked for.
    config = dataclasses.replace(config, mesh=placement.mesh, train=placement.train)
    pretend.check_packages()
    flags = xla_flags.prepare(preset_of(config, "gpu"), profiling=bool(config.profile.steps))
    pretend.stay_on_cpu()
    report = compile_step(config, hardware) | {
        "hardware": dataclasses.asdict(hardware),
        "flags": list(flags),
        "usable_bytes": pretend.usable_bytes(hardware),
        "memory_fraction": pretend.memory_fraction(hardware),
        "planned": {"temporary_bytes": planned.temporaries, "peak_bytes": planned.peak},
    }
    print("\n".join(lines(report)))  # first: minutes went into it, and the file may be refused
    if path := arguments.options.get("json"):
        try:
            Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json = {path!r}: cannot be written: {error.strerror}") from None


def compile_step(config: RunConfig, hardware: Hardware) -> dict[str, Any]:
    """What is known of the training step, compiled for all GPUs of the hardware. Raises ConfigError."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding

    from ep_jax.data.sequences import Batch
    from ep_jax.ep import implementations
    from ep_jax.ep.choice import definite
    from ep_jax.launch import unused_settings
    from ep_jax.mesh import make_mesh
    from ep_jax.model.attention import describe_kernel
    from ep_jax.state import state_target
    from ep_jax.step import BATCH_SPEC, make_train_step

    with pretend.pretended(hardware, hardware.num_devices) as devices, tempfile.TemporaryDirectory() as dump:
        config = placed(config, len(devices))
        placement, model = config.mesh, config.model
        rows = model.latent_dim, model.compute_dtype, config.router.experts_per_token
        settings, note = definite(config.ep, placement.ep, devices, *rows)
        config = dataclasses.replace(config, ep=settings)
        check_run(config)
        mesh, parts = make_mesh(placement, devices), config.train.accumulation
        shape = (parts, config.train.sequences_per_step // parts, config.data.sequence_length)
        kinds = Batch(*(np.int32,) * len(Batch._fields))._replace(valid=np.bool_)
        sharding = NamedSharding(mesh, BATCH_SPEC)
        batch = jax.tree.map(lambda kind: jax.ShapeDtypeStruct(shape, kind, sharding=sharding), kinds)
        began = time.perf_counter()
        step: Any = make_train_step(config, mesh)  # jitted, which its type does not say
        lowered = step.lower(state_target(config, mesh), batch)
        traced = time.perf_counter()
        compiled = lowered.compile({"xla_dump_to": dump})  # for the buffers alone: a second or two
        seconds = {"tracing_s": traced - began, "compiling_s": time.perf_counter() - traced}
        text = compiled.as_text()
        return {
            "mesh": placement.shape_text(),
            "microbatches": parts,
            "tokens_per_gpu_and_microbatch": shape[1] * shape[2] // mesh.size,
            "notes": [note] * bool(note) + unused_settings(config),
            "protocol": config.ep.describe(),
            "rows_and_experts": implementations.describe(config.ep.kernels),
            "attention": describe_kernel(model, config.data.sequence_length),
            **{name: round(value, 1) for name, value in seconds.items()},
            "memory": memory_bytes(compiled.memory_analysis()),
            "largest_at_peak": largest_at_peak(Path(dump), text),
            "program": count_program(text),
        }


def memory_bytes(stats: Any) -> dict[str, int]:
    """Bytes of one GPU, of XLA's CompiledMemoryStats; an output that is aliased lies in its argument."""
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    arguments, temporary = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    return {
        "arguments_bytes": arguments,
        "temporary_bytes": temporary,
        "outputs_bytes": outputs,
        "aliased_bytes": stats.alias_size_in_bytes,
        "peak_bytes": arguments + temporary + outputs,
    }


def count_program(text: str) -> dict[str, Any]:
    """Fusions, custom calls by target and collectives by kind of a compiled program's HLO, each counted once.

    What stands in a loop is counted once too. A collective that starts and ends apart is one; fusions within a fusion
    are not counted.
    """
    fusions, fused = collections.Counter[str](), set[str]()  # by the computation they stand in; names of computations
    calls, collectives, computation = collections.Counter[str](), collections.Counter[str](), ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            computation = header[1]
        elif found := _INSTRUCTION.match(line):
            kind = found[2].removesuffix("-start")
            if kind == "fusion":
                fusions[computation] += 1
                fused.update(re.findall(r"calls=%?([\w.-]+)", line))
            elif kind == "custom-call":
                calls.update(re.findall(r'custom_call_target="([^"]*)"', line)[:1])
            elif kind in COLLECTIVES:
                collectives[kind] += 1
    return {
        "fusions": sum(count for name, count in fusions.items() if name not in fused),
        "custom_calls": dict(calls.most_common()),
        "collectives": dict(collectives.most_common()),
    }


def largest_at_peak(dump: Path, text: str) -> list[dict[str, Any]]:
    """Temporary buffers that live when most bytes do, by where they come from, largest first.

    dump: a folder of XLA's dumps; text: the HLO they are of. Empty where they are not there or do not say.
    """
    dumped = [next(dump.glob(f"*jit_step*-{name}.txt"), None) for name in ("live-range", "buffer-assignment")]
    lives, assignment = (path.read_text(encoding="utf-8") if path else "" for path in dumped)
    blocks = [block for block in assignment.split("\nallocation ") if "preallocated-temp" in block.split("\n")[0]]
    values = re.findall(r"value: <\d+ ([^\s{]+)(\{[\d,]*\})?", "".join(blocks))
    temporary = {f"{name}{index or '{}'}" for name, index in values}
    sources = {}
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            where = re.search(r'op_name="([^"]*)"', line)
            kind = "carried by a loop" if found[2] == "parameter" else found[2]
            sources[found[1]] = short_name(where[1]) if where and found[2] != "parameter" else kind
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for line in lives.partition("(peak):\n")[2].splitlines():
        found = re.match(r"\s+((\S+?)\{[\d,]*\}): (\d+) bytes \(cumulative", line)
        if not found:
            break
        if found[1] in temporary:
            groups[sources.get(found[2], found[2])].append(int(found[3]))
    rows = [{"source": name, "buffers": len(sizes), "bytes": sum(sizes)} for name, sizes in groups.items()]
    return sorted(rows, key=lambda row: -row["bytes"])


def short_name(op_name: str) -> str:
    """JAX's path of an operation without what every path has."""
    return "/".join(part for part in op_name.split("/") if part not in SCAFFOLD) or op_name


def lines(report: dict[str, Any]) -> list[str]:
    """The report as text of at most 100 columns."""
    found, planned, usable = report["memory"], report["planned"], report["usable_bytes"]
    hardware, program = report["hardware"], report["program"]
    rows = (
        ("arguments: state and batch", found["arguments_bytes"], ""),
        ("temporary", found["temporary_bytes"], f"planned {planned['temporary_bytes'] / GIB:.2f}"),
        ("outputs outside the arguments", found["outputs_bytes"], ""),
        ("peak", found["peak_bytes"], f"planned {planned['peak_bytes'] / GIB:.2f}"),
        (f"usable: {hardware['memory_gb']:g} GB x {report['memory_fraction']:g}", usable, ""),
    )
    left = (usable - found["peak_bytes"]) / GIB
    counts = {"custom calls": program["custom_calls"], "collectives": program["collectives"]}
    texts = [f"{name}: {', '.join(f'{n} {of}' for of, n in each.items()) or 'none'}" for name, each in counts.items()]
    tokens = f"{report['tokens_per_gpu_and_microbatch']:,} tokens on a GPU at a time"
    head = [
        f"training step for {hardware['devices_per_domain']} x {hardware['device_kind']}, none of them used",
        f"mesh: {report['mesh']}; {tokens}, {report['microbatches']} times a step",
        *(f"note: {note}" for note in report["notes"]),
        f"flags: {' '.join(report['flags']) or 'none added'}",
        f"protocol: {report['protocol']}",
        f"rows and experts by {report['rows_and_experts']}; attention by {report['attention']}",
        f"traced in {report['tracing_s']:.1f} s, compiled in {report['compiling_s']:.1f} s. {NOT_TUNED}",
    ]
    table = [f"  {name:<36}{size / GIB:9.2f}  {note}".rstrip() for name, size, note in rows]
    table.append(f"It fits: {left:.1f} GiB are left." if left >= 0 else f"It does not fit: {-left:.1f} GiB too much.")
    buffers = [
        f"  {row['bytes'] / GIB:9.2f}  {row['buffers']:>4} x {row['source'][-(WIDTH - 20) :]}"
        for row in report["largest_at_peak"][:LARGEST]
    ]
    title = [f"  {'GiB':>9}  of temporaries when most is needed"] if buffers else []
    whole = f"In the program, loops once: {program['fusions']} fusions; {'; '.join(texts)}"
    return [*_wrap(head), "", f"{'Memory of one GPU':<38}{'GiB':>9}", *table, *title, *buffers, "", *_wrap([whole])]


def _wrap(texts: Sequence[str]) -> list[str]:
    wrapped = (textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for text in texts)
    return [line for found in wrapped for line in found]


if __name__ == "__main__":
    run_main(main)
