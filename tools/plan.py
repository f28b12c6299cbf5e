"""Plans memory, traffic and time of a configuration on hardware one need not have.

    python -m tools.plan --config configs/hero_535b.toml --hardware configs/hardware/gb200_nvl72.toml

Any setting can be changed on the command line (--ep.waves 1); --json FILE writes all numbers. Starts no device.

What is computed where, with every formula in the header of its file:

    ep_jax/planning/memory.py   state = 4 bytes a float32 parameter + optimizer; gradients 4 bytes; activations by
                                remat; buffers of a wave = rows * width * bytes; peak = state + gradients + largest
                                phase
    ep_jax/planning/links.py    bytes that leave a GPU: (n-1) * shard for a gather, (n/m-1) * shard of them over the
                                network; rows from ep_jax.ep.traffic, which is tested against compiled programs
    ep_jax/planning/bounds.py   seconds = (model + padding + remat + optimizer) FLOPs / peak, bytes / rate; MFU ceiling
                                = model FLOPs / (bound * peak)
    ep_jax/planning/expected.py drops from a recorded trace (--trace), by replay
    ep_jax/planning/advice.py   nearest settings that fit, largest model by layers

This file only prints. Memory temporaries are estimates within a factor of 2, times are lower bounds.
"""

import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_jax.cli import Option, split_args
from ep_jax.config import load
from ep_jax.exits import run_main
from ep_jax.fields import ConfigError
from ep_jax.planning.hardware import load_hardware, shipped_hardware
from ep_jax.planning.plan import make_plan, place

GIB = 2**30
SCHEME_NAMES = {"fsdp": "FSDP only", "ep_full": "EP, full width", "ep": "EP, as routed"}


ROWS_OF = {
    "sent": "sent",
    "received": "received",
    "expert input": "experts",
    "expert hidden": "experts",
    "expert output": "experts",
    "sent back": "back",
    "returned": "returned",
}


def main(argv: Sequence[str]) -> None:
    """Prints the plan of a command line. Raises ConfigError."""
    started = time.perf_counter()
    options = (
        Option("hardware", "PATH|NAME", f"hardware file, or a shipped one: {', '.join(shipped_hardware())}"),
        Option("trace", "FOLDER", "recorded routing: replayed at the planned ep and policy, to say what will drop"),
        Option("json", "FILE", "write all numbers of the plan to a file"),
    )
    arguments = split_args(
        argv, command="python -m tools.plan", description=(__doc__ or "").split("\n")[0], extra=options
    )
    if "hardware" not in arguments.options:
        raise ConfigError(f"--hardware: is missing; allowed is a file or {', '.join(shipped_hardware())}")
    hardware = load_hardware(arguments.options["hardware"])
    given = load(arguments.config, arguments.overrides)
    config = place(given, hardware)
    plan = make_plan(config, hardware)
    if given.ep.transport != config.ep.transport:
        print(f"ep.transport = {given.ep.transport}: planned as {config.ep.transport}")
    if trace := arguments.options.get("trace"):
        from ep_jax.planning.expected import expected_drops  # starts JAX; a plan without a trace does not

        plan["expected_drops"] = expected_drops(config, trace)
    if path := arguments.options.get("json"):
        try:
            Path(path).write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json = {path!r}: cannot be written: {error.strerror}") from None
    print("\n".join(lines(plan)))
    print(f"\nplanned in {time.perf_counter() - started:.2f} s, no device used")


def lines(plan: dict[str, Any]) -> list[str]:
    """The plan as text of at most 100 columns."""
    parts = (_head, _memory, _activations, _wave, _traffic, _time, _drops, _fit)
    texts = [part(plan) for part in parts]
    return [line for text in texts if text for line in (*text, "")][:-1]


def _head(plan: dict[str, Any]) -> list[str]:
    model, step, mesh, hardware = plan["model"], plan["step"], plan["mesh"], plan["hardware"]
    return [
        f"{model['parameters'] / 1e9:.2f} B parameters, {model['active_parameters'] / 1e9:.2f} B active (tables "
        f"included), {model['layers']} layers in blocks of {model['block_layers']}",
        f"replica {mesh['replica']} x fsdp {mesh['fsdp']} x ep {mesh['ep']} on {hardware['name']}: "
        f"{hardware['domains']} x {hardware['devices_per_domain']} GPUs",
        f"{step['tokens']:,} tokens a step, {step['tokens_per_gpu_and_microbatch']:,} on a GPU in each of "
        f"{step['microbatches']} microbatches; remat {step['remat']}, {step['optimizer']}",
        *_wrap(step["protocol"]),
    ]


