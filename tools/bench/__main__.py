"""Benchmarks of one MoE layer and its parts on the devices there are.

    python -m tools.bench layer --shapes A,B,C --routing uniform,skewed --sender 1.03 --receiver 1.03 --out FILE.json
    python -m tools.bench waves --shapes A --waves 1,2,3,4 --out FILE.json
    python -m tools.bench gemm --shapes A,B,C
    python -m tools.bench collectives --shapes A

Every variant is checked against float32 before it is timed. Times are medians of device times with the 10th and 90th
percentile; the machine's own rates are measured in the same run, and the ratio to the physical limit stands beside each
time. --out writes everything with devices, versions and flags. On a machine without GPUs `--shapes toy` runs the logic.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ep_jax import exits, xla_flags
from ep_jax.cli import CommandParser
from ep_jax.ep.settings import AGREEMENTS, ORDERS, RECEIVES, TRANSPORTS, EPConfig
from ep_jax.fields import ConfigError
from tools.bench.shapes import ROUTINGS, SHAPES, shape_of

COMMANDS = ("layer", "waves", "gemm", "collectives")
HEADER = (
    f"{'shape':<6}{'routing':<10}{'variant':<44}{'forward ms':>20}{'fwd+bwd ms':>20}{'limit':>7}{'ratio':>7}"
    f"{'drop %':>8}{'GiB':>7}"
)


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark; returns the exit code."""
    arguments = parse(argv)
    platform = xla_flags.default_platform()
    preset = "cpu" if platform == "cpu" else "gpu_ragged" if "ragged" in arguments.transport else "gpu"
    flags = xla_flags.prepare(preset, arguments.devices if platform == "cpu" else None, profiling=True)

    import jax
    from jax.sharding import AxisType

    from ep_jax.profiling import device_description

    devices = jax.devices()[: arguments.devices] if arguments.devices else jax.devices()
    if arguments.devices and len(devices) < arguments.devices:
        raise ConfigError(f"--devices {arguments.devices}: there are {len(devices)}")
    mesh = jax.make_mesh((len(devices),), ("ep",), axis_types=(AxisType.Auto,), devices=devices)
    print(f"{len(devices)} x {devices[0].device_kind}, flags: {' '.join(flags) or 'none added'}", flush=True)
    began = time.perf_counter()
    results = list({"gemm": gemm, "collectives": collectives}.get(arguments.command, layers)(arguments, mesh))
    if arguments.out:
        description = device_description() | {"added_flags": flags, "used_devices": len(devices)}
        content = {"command": ["python", "-m", "tools.bench", *argv], "devices": description, "results": results}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(results)} results in {time.perf_counter() - began:.0f} s")
    return exits.DONE if all("failed" not in result for result in results) else exits.MEMBERS_FAILED


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line with its lists read. Raises ConfigError for a name or number that is not one."""
    parser = CommandParser(
        prog="python -m tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--shapes", default="A,B,C", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--routing", default="uniform", help=f"of {', '.join(ROUTINGS)}")
    transports = f"of {', '.join(TRANSPORTS)}; with ragged among them all run under the XLA flags of ragged"
    parser.add_argument("--transport", default="pooled_wave", help=transports)
    parser.add_argument("--sender", default="1.03", help="sender factors")
    parser.add_argument("--receiver", default="1.03", help="receiver factors")
    parser.add_argument("--order", default="position", choices=ORDERS)
    parser.add_argument("--receive", default="expert", choices=RECEIVES)
    parser.add_argument("--agreed", default="round_robin", choices=AGREEMENTS)
    parser.add_argument("--updates", type=int, default=1, help="ep.updates_per_cell of ragged")
    parser.add_argument("--waves", default="1", help="numbers of waves; `waves` runs each sequential and overlapped")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--devices", type=int, default=None, help="of those there are; virtual ones on CPU")
    parser.add_argument("--out", type=Path, default=None, help="JSON file of all results")
    parser.add_argument("--kernels", type=int, default=0, help="print so many of the longest kernels of each variant")
    arguments = parser.parse_args(argv)
    for name, convert in (("shapes", shape_of), ("sender", float), ("receiver", float), ("waves", int)):
        try:
            setattr(arguments, name, [convert(part) for part in getattr(arguments, name).split(",")])
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: expected numbers separated by commas") from error
    arguments.routing, arguments.transport = arguments.routing.split(","), arguments.transport.split(",")
    return arguments


def variants(arguments: argparse.Namespace) -> Iterator[EPConfig]:
    """The settings to run, in order; factors that a transport does not use are not repeated."""
    seen = set()
    for transport in arguments.transport:
        for sender in arguments.sender:
            for receiver in arguments.receiver:
                for waves in arguments.waves:
                    both = arguments.command == "waves" and waves > 1
                    for schedule in ("sequential", "overlapped") if both else ("sequential",):
                        settings = EPConfig(
                            transport=transport,
                            sender_factor=sender,
                            receiver_factor=receiver,
                            order=arguments.order,
                            receive=arguments.receive,
                            agreed=arguments.agreed,
                            updates_per_cell=arguments.updates,
                            waves=waves,
                            schedule=schedule,
                        )
                        key = (transport, *(getattr(settings, name) for name in settings.used))
                        if key not in seen:
                            seen.add(key)
                            yield settings


def layers(arguments: argparse.Namespace, mesh: Any) -> Iterator[dict[str, Any]]:
    """Every variant on every shape and routing, one row each."""
    import jax.numpy as jnp

    from tools.bench.ceilings import ceilings, matmul_times
    from tools.bench.layer import limit_ms, make_problem, run_layer

    dtype = jnp.dtype(arguments.dtype)
    for shape in arguments.shapes:
        rates = ceilings(shape, mesh, dtype, arguments.iterations)
        print(f"\n{shape.name}: ceilings {rates.as_json()}\n{HEADER}", flush=True)
        split_ms = {}
        if arguments.command == "waves":  # what smaller matrix products cost on their own
            for waves in arguments.waves:
                _, both = matmul_times(shape, mesh.size, dtype, arguments.iterations, parts=waves)
                split_ms[waves] = both.median
        for kind in arguments.routing:
            problem = make_problem(shape, mesh, kind, dtype)
            for settings in variants(arguments):
                row: dict[str, Any] = {"shape": shape.name, "routing": kind, "variant": label(settings)}
                try:
                    result = run_layer(problem, settings, arguments.iterations)
                except (ArithmeticError, RuntimeError, ValueError) as error:
                    row |= {"failed": " ".join(str(error).split())[:500]}
                    print(f"{shape.name:<6}{kind:<10}{row['variant']:<44} failed: {row['failed'][:200]}", flush=True)
                    yield row
                    continue
                limits = {way: limit_ms(result, problem, rates, backward=way == "both") for way in ("forward", "both")}
                row |= result.as_json() | {"ceilings": rates.as_json(), "limit_ms": limits}
                if split_ms and settings.transport in ("pooled_wave", "fixed_cell"):  # others' waves are of experts
                    row["matmuls_alone_ms"] = split_ms[settings.waves]
                print(table_row(row), flush=True)
                for name, ms in list(result.both.kernels_ms.items())[: arguments.kernels]:
                    print(f"{ms:12.3f} ms {name[:120]}")
                row["kernels_ms"] = {n[:120]: round(ms, 4) for n, ms in list(result.both.kernels_ms.items())[:40]}
                yield row


def label(settings: EPConfig) -> str:
    """The variant in a few words."""
    parts = [settings.transport]
    names = {"sender_factor": "s", "receiver_factor": "r"}
    parts += [f"{names[name]}{getattr(settings, name):g}" for name in settings.used if name in names]
    if settings.waves > 1:
        parts.append(f"{settings.waves} waves {settings.schedule}")
    if settings.transport == "ragged":
        parts.append(f"{settings.agreed}, {settings.updates_per_cell} updates")
    return " ".join(parts)


def table_row(row: dict[str, Any]) -> str:
    def spread(times):
        return f"{times['median_ms']:9.2f} ({times['p10_ms']:.2f}-{times['p90_ms']:.2f})"

    both, limit = row["forward_backward"], row["limit_ms"]["both"]
    return (
        f"{row['shape']:<6}{row['routing']:<10}{row['variant']:<44}{spread(row['forward']):>20}{spread(both):>20}"
        f"{limit:7.2f}{both['median_ms'] / limit:7.2f}{100 * row['drop_rate']:8.3f}{row['temporary_gib']:7.2f}"
    )


def gemm(arguments: argparse.Namespace, mesh: Any) -> Iterator[dict[str, Any]]:
    """The experts' products alone, as batched matrix products."""
    import jax.numpy as jnp

    from tools.bench.ceilings import matmul_times

    for shape in arguments.shapes:
        for parts in arguments.waves:
            forward, both = matmul_times(
                shape, mesh.size, jnp.dtype(arguments.dtype), arguments.iterations, parts=parts
            )
            rates = [shape.flops(shape.rows, backward=b) / t.median / 1e9 for b, t in ((False, forward), (True, both))]
            print(
                f"{shape.name:<6}in {parts} parts: forward {forward.median:8.3f} ms {rates[0]:6.0f} TFLOP/s, "
                f"with backward {both.median:8.3f} ms {rates[1]:6.0f} TFLOP/s",
                flush=True,
            )
            times = {"forward": forward.as_json(), "forward_backward": both.as_json()}
            yield {"shape": shape.name, "parts": parts, "forward_tflops": rates[0], "tflops": rates[1], **times}


def collectives(arguments: argparse.Namespace, mesh: Any) -> Iterator[dict[str, Any]]:
    """All-to-alls of the layers' sizes and fractions of them."""
    import jax.numpy as jnp

    from tools.bench.ceilings import exchange_time

    if mesh.size == 1:
        raise ConfigError("collectives: one device exchanges nothing; at least 2 are needed")
    dtype = jnp.dtype(arguments.dtype)
    for shape in arguments.shapes:
        for parts in arguments.waves:
            rows = shape.rows // parts // mesh.size * mesh.size
            times = exchange_time(rows, shape.width, mesh, dtype, arguments.iterations)
            off_bytes = rows * shape.width * dtype.itemsize * (mesh.size - 1) / mesh.size
            rate = off_bytes / times.median / 1e6
            print(
                f"{shape.name:<6}all_to_all of {rows:,} rows: {times.median:.3f} ms ({times.low:.3f}-{times.high:.3f}) "
                f"for {off_bytes / 1e6:.0f} MB off the device, {rate:.0f} GB/s",
                flush=True,
            )
            yield {"shape": shape.name, "rows": rows, "gb_per_s": rate, "times": times.as_json()}


if __name__ == "__main__":
    exits.run_main(main, sys.argv[1:])
