"""Benchmarks of one MoE layer, of its parts, and of a training step, on the devices there are.

    python -m tools.bench layer --shapes A,B,C --routing uniform,document --transport stock,pooled_wave --out FILE.json
    python -m tools.bench waves --shapes A --waves 1,2,3,4 --out FILE.json
    python -m tools.bench gemm --shapes A,B,C
    python -m tools.bench collectives --shapes A
    python -m tools.bench train --config configs/h200.toml --steps 30 --out FILE.json     (its own --help)
    python -m tools.bench table benchmarks/layer_*.json                                   (its own --help)

Every variant is checked against float32 before it is timed. Times are medians of device times with the 10th and 90th
percentile; the machine's own rates are measured in the same run, and the ratio to the physical limit stands beside each
time. TFLOP/s and GB/s are accepted rows' work on the most loaded device over the whole time; GiB is the peak of the
forward and backward program, arguments and gradients included. --out writes everything with devices, versions and
flags. On a machine without GPUs `--shapes toy` runs the logic.
"""

import argparse
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ep_jax import exits, xla_flags
from ep_jax.cli import CommandParser
from ep_jax.ep.settings import AGREEMENTS, ORDERS, RECEIVES, TRANSPORTS, EPConfig
from ep_jax.fields import ConfigError, convert_text
from ep_jax.launch import exchange_preset
from tools.bench import stock, table, train
from tools.bench.layers import layers, settings_of
from tools.bench.results import write_results
from tools.bench.shapes import ROUTINGS, SHAPES, TRACE, check_routing, shape_of

COMMANDS = ("layer", "waves", "gemm", "collectives")


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark; returns the exit code."""
    others = {"train": train.main, "table": table.main}
    if argv and argv[0] in others:
        return others[argv[0]](argv[1:])
    arguments = parse(argv)
    platform = xla_flags.default_platform()
    preset = exchange_preset(settings_of(arguments), platform)
    flags = xla_flags.prepare(preset, arguments.devices if platform == "cpu" else None, profiling=True)

    import jax
    from jax.sharding import AxisType

    devices = jax.devices()[: arguments.devices] if arguments.devices else jax.devices()
    if arguments.devices and len(devices) < arguments.devices:
        raise ConfigError(f"--devices {arguments.devices}: there are {len(devices)}")
    mesh = jax.make_mesh((len(devices),), ("ep",), axis_types=(AxisType.Auto,), devices=devices)
    print(f"{len(devices)} x {devices[0].device_kind}, flags: {' '.join(flags) or 'none added'}", flush=True)
    began = time.perf_counter()
    results = []
    for result in {"gemm": gemm, "collectives": collectives}.get(arguments.command, layers)(arguments, mesh):
        results.append(result)
        if arguments.out:  # as they come: a run that is stopped keeps them
            write_results(arguments.out, argv, results, flags, len(devices))
    print(f"{len(results)} results in {time.perf_counter() - began:.0f} s")
    return exits.DONE if all("failed" not in result for result in results) else exits.MEMBERS_FAILED


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line with its lists read. Raises ConfigError for a name or number that is not one."""
    parser = CommandParser(
        prog="python -m tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--shapes", default="A,B,C", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--routing", default="uniform", help=f"of {', '.join(ROUTINGS)}, {TRACE}PATH[:LAYER]")
    transports = f"of {', '.join((stock.NAME, *TRANSPORTS))}; all run under one preset of XLA flags, that of ragged, "
    transports += "else of slots of tokens, if among them"
    parser.add_argument("--transport", default="pooled_wave", help=transports)
    parser.add_argument("--sender", default="1.03", help="sender factors")
    parser.add_argument("--receiver", default="1.03", help="receiver factors")
    parser.add_argument("--order", default="position", choices=ORDERS)
    parser.add_argument("--receive", default="expert", choices=RECEIVES)
    parser.add_argument("--agreed", default="round_robin", choices=AGREEMENTS)
    parser.add_argument("--updates", type=int, default=0, help="ep.updates_per_cell of ragged")
    parser.add_argument("--waves", default="1", help="numbers of waves; `waves` runs each sequential and overlapped")
    parser.add_argument(
        "--ep", action="append", default=[], metavar="NAME=VALUES", help="any setting of ep, e.g. --ep kernels=auto,xla"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--iterations", type=int, default=20, help=f"timed calls; of stock {stock.ITERATIONS} at most")
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
    arguments.routing = [check_routing(kind) for kind in arguments.routing.split(",")]
    arguments.transport = arguments.transport.split(",")
    arguments.ep = [_values(text) for text in arguments.ep]
    if arguments.iterations < 1:
        raise ConfigError(f"--iterations {arguments.iterations}: allowed is at least 1")
    list(settings_of(arguments))  # refuses what a setting does not allow
    return arguments


def _values(text: str) -> tuple[str, list[Any]]:
    """("kernels", ["auto", "xla"]) of "kernels=auto,xla"."""
    name, equals, values = text.partition("=")
    hints = typing.get_type_hints(EPConfig)
    if not equals or name not in {field for field in hints if field not in ("SECTION", "transport")}:
        raise ConfigError(f"--ep {text}: expected NAME=VALUES with a setting of ep, e.g. kernels=auto,xla")
    return name, [convert_text(value, hints[name]) for value in values.split(",")]


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
