"""Rows of `bench layer` and `bench waves`: every variant on every shape and routing, checked, timed and compared.

A variant is a setting of the protocol, or the stock recipe (stock.py), which runs first so that the others' rows can
say how many times faster they are in the same run.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.settings import EPConfig
from tools.bench import stock
from tools.bench.shapes import routing

WITH_BALANCED_PRODUCTS = ("pooled_wave", "fixed_cell")  # their waves are of rows; others' waves are of experts
HEADER = (
    f"{'shape':<6}{'routing':<10}{'variant':<44}{'forward ms':>22}{'fwd+bwd ms':>22}{'limit':>7}{'ratio':>7}"
    f"{'TFLOP/s':>9}{'GB/s':>6}{'drop %':>8}{'GiB':>7}{'x stock':>9}"
)


def settings_of(arguments: argparse.Namespace) -> Iterator[EPConfig]:
    """The protocol settings to run, in order; what a transport does not use is not repeated."""
    seen = set()
    names = [name for name, _ in arguments.ep]
    transports = [transport for transport in arguments.transport if transport != stock.NAME]
    for transport, sender, receiver, waves, *others in itertools.product(
        transports, arguments.sender, arguments.receiver, arguments.waves, *(values for _, values in arguments.ep)
    ):
        both = arguments.command == "waves" and waves > 1
        for schedule in ("sequential", "overlapped") if both else ("sequential",):
            given: dict[str, Any] = {
                "sender_factor": sender,
                "receiver_factor": receiver,
                "order": arguments.order,
                "receive": arguments.receive,
                "agreed": arguments.agreed,
                "updates_per_cell": arguments.updates,
                "waves": waves,
                "schedule": schedule,
            }
            settings = EPConfig(transport=transport, **given | dict(zip(names, others, strict=True)))
            key = (transport, *(getattr(settings, name) for name in settings.used))
            if key not in seen:
                seen.add(key)
                yield settings


def label(settings: EPConfig, named: list[str]) -> str:
    """The variant in a few words; the settings `named` are told where they are used."""
    parts = [settings.transport]
    names = {"sender_factor": "s", "receiver_factor": "r"}
    parts += [f"{names[name]}{getattr(settings, name):g}" for name in settings.used if name in names]
    if settings.waves > 1:
        parts.append(f"{settings.waves} waves {settings.schedule}")
    if settings.transport == "ragged":
        parts.append(f"{settings.agreed}, {settings.updates_per_cell} updates")
    parts += [f"{name} {getattr(settings, name)}" for name in named if name in settings.used]
    return " ".join(parts)


def layers(arguments: argparse.Namespace, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """One row for every shape, routing and variant, printed when it is done."""
    import jax.numpy as jnp

    from tools.bench.ceilings import ceilings, matmul_times
    from tools.bench.layer import make_problem

    dtype = jnp.dtype(arguments.dtype)
    for shape, kind in itertools.product(arguments.shapes, arguments.routing):
        routing(kind, shape, mesh.size)  # a trace that does not fit is refused before anything is measured
    for shape in arguments.shapes:
        rates = ceilings(shape, mesh, dtype, arguments.iterations)
        print(f"\n{shape.name}: ceilings {rates.as_json()}\n{HEADER}", flush=True)
        split_ms = {}
        if arguments.command == "waves":  # what smaller matrix products cost on their own
            for waves in arguments.waves:
                _, both = matmul_times(shape, mesh.size, dtype, arguments.iterations, parts=waves)
                split_ms[waves] = both.median
        for kind in arguments.routing:
            problem, stock_ms = make_problem(shape, mesh, kind, dtype), None
            for row in _variants(arguments, problem, rates):
                row = {"shape": shape.name, "routing": kind} | row
                if "failed" in row:
                    print(f"{shape.name:<6}{kind[:9]:<10}{row['variant']:<44} failed: {row['failed'][:200]}")
                    yield row
                    continue
                both_ms = row["forward_backward"]["median_ms"]
                if row["settings"]["transport"] == stock.NAME:
                    stock_ms = both_ms
                elif stock_ms is not None:
                    row["stock_ratio"] = round(stock_ms / both_ms, 2)
                if split_ms and row["settings"]["transport"] in WITH_BALANCED_PRODUCTS:
                    row["matmuls_alone_ms"] = split_ms[row["settings"]["waves"]]
                print(table_row(row), flush=True)
                for name, ms in list(row["kernels_ms"].items())[: arguments.kernels]:
                    print(f"{ms:12.3f} ms {name}")
                if arguments.kernels and (waiting := row["forward_backward"]["waiting_ms"]):
                    print(f"{' / '.join(f'{ms:.3f}' for ms in waiting.values()):>12} ms in barriers, by device")
                yield row


def _variants(arguments: argparse.Namespace, problem: Any, rates: Any) -> Iterator[dict[str, Any]]:
    """The rows of one problem, the stock recipe first; one with "failed" where a variant was wrong or did not run."""
    import numpy as np

    from ep_jax.ep.ragged import Ragged
    from ep_jax.ep.rowwise import once_per_peer
    from tools.bench.layer import limit_ms, protocol_layer, run_layer, work_of

    shape, named, variants = problem.shape, [name for name, _ in arguments.ep], []
    shards, experts = problem.mesh.size, shape.num_experts(problem.mesh.size)
    layer_shape = LayerShape(shards, experts, shape.choices, shape.tokens)
    if stock.NAME in arguments.transport:
        calls = min(arguments.iterations, stock.ITERATIONS)
        rows = stock.receive_rows(np.asarray(problem.ids_TK), shards, experts)
        settings = {"transport": stock.NAME, "receive_rows": rows}
        variants.append((f"{stock.NAME}, {calls} calls", settings, stock.stock_layer(rows), calls))
    for chosen in settings_of(arguments):
        if chosen.transport == "ragged":  # 0 updates do not say how many there are
            updates = Ragged(chosen, layer_shape).updates_per_cell
            chosen = dataclasses.replace(chosen, updates_per_cell=updates)
        settings = {name: getattr(chosen, name) for name in ("transport", *chosen.used)}
        local = protocol_layer(chosen, shape.sequence_length)
        variants.append((label(chosen, named), settings, local, arguments.iterations))
    for name, settings, local, iterations in variants:
        row: dict[str, Any] = {"variant": name, "settings": settings}
        try:
            result = run_layer(problem, local, iterations, settings.get("payload", "compute"))
        except (ArithmeticError, RuntimeError, ValueError) as error:
            yield row | {"failed": " ".join(str(error).split())[:500]}
            continue
        row |= result.as_json() | {"ceilings": rates.as_json(), "limit_ms": {}, "achieved": {}}
        once = settings.get("slots") == "token" or (
            settings["transport"] == "rowwise" and once_per_peer(layer_shape, experts // shards)
        )
        for way, times, backward in (("forward", result.forward, False), ("both", result.both, True)):
            work = work_of(result, problem, backward=backward, once_per_peer=once)
            row["limit_ms"][way] = limit_ms(work, rates, backward=backward)
            row["achieved"][way] = work.rates(times.median)
        row["kernels_ms"] = {n[:120]: round(ms, 4) for n, ms in list(result.both.kernels_ms.items())[:40]}
        yield row


def table_row(row: dict[str, Any]) -> str:
    """One line under HEADER."""

    def spread(times):
        return f"{times['median_ms']:9.2f} ({times['p10_ms']:.2f}-{times['p90_ms']:.2f})"

    both, limit, achieved = row["forward_backward"], row["limit_ms"]["both"], row["achieved"]["both"]
    ratio = f"{row['stock_ratio']:9.1f}" if "stock_ratio" in row else f"{'':9}"
    return (
        f"{row['shape']:<6}{row['routing'][:9]:<10}{row['variant']:<44}{spread(row['forward']):>22}{spread(both):>22}"
        f"{limit:7.2f}{both['median_ms'] / limit:7.2f}{achieved['tflops']:9.1f}{achieved['off_device_gb_per_s']:6.0f}"
        f"{100 * row['drop_rate']:8.3f}{row['peak_gib']:7.2f}{ratio}"
    )
