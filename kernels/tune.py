"""Checks and times every launch of every kernel on one GPU: `python -m kernels.tune --out kernels.json` in a checkout.

For one GPU's share of the benchmark shapes at ep 2. An operation may be done in several ways: `triton`, `hopper`
(Pallas Mosaic GPU), and for comparison `gather` beside rows that are spread, and `tokamax` where it is installed. Of
each way all launches are tried the first time, the best few on other shapes. A launch is checked against the plain
reference, in memory that was filled with NaN where the allocator is likely to put outputs, then timed on the host, many
calls at once; the best few get device times from a trace. The winners also run on experts of awkward sizes between rows
of NaN. Rates count rows read and written, or floating-point operations on owned rows, with integer planning in the
time; beside them stand this GPU's copy and XLA's own way of doing the same, measured in the same run. A layer's
benchmark is tools.bench.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tools.bench.ceilings import fastest_copy
from tools.bench.shapes import ROUTINGS, shape_of
from tools.bench.timing import measure

from .quantize_rows.tune_cases import quantize_cases
from .tune_cases import (
    TOKAMAX,
    WAYS,
    Case,
    combine_cases,
    edge_cases,
    gather_cases,
    matmul_cases,
    spread_cases,
    swiglu_cases,
)

MAKERS = {
    "gather": gather_cases,
    "spread": spread_cases,
    "combine": combine_cases,
    "matmul": matmul_cases,
    "swiglu": swiglu_cases,
    "quantize": quantize_cases,
}
Ranking = dict[tuple[str, str], list[Any]]  # launches by operation and way, the fastest first
# Largest allowed |found - wanted| / |wanted| of a row or an expert in the Euclidean norm. Kernel and reference round to
# bfloat16 (2^-9) in different places, up to four times together; a lost block of rows or columns costs far more.
TOLERANCE = 1e-2


def main() -> None:
    """Exits with 1 when a launch of ours was wrong or failed; the results are written after every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    parser.add_argument(
        "--shapes", nargs="+", default=["A", "C", "B"], help="of tools.bench; all launches on the first"
    )
    parser.add_argument("--cases", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--routings", nargs="+", default=["uniform"], choices=ROUTINGS)
    parser.add_argument("--keep", type=int, default=3, help="launches with device times, and tried on the other shapes")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=270.0, help="after this no further launch is begun")
    arguments = parser.parse_args()
    begun = time.monotonic()
    if TOKAMAX in arguments.ways and importlib.util.find_spec(TOKAMAX) is None:
        print("tokamax is not installed (pip install 'ep-jax[cuda]'): no comparison with it", flush=True)
        arguments.ways.remove(TOKAMAX)
    record: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("jax", "jax-triton", "triton")}
    record |= {"device": jax.devices()[0].device_kind, "date": time.strftime("%Y-%m-%d"), "seconds": arguments.seconds}
    record |= {"copy_tb_per_s": copy_rate(arguments.iterations), "rows": []}
    print(json.dumps(record), flush=True)
    ranking: Ranking = {}
    ends = begun + arguments.seconds
    for shape, kind in itertools.product(map(shape_of, arguments.shapes), arguments.cases):
        for case in MAKERS[kind](shape, arguments.routings):
            record["rows"] += tune(case, arguments.ways, ranking, ends, arguments.keep, arguments.iterations)
            arguments.out.write_text(json.dumps(record, indent=1))
    for case in edge_cases():
        for name in (name for name in case.ways if (case.name, name) in ranking):
            tried = try_launches(case, name, ranking[case.name, name][:1], float("inf"))
            record["rows"] += [trial.row for trial in tried]
    arguments.out.write_text(json.dumps(record, indent=1))
    for (name, way), launches in ranking.items():
        print(f"{name} by {way}: {launches[0]}")
    wrong = [row for row in record["rows"] if not row["ok"]]
    print(f"{len(record['rows'])} tried, {len(wrong)} wrong or failed, {time.monotonic() - begun:.0f} s")
    raise SystemExit(any(row["way"] != TOKAMAX for row in wrong))


def tune(
    case: Case, ways: Sequence[str], ranking: Ranking, ends: float, keep: int, iterations: int
) -> list[dict[str, Any]]:
    """Tries all launches of a way that is new to the operation, else its best few; times the best; rows of results."""
    right: dict[str, list[Trial]] = {}
    rows = []
    for name in (name for name in case.ways if name in ways):
        launches = ranking[case.name, name][:keep] if (case.name, name) in ranking else case.ways[name].launches
        tried = try_launches(case, name, launches, ends)
        right[name] = sorted((trial for trial in tried if trial.row["ok"]), key=lambda trial: trial.row["host_ms"])
        rows += [trial.row for trial in tried]
    measure_trials(case, [trial for trials in right.values() for trial in trials[:keep]], iterations)
    for name, trials in right.items():
        trials.sort(key=lambda trial: trial.row.get("median_ms", float("inf")))
        ranking.setdefault((case.name, name), [trial.launch for trial in trials] or [*case.ways[name].launches])
    return rows


