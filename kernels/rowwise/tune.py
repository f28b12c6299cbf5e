"""Checks and times launches of the one-sided movements.

`python -m kernels.rowwise.tune --out rowwise.json` in a checkout, on 2 or more GPUs. Letters as in op.py. Routing,
shapes and storage order are those of tools.bench layers: rows lie expert-major, source-major. A launch's output is
compared with plain JAX, bit by bit, in memory that was filled with NaN where the allocator is likely to put it. Then it
runs several times in a trace; its time is the kernel's own, the median over calls of the slowest device. Rates count
bytes that leave, or reach, a GPU over the link. Beside them stand XLA's barrier and what else a call ran. The first
shape is tried with all launches, the others with the best few.

`--fans` tries the default launches and those that send a row to a peer once, at every shape, and ends with the four
movements of a layer either way: whether the bytes saved are worth the copies and the maps.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep_jax.profiling import Event, read_trace
from tools.bench.shapes import Shape, routing, shape_of
from tools.bench.timing import is_kernel

from .get import GetLaunch
from .op import PLAIN, Movements, RouteMap, collect, dispatch, get, put, route_map
from .put import PutLaunch

PUTS = (
    PutLaunch(),
    PutLaunch(132, 2, 8, 4),
    *(PutLaunch(64, groups, slots, slots // 2) for groups, slots in ((2, 16), (4, 8))),
    PutLaunch(32, 1, 16, 8),
    *(PutLaunch(blocks, 4, 8, 4) for blocks in (32, 16)),
    *(
        PutLaunch(blocks, groups, slots, slots // 2, fan_out=True)
        for blocks, groups, slots in ((96, 1, 32), (96, 2, 16), (96, 4, 8), (64, 4, 8), (32, 4, 8))
    ),
)
GETS = (
    GetLaunch(),
    GetLaunch(132, 2, 8),
    *(GetLaunch(blocks, 4, 8) for blocks in (64, 32, 16, 8)),
    *(
        GetLaunch(blocks, groups, slots, fan_in=True)
        for blocks, groups, slots in ((132, 1, 16), (132, 2, 16), (132, 3, 10), (264, 1, 16), (32, 3, 10))
    ),
)
FAN_IN_ERROR = 3e-3  # bfloat16 rounds by up to 2^-9 of a value, 2^-9 / sqrt(3) on average
FEW = 32  # blocks of a launch that may run beside a matmul; the best such one is tried on every shape


@dataclasses.dataclass(frozen=True)
class Problem:
    """One shape's arrays on the mesh: rows [S*T,H], buffers [S*N,H], places [S*T,K]."""

    shape: Shape
    mesh: jax.sharding.Mesh
    rows: jax.Array
    buffer: jax.Array
    places: jax.Array
    num_rows: int  # N
    off_bytes: int  # of all routed rows that leave the GPU that sends most
    fan_out_bytes: int  # the same when a row goes to a peer once

    def jit(self, function: Callable[..., Any]) -> Any:
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=PartitionSpec("ep"), out_specs=PartitionSpec("ep"))
        )


