"""Checks and times this folder's launches on one GPU: `python -m kernels.grouped_matmul_mgpu.tune --out out.json`.

As ../tune.py, whose helpers do the work, on the shapes of tools.bench: of each operation all launches on the first
case, the best few on the others. XLA's batched einsum on balanced rows, with SwiGLU after it for gate and up, stands
beside them; rates count owned rows only. The Triton kernels of ../grouped_matmul are timed with `--triton`.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from tools.bench.shapes import ROUTINGS, shape_of

from .. import call
from ..grouped_matmul import op as triton_op
from ..grouped_matmul.tiles import Groups, ragged_groups
from ..swiglu.reference import swiglu
from ..tune import Case, measure_trials, try_launches
from ..tune_cases import product_cases, routed_groups
from .op import CANDIDATES, gate_up, product
from .plan import ALIGNED_ROWS

EDGE_SIZES = (0, 1, 7, 63, 64, 65, 300, 0, 128, 5)
EDGE_WIDTHS = 512, 1024
GATE_UP = "gate_up"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    parser.add_argument(
        "--shapes", nargs="+", default=["A", "B", "C"], help="of tools.bench; all launches on the first"
    )
    parser.add_argument("--routings", nargs="+", default=["balanced", "uniform"], choices=ROUTINGS)
    parser.add_argument("--keep", type=int, default=3, help="launches with device times, and tried on the other shapes")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=90.0, help="after this no further launch is begun")
    parser.add_argument("--triton", action="store_true", help="also time the Triton kernels' default launch")
    arguments = parser.parse_args()
    ends = time.monotonic() + arguments.seconds
    record, ranking = [], {}
    for case in cases(arguments.shapes, arguments.routings):
        launches = ranking.get(case.name, CANDIDATES)[: None if case.name not in ranking else arguments.keep]
        tried = try_launches(case, launches, ends)
        right = sorted((trial for trial in tried if trial.row["ok"]), key=lambda trial: trial.row["host_ms"])
        best = right[: arguments.keep]
        if arguments.triton and case.name != GATE_UP:
            best += try_launches(triton_case(case), triton_op.CANDIDATES[:1], ends)
        measure_trials(case, best, arguments.iterations)
        record += [trial.row for trial in tried]
        arguments.out.write_text(json.dumps(record, indent=1))
        if case.name not in ranking:
            for trial in right:
                print(f"    host {trial.row['host_ms']:8.4f} ms  {trial.launch}", flush=True)
            ranking[case.name] = [trial.launch for trial in right] or list(CANDIDATES)
    wrong = sum(not row["ok"] for row in record)
    print(f"{len(record)} tried, {wrong} wrong or failed, {time.monotonic() + arguments.seconds - ends:.0f} s")
    raise SystemExit(bool(wrong))


def cases(shapes: list[str], routings: list[str]) -> Iterator[Case]:
    """Both products of both matrices of every shape, then experts of awkward sizes."""
    for shape in map(shape_of, shapes):
        for name in routings:
            groups, num_rows = routed_groups(shape, name)
            num_rows = whole(num_rows)
            for widths in ((shape.width, 2 * shape.hidden), (shape.hidden, shape.width)):
                title = f"{shape.name} {name} {widths[0]} -> {widths[1]}"
                yield from row_products(title, groups, num_rows, widths)
            yield gate_up_case(f"{shape.name} {name}", groups, num_rows, (shape.width, shape.hidden))
    sizes = jnp.array(EDGE_SIZES, jnp.int32)
    yield from row_products("edges", ragged_groups(sizes), whole(sum(EDGE_SIZES) + 100), EDGE_WIDTHS)


def whole(num_rows: int) -> int:
    """Rows of a buffer that the kernel takes."""
    return call.ceil_div(num_rows, ALIGNED_ROWS) * ALIGNED_ROWS


def row_products(title: str, groups: Groups, num_rows: int, widths: tuple[int, int]) -> Iterator[Case]:
    """Forward and row gradient as ../tune_cases.py has them, run by this folder's kernel."""
    forward, row_gradient, _ = product_cases(title, groups, num_rows, widths)
    yield dataclasses.replace(forward, run=lambda launch: lambda *given: product(*given, launch=launch))
    yield dataclasses.replace(
        row_gradient, run=lambda launch: lambda *given: product(*given, transposed=True, launch=launch)
    )


def gate_up_case(title: str, groups: Groups, num_rows: int, widths: tuple[int, int]) -> Case:
    """The first product with SwiGLU of weighted rows after it; `hidden` of the baseline is rounded before it."""
    forward = next(product_cases(title, groups, num_rows, (widths[0], 2 * widths[1])))
    row_weights_R = jnp.asarray(np.random.default_rng(2).random(num_rows), jnp.float32)

    def reference(rows, weights, groups, row_weights_R):
        hidden = forward.reference(rows, weights, groups)
        return hidden, swiglu(hidden, row_weights_R)

    def baseline(rows, weights):
        hidden = forward.baseline(rows, weights).reshape(-1, 2 * widths[1])
        return hidden, swiglu(hidden)

    return dataclasses.replace(
        forward,
        name=GATE_UP,
        run=lambda launch: lambda *given: gate_up(*given, launch=launch),
        arguments=(*forward.arguments, row_weights_R),
        reference=reference,
        baseline=baseline,
    )


def triton_case(case: Case) -> Case:
    transposed = "gradient" in case.name

    def run(launch):
        return lambda *given: triton_op.product(*given, transposed=transposed, launch=launch)

    return dataclasses.replace(case, run=run)


if __name__ == "__main__":
    main()