def _memory(plan: dict[str, Any]) -> list[str]:
    memory, layer, state = plan["memory"], plan["state"]["layer_bytes"], plan["state"]
    rows = [
        ("weights, float32", layer["weights"], memory["weights_bytes"]),
        (f"optimizer, {plan['step']['optimizer']}, float32", layer["optimizer"], memory["optimizer_bytes"]),
        ("gradients, float32", layer["gradients"], memory["gradients_bytes"]),
        (f"weights, {plan['step']['compute_dtype']}", layer["copies"], memory["copies_bytes"]),
        (f"activations kept, remat {plan['step']['remat']}", memory["kept_layer_bytes"], memory["kept_bytes"]),
        (f"+ backward of a block of {plan['model']['block_layers']}", None, memory["backward_bytes"]),
        ("  or + head and loss", None, memory["loss_bytes"]),
        ("  or, without activations, the update", None, memory["optimizer_step_bytes"]),
        ("peak", None, memory["peak_bytes"]),
        ("usable", None, memory["usable_bytes"]),
    ]
    return [
        "Memory of one GPU [GiB]                    a layer        all",
        *(f"  {name:<38}{_gib(one)}{_gib(every)}" for name, one, every in rows),
        f"  {state['bytes_per_parameter']} bytes a matrix parameter: float32 weight, gradient and optimizer. Published "
        f"stacks count {state['published_bytes_per_parameter']}:",
        "  bfloat16 weight and gradient, float32 master and moments.",
    ]


def _activations(plan: dict[str, Any]) -> list[str]:
    parts = plan["memory"]["layer_activation_bytes"]
    return [
        "Activations of one layer, what its backward pass reads [GiB]",
        "  " + "".join(f"{name:>12}" for name in (*parts, "all")),
        "  " + "".join(f"{value / GIB:12.3f}" for value in (*parts.values(), sum(parts.values()))),
    ]


def _wave(plan: dict[str, Any]) -> list[str]:
    wave = plan["wave"]
    title = f"Buffers of one of {wave['rows']['waves']} waves"
    if "sender_pool_rows" in wave:
        title += f", P = {wave['sender_pool_rows']:,}, R = {wave['expert_rows']:,}"
    rows = {ROWS_OF[name]: wave["rows"][ROWS_OF[name]] for name in wave["bytes"]}
    return [
        f"{title:<44}{'rows':>9}{'GiB':>11}",
        *(f"  {name:<40}{rows[ROWS_OF[name]]:11,}{_gib(size)}" for name, size in wave["bytes"].items()),
    ]


def _traffic(plan: dict[str, Any]) -> list[str]:
    found = ["Bytes that leave a GPU for one layer and microbatch [GiB]"]
    header = ("NVLink", "InfiniBand", "| rows", "routed w.", "dense w.", "replicas")
    found.append(" " * 28 + "".join(f"{name:>11}" for name in header))
    for scheme, passes in plan["traffic"]["layer_bytes"].items():
        for name, parts in passes.items():
            both = {part: value["nvlink"] + value["network"] for part, value in parts.items()}
            nvlink, network = (sum(part[link] for part in parts.values()) for link in ("nvlink", "network"))
            numbers = "".join(f"{value / GIB:11.3f}" for value in both.values())
            label = f"{SCHEME_NAMES[scheme]:<15} {name}"
            found.append(f"  {label:<26}{nvlink / GIB:11.3f}{network / GIB:11.3f}{numbers}")
    tables = plan["traffic"]["tables_bytes"]
    label = "embedding and head"
    found.append(f"  {label:<26}{tables['nvlink'] / GIB:11.3f}{tables['network'] / GIB:11.3f}")
    gross = plan["traffic"]["gross_forward_bytes"]
    sizes = "; ".join(f"{SCHEME_NAMES[scheme]} {value / GIB:.2f}" for scheme, value in gross.items())
    found += _wrap(f"  Forward, factors 1, what stays at home included, as published: {sizes}")
    return found