def route(ids: np.ndarray, experts: int, slack: float = 1.02) -> tuple[np.ndarray, int]:
    """(places int32 [S,T,K], N) of expert ids [S,T,K]: rows expert-major, source-major, in flat order, all kept."""
    shards, local = ids.shape[0], experts // ids.shape[0]
    counts_SE = np.stack([np.bincount(one.ravel(), minlength=experts) for one in ids])
    by_owner = counts_SE.T.reshape(shards, local * shards)  # of each destination, expert-major, source-major
    starts_ES = (np.cumsum(by_owner, axis=1) - by_owner).reshape(experts, shards)
    num_rows = -(-int(by_owner.sum(axis=1).max() * slack) // 128) * 128
    places = []
    for source, flat in enumerate(ids.reshape(shards, -1)):
        order = np.argsort(flat, kind="stable")
        rank = np.empty_like(flat)
        rank[order] = np.arange(flat.size) - (np.cumsum(counts_SE[source]) - counts_SE[source])[flat[order]]
        places.append(flat // local * num_rows + starts_ES[flat, source] + rank)
    return np.stack(places).reshape(ids.shape).astype(np.int32), num_rows


def make_problem(shape: Shape, mesh: jax.sharding.Mesh) -> Problem:
    shards = mesh.size
    ids, _ = routing("uniform", shape, shards)
    places, num_rows = route(ids.reshape(shards, shape.tokens, shape.choices), shape.num_experts(shards))
    held = np.zeros((shards * num_rows, 1), bool)
    held[places.ravel()] = True
    split = NamedSharding(mesh, PartitionSpec("ep"))
    make = functools.partial(jax.jit, out_shardings=split)
    random = jax.random.key(0)
    size = (shards * shape.tokens, shape.width)
    rows = make(lambda: jax.random.normal(random, size, jnp.bfloat16))()
    # Rows that nobody put are NaN, so a sum that reads one shows it.
    buffer = make(
        lambda held: jnp.where(held, jax.random.normal(random, (len(held), shape.width), jnp.bfloat16), jnp.nan)
    )(jax.device_put(held, split))
    peers, row_bytes = places // num_rows, shape.width * 2
    away = (peers != np.arange(shards)[:, None, None]).sum(axis=(1, 2)).max()
    meets = (peers[..., None] == np.arange(shards)).any(axis=2).sum(axis=1)  # [source, peer]
    once = (meets.sum(axis=1) - meets.diagonal()).max()
    return Problem(
        shape,
        mesh,
        rows,
        buffer,
        jax.device_put(places.reshape(-1, shape.choices), split),
        num_rows,
        int(away) * row_bytes,
        int(once) * row_bytes,
    )


def wrong_rows(found: jax.Array, wanted: jax.Array, count: jax.Array | None = None) -> int:
    """Rows that differ anywhere, of those that count."""

    @jax.jit
    def differ(found, wanted):
        rows = jnp.any(found != wanted, axis=1)
        return jnp.sum(rows if count is None else rows & count)

    return int(differ(found, wanted))


def relative_error(found: jax.Array, wanted: jax.Array) -> float:
    """|found - wanted| / |wanted| in the Euclidean norm; NaN when either has one."""
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def try_launches(problem: Problem, movement: str, launches: Sequence[Any], ends: float, calls: int) -> list[dict]:
    """Compiles, checks and times launches of one movement; one row of results each."""
    if movement == "put":
        arguments = (problem.rows, problem.places)
        held = np.zeros(problem.mesh.size * problem.num_rows, bool)
        held[np.asarray(problem.places).ravel()] = True
        count = jax.device_put(held, NamedSharding(problem.mesh, PartitionSpec("ep")))
    else:
        arguments, count = (problem.buffer, problem.places), None

    def run(how):
        if movement == "put":
            return lambda rows, places: put(rows, make_map(places, problem.num_rows, how), problem.num_rows, how)
        return lambda rows, places: get(rows, make_map(places, problem.num_rows, how), how)

    wanted = jax.block_until_ready(problem.jit(run(PLAIN))(*arguments))
    results, ready = [], []
    for launch in launches:
        if time.monotonic() > ends:
            print(f"{movement} {problem.shape.name}: out of time", flush=True)
            break
        how = Movements(put=launch) if movement == "put" else Movements(get=launch)
        row: dict[str, Any] = {"movement": movement, "shape": problem.shape.name, **dataclasses.asdict(launch)}
        try:
            function = problem.jit(run(how)).lower(*arguments).compile()
            jax.block_until_ready(jnp.full_like(wanted, jnp.nan))
            found = function(*arguments)
            if row.get("fan_in"):  # rounded once more
                row["error"] = relative_error(found, wanted)
                row["wrong_rows"] = 0 if row["error"] < FAN_IN_ERROR else wanted.shape[0]
            else:
                row["wrong_rows"] = wrong_rows(found, wanted, count)
            ready.append((function, row))
        except Exception as failure:  # the others are tried all the same
            row["failed"] = " ".join(str(failure).split())[:300]
        results.append(row)
    runs = [(function, arguments) for function, _ in ready]
    kernels = [2 if row.get("fan_in") else 1 for _, row in ready]
    times, by_name = kernel_ms(runs, kernels, calls) if ready else ([], {})
    for (_, row), ms in zip(ready, times, strict=True):
        row |= {"ms": round(ms, 4), "off_device_gb_per_s": round(problem.off_bytes / ms / 1e6, 1)}
        if row.get("fan_out") or row.get("fan_in"):
            row["link_gb_per_s"] = round(problem.fan_out_bytes / ms / 1e6, 1)
    for row in results:
        print(json.dumps(row), flush=True)
    print(f"  mean ms a call: {by_name}", flush=True)
    return results


def kernel_ms(runs: Sequence[tuple], kernels: Sequence[int], calls: int) -> tuple[list[float], dict[str, float]]:
    """(Median over calls of the slowest device's kernels of each run, mean ms a call of every kernel by name).

    `kernels` is how many kernels of ours a call of each run has.
    """
    events, by_name = trace_calls(runs, calls)
    by_device: dict[str, list[float]] = {}
    for event in events:
        if "rowwise" in event.name:
            by_device.setdefault(event.plane, []).append(event.duration_ns / 1e6)
    if not by_device or any(len(ms) != calls * sum(kernels) for ms in by_device.values()):
        counts = {plane: len(ms) for plane, ms in by_device.items()}
        raise RuntimeError(f"{counts} kernels in the trace, {calls * sum(kernels)} expected: {by_name}")
    medians, first = [], 0
    for count in kernels:
        spans = [ms[first : first + calls * count] for ms in by_device.values()]
        totals = [[sum(span[call * count :][:count]) for call in range(calls)] for span in spans]
        medians.append(statistics.median(max(ms) for ms in zip(*totals, strict=True)))
        first += calls * count
    return medians, by_name


def trace_calls(runs: Sequence[tuple], calls: int) -> tuple[list[Event], dict[str, float]]:
    """(Kernels in order of their start, mean ms a call and device by name) of `calls` queued calls of each run."""
    for function, arguments in runs:
        jax.block_until_ready(function(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for function, arguments in runs:
                out = None
                for _ in range(calls):
                    out = function(*arguments)
                jax.block_until_ready(out)
        events = sorted((event for event in read_trace(folder) if is_kernel(event)), key=lambda event: event.start_ns)
    by_name: dict[str, float] = {}
    for event in events:
        share = event.duration_ns / 1e6 / calls / len(runs) / len(jax.devices())
        by_name[event.name[:48]] = by_name.get(event.name[:48], 0.0) + share
    return events, {name: round(ms, 4) for name, ms in sorted(by_name.items(), key=lambda item: -item[1])}


def make_map(place_TK: jax.Array, num_rows: int, how: Movements) -> RouteMap:
    """Inside shard_map. A layer has everybody's places from its plan, so the gather counts for nothing there."""
    return route_map(place_TK, jax.lax.all_gather(place_TK, "ep"), num_rows, how)


def check_derivatives(problem: Problem, how: Movements, calls: int) -> dict[str, Any]:
    """Largest errors of dispatch, collect and their gradients against plain JAX, relative; and ms a call by kernel."""

    def run(how):
        def local(rows, places):
            places = make_map(places, problem.num_rows, how)

            def layer(rows):
                arrived = dispatch(rows, places, problem.num_rows, how)
                # A token's rows differ by a power of two, so that one read twice for another shows.
                factor_N = 2.0 ** (jnp.arange(len(arrived)) % 7 - 3).astype(arrived.dtype)
                return collect(arrived * factor_N[:, None], places, how)

            out, pull = jax.vjp(layer, rows)
            return (out, *pull(rows))

        return problem.jit(local)

    arguments = (problem.rows, problem.places)
    wanted = run(PLAIN)(*arguments)
    function = run(how).lower(*arguments).compile()
    jax.block_until_ready(jnp.full_like(problem.buffer, jnp.nan))
    found = function(*arguments)
    names = ("out", "d_rows")
    errors = {name: relative_error(one, right) for name, one, right in zip(names, found, wanted, strict=True)}
    _, kernels = trace_calls([(function, arguments)], calls)
    total, launches = round(sum(kernels.values()), 4), dataclasses.asdict(how)
    return {"shape": problem.shape.name, "launches": launches, "errors": errors, "total_ms": total, "ms": kernels}


def main() -> None:
    """Exits with 1 when a launch was wrong or failed; results are written after every movement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    parser.add_argument(
        "--shapes", nargs="+", default=["A", "B", "C"], help="of tools.bench; all launches on the first"
    )
    parser.add_argument(
        "--keep", type=int, default=2, help="launches tried on the other shapes, and as many with few blocks"
    )
    parser.add_argument("--fans", action="store_true", help="only the default launches and those with fans")
    parser.add_argument("--calls", type=int, default=8, help="timed calls of a launch")
    parser.add_argument("--seconds", type=float, default=85.0, help="after this no further launch is begun")
    arguments = parser.parse_args()
    ends = time.monotonic() + arguments.seconds
    mesh = jax.make_mesh((len(jax.devices()),), ("ep",), axis_types=(AxisType.Auto,))
    record: dict[str, Any] = {
        "jax": importlib.metadata.version("jax"),
        "devices": [device.device_kind for device in jax.devices()],
        "rows": [],
        "derivatives": [],
    }
    wanted = {"put": list(PUTS), "get": list(GETS)}
    if arguments.fans:
        wanted = {name: launches[:1] + [one for one in launches if _fans(one)] for name, launches in wanted.items()}
    best: dict[str, list[Any]] = dict(wanted)
    for name in arguments.shapes:
        problem = make_problem(shape_of(name), mesh)
        print(f"{name}: {problem.num_rows} rows a buffer, {problem.off_bytes / 1e6:.0f} MB leave a GPU", flush=True)
        for movement in ("put", "get"):
            rows = try_launches(problem, movement, best[movement], ends, arguments.calls)
            record["rows"] += rows
            arguments.out.write_text(json.dumps(record, indent=1))
            if best[movement] == wanted[movement]:
                best[movement] = best_of(rows, best[movement], arguments.keep)
        plain = [next(launch for launch in best[movement] if not _fans(launch)) for movement in ("put", "get")]
        fans = [next((launch for launch in best[movement] if _fans(launch)), None) for movement in ("put", "get")]
        for pair in (plain, fans):
            try:
                record["derivatives"].append(check_derivatives(problem, Movements("ep", *pair), arguments.calls))
            except Exception as failure:
                record["derivatives"].append({"shape": name, "failed": " ".join(str(failure).split())[:300]})
            print(json.dumps(record["derivatives"][-1]), flush=True)
        arguments.out.write_text(json.dumps(record, indent=1))
    bad = [row for row in record["rows"] if row.get("wrong_rows", 1)]
    print(f"{len(record['rows'])} tried, {len(bad)} wrong or failed; best {best}")
    raise SystemExit(bool(bad))


def best_of(rows: Sequence[dict], launches: Sequence[Any], keep: int) -> list[Any]:
    """The fastest right launches, of all and of those with few blocks; those that fan apart, fastest first."""
    right = [(row["ms"], launch) for row, launch in zip(rows, launches, strict=False) if row.get("wrong_rows") == 0]
    ranked = [launch for _, launch in sorted(right, key=lambda pair: pair[0])]
    kinds = [[launch for launch in ranked if _fans(launch) == way] for way in (False, True)]
    chosen = [launch for kind in kinds for launch in kind[:keep] + [few for few in kind if few.blocks <= FEW][:1]]
    return sorted(dict.fromkeys(chosen), key=ranked.index) or list(launches[:1])


def _fans(launch: Any) -> bool:
    return getattr(launch, "fan_out", False) or getattr(launch, "fan_in", False)


if __name__ == "__main__":
    main()