@dataclasses.dataclass(frozen=True)
class Trial:
    """A launch, what it was compiled to (None when that failed) and its row of results."""

    launch: Any
    function: Callable[..., Any] | None
    row: dict[str, Any]


def try_launches(case: Case, way: str, launches: Sequence[Any], ends: float) -> list[Trial]:
    """Compiles, checks and times on the host each launch of a way, until the clock says `ends`."""
    title = f"{case.name} {case.shape} {way}"
    wanted = jax.block_until_ready(jax.jit(case.reference)(*case.arguments))
    trials = []
    for position, launch in enumerate(launches):
        if time.monotonic() > ends:
            print(f"{title}: no time for {len(launches) - position} more launches", flush=True)
            break
        row: dict[str, Any] = {"case": case.name, "shape": case.shape, "way": way, "launch": str(launch), "ok": False}
        function = None
        try:
            function = jax.jit(case.ways[way].run(launch)).lower(*case.arguments).compile()
            fill_with_nan(wanted)
            error = relative_error(function(*case.arguments), wanted, case.owned)
            row |= {"ok": error <= TOLERANCE, "error": error, "host_ms": host_ms(function, case.arguments)}
        except Exception as failure:  # whatever the compiler or the driver says to one launch, the others are tried
            row["failed"] = " ".join(str(failure).split())[:500]
        if not row["ok"]:
            print(f"{title}: WRONG {row.get('failed', row.get('error'))}  {launch}", flush=True)
        trials.append(Trial(launch, function, row))
    print(f"{title}: {sum(trial.row['ok'] for trial in trials)} launches are right", flush=True)
    return trials


def measure_trials(case: Case, trials: Sequence[Trial], iterations: int) -> None:
    """Device times and rates of some launches and of XLA's own way, added to their rows and printed."""
    if not trials:
        return
    times = measure(jax.jit(case.baseline), *case.baseline_arguments, iterations=iterations, warmup=1)
    xla_rate = case.baseline_work / times.median * 1e-9
    print(f"  XLA     {times.median:9.4f} ms {xla_rate:8.3f} {case.unit}", flush=True)
    for trial in trials:
        assert trial.function is not None
        times = measure(trial.function, *case.arguments, iterations=iterations, warmup=1)
        rate = case.work / times.median * 1e-9
        trial.row.update(times.as_json(), rate=rate, unit=case.unit, xla_rate=xla_rate)
        print(
            f"  {times.source:<8}{times.median:9.4f} ms {rate:8.3f} {case.unit} {rate / xla_rate:6.2f} x XLA "
            f" error {trial.row['error']:.1e}  {trial.row['way']} {trial.launch}",
            flush=True,
        )


def host_ms(function: Callable[..., Any], arguments: Sequence[Any], calls: int = 10) -> float:
    """Time of one of many calls that are queued at once: launching them is hidden where a call takes long enough."""
    outs: Any = None
    began = time.perf_counter()
    for _ in range(calls):
        outs = function(*arguments)
    jax.block_until_ready(outs)
    return 1e3 * (time.perf_counter() - began) / calls


def relative_error(found: Any, wanted: Any, owned: np.ndarray | None) -> float:
    """The largest |found - wanted| / |wanted| over the leading index (rows, or experts); NaN counts as infinite."""

    @jax.jit
    def error(one, right, counts):
        one, right = (array.astype(jnp.float32).reshape(array.shape[0], -1) for array in (one, right))
        difference, size = jnp.linalg.norm(one - right, axis=1), jnp.linalg.norm(right, axis=1)
        ratio = jnp.where(size > 0, difference / size, jnp.where(difference == 0, 0, jnp.inf))
        return jnp.max(jnp.where(counts, jnp.where(jnp.isnan(difference), jnp.inf, ratio), 0))

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(error(one, right, np.ones(len(right), bool) if owned is None else owned)) for one, right in pairs)


def fill_with_nan(like: Any) -> None:
    """Writes NaN where the allocator is likely to put the next outputs: it gives freed pieces of that size again."""
    jax.block_until_ready([jnp.full_like(out, jnp.nan) for out in jax.tree.leaves(like)])


def copy_rate(iterations: int) -> float:
    """TB/s read plus written by this GPU's fastest plain copy."""
    return round(fastest_copy(iterations)[0] * 1e-12, 3)


if __name__ == "__main__":
    main()