def _time(plan: dict[str, Any]) -> list[str]:
    schemes = plan["time"]
    hardware = plan["hardware"]
    rows = [
        ("compute", "compute_s", 1, " s"),
        ("NVLink", "nvlink_s", 1, " s"),
        ("InfiniBand", "network_s", 1, " s"),
        ("step, all overlapped", "overlapped_s", 1, " s"),
        ("step, nothing overlapped", "in_sequence_s", 1, " s"),
        ("MFU ceiling, overlapped", "mfu_ceiling_overlapped", 100, " %"),
        ("MFU ceiling, nothing overlapped", "mfu_ceiling_in_sequence", 100, " %"),
    ]
    own = schemes[plan["configured_scheme"]]
    work = {name: own[f"{name}_flops"] / 1e15 for name in ("model", "padding", "remat", "optimizer")}
    return [
        "Lower bounds of a step" + " " * 14 + "".join(f"{SCHEME_NAMES[scheme]:>18}" for scheme in schemes),
        *(
            f"  {name:<34}" + "".join(f"{scheme[key] * scale:16.2f}{unit}" for scheme in schemes.values())
            for name, key, scale, unit in rows
        ),
        "  PFLOP a GPU: " + ", ".join(f"{name} {value:.3f}" for name, value in work.items()),
        f"  at {hardware['peak_flops'] / 1e15:.3g} PFLOP/s x {hardware['matmul_fraction']:.2f}, NVLink "
        f"{hardware['nvlink_gb_per_s']:.0f} GB/s x {hardware['nvlink_fraction']:.2f}, InfiniBand "
        f"{hardware['network_gb_per_s']:.0f} GB/s x {hardware['network_fraction']:.2f}",
    ]


def _drops(plan: dict[str, Any]) -> list[str]:
    found = plan.get("expected_drops")
    if not found:
        return []
    low, high = found["interval"]
    mesh, worst = plan["mesh"], found["worst_layer"]
    kept = plan["time"][plan["configured_scheme"]]["mfu_ceiling_overlapped"] * (1 - found["drop_rate"])
    lines = [f"Drops to expect at ep {mesh['ep']}, from {found['source']}, {found['steps']} steps"]
    lines += _wrap(
        f"  {100 * found['drop_rate']:.2f} % of assignments (95 % interval {100 * low:.2f} to {100 * high:.2f}): "
        f"{100 * found['drop_rate_sender']:.2f} at senders, {100 * found['drop_rate_receiver']:.2f} at receivers; "
        f"{100 * found['lost_weight']:.2f} % of combine weight; worst layer {worst['layer']}, "
        f"{100 * worst['drop_rate']:.2f} %; MFU ceiling of what is kept about {100 * kept:.1f} %"
    )
    if found["assumption"]:
        lines += _wrap(f"  {found['assumption']}")
    if not found["order_known"]:
        lines.append("  WARNING: the trace has counts but no order of assignments: approximate")
    return lines


def _fit(plan: dict[str, Any]) -> list[str]:
    fit = plan["fit"]
    found = [f"warning: {text}" for text in plan["warnings"]]
    if fit["fits"]:
        found.append("It fits.")
    elif fit["nearest"]:
        found.append("Nearest settings that fit:")
        found += [f"  {near['change']}  (peak {near['peak_bytes'] / GIB:.1f} GiB)" for near in fit["nearest"]]
    else:
        found.append("No setting tried here makes it fit: more GPUs in fsdp x ep, or a narrower model.")
    for largest in fit["largest_model"]:
        how = f"remat {largest['remat']}, {largest['microbatches']} microbatches"
        size = f"{largest['layers']} layers, {largest['parameters'] / 1e9:.1f} B parameters"
        found.append(f"Largest model that fits with {how}: {size if largest['layers'] else 'none'}")
    if "expected_drops" not in plan:
        found.append(f"Not planned: {plan['out_of_scope']}.")
    return [line for text in found for line in _wrap(text)]


def _gib(value: int | None) -> str:
    return " " * 11 if value is None else f"{value / GIB:11.3f}"


def _wrap(text: str) -> list[str]:
    """Lines of at most 100 columns; those after the first stand two columns further in."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        text.strip(), 100, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


if __name__ == "__main__":
    run_main(main)
