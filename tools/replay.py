"""Replays recorded routing through capacity policies: drops, what they cost, and the factors that a drop target needs.

    python -m tools.replay runs/tiny/trace                             # factors for under 0.5 % drops, as recorded
    python -m tools.replay runs/tiny/trace --shards 64 --figure x.png  # the same rows dealt to 64 shards
    python -m tools.replay runs/tiny/trace --order position,weight --sender 1.1,1.2 --receiver 1.1
    python -m tools.replay runs/tiny/trace --check                     # does a replay drop what the run counted?

Lists are separated by commas; all combinations are replayed. Without --sender and --receiver, factors are searched from
1.0 up: the cheapest pair (bytes that leave a GPU, and rows of its experts) whose drops stay under --target with 95 %
confidence over steps. What is kept is decided by the protocol's own plan functions; nothing is sampled. Training
records traces with `--trace.every n`.

Exit codes: 0 done; 1 --check found a difference; 2 refused, nothing was written.
"""

import argparse
import difflib
import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ep_jax import exits
from ep_jax.cli import CommandParser
from ep_jax.ep.settings import AGREEMENTS, ORDERS, RECEIVES, SLOTS, EPConfig
from ep_jax.ep.traffic import Widths
from ep_jax.fields import ConfigError
from ep_jax.planning.sizes import ITEMSIZE
from ep_jax.replay.check import difference, policy_of
from ep_jax.replay.figure import draw
from ep_jax.replay.policies import ORDER_FREE, TRANSPORTS, VARIED, Family, families
from ep_jax.replay.resharding import deal, recorded_sizes
from ep_jax.replay.results import check_parquet, write_csv, write_parquet
from ep_jax.replay.study import Question, Study, study_grid, study_search
from ep_jax.replay.tables import imbalance_line, recommendation, results_table, wrap
from ep_jax.traces.file import Trace, TraceStep

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")
MOST_HELD_BYTES = 2**30  # traces up to this size are read once and held


def main(argv: Sequence[str]) -> int:
    """Does what the command line says; returns the exit code. Raises ConfigError."""
    started = time.perf_counter()
    options = _parser().parse_args(argv)
    traces = open_traces(options.traces)
    if options.check:
        default = _parser().get_default
        given = {f"--{name}" for name, value in vars(options).items() if value != default(name)}
        if others := sorted(given - {"--check", "--traces"}):
            raise ConfigError(f"--check: compares as recorded; not allowed beside it: {', '.join(others)}")
        return check(traces)
    _check_files(options)
    base = policy_of(traces[0].header.policy) if traces[0].header.policy else EPConfig()
    first = traces[0].read(traces[0].steps[0])
    asked = ask(options, traces, first, base)
    print("\n".join(wrap(describe(traces, first))))
    studies = []
    for question, wanted in asked:
        if options.sender or options.receiver:
            senders, receivers = options.sender or [base.sender_factor], options.receiver or [base.receiver_factor]
            studies.append(study_grid(question, wanted, senders, receivers))
        else:
            studies.append(study_search(question, wanted, base, _say))
        print("\n".join(report(question, studies[-1], first)), flush=True)
    results = [result for of_question in studies for study in of_question for result in study.results]
    if options.csv:
        write_csv(results, options.csv)
    if options.parquet:
        write_parquet(results, options.parquet)
    if options.figure:
        write_figure(options.figure, asked[-1][0], studies[-1], first)
    print(f"\nreplayed in {time.perf_counter() - started:.1f} s")
    return exits.DONE


def open_traces(paths: Sequence[Path]) -> list[Trace]:
    """The traces, all of one kind. Raises ConfigError when they cannot be replayed together."""
    traces = [Trace(path) for path in paths]
    kinds = [(trace.header.num_experts, trace.header.sequence_length, trace.header.ep) for trace in traces]
    for trace, kind in zip(traces, kinds, strict=True):
        if kind != kinds[0]:
            raise ConfigError(
                f"{trace.path}: found {kind[0]} experts, packed rows of {kind[1]} and ep {kind[2]}: expected those of "
                f"{traces[0].path}: {', '.join(map(str, kinds[0]))}"
            )
    return traces


def check(traces: Sequence[Trace]) -> int:
    """Says whether a replay of every step drops what the run counted, to the unit; returns the exit code."""
    for trace in traces:
        assignments, dropped = 0, 0
        for step in trace:
            policy = step.header.policy
            if policy is None or step.counts_NPE is None:
                raise ConfigError(f"{trace.path}: --check: needs a trace with the policy and the counts of its run")
            if found := difference(step, step.counts_NPE, policy_of(policy)):
                print(f"{trace.path}: DIFFERS: {found}")
                return exits.DIFFERS
            assignments += step.num_assignments
            dropped += int(step.counts_NPE[:, 1:].sum())
        print(
            f"{trace.path}: a replay agrees to the unit with what the run counted, by layer, stage and expert: "
            f"{len(trace)} steps, {assignments:,} assignments, {dropped:,} dropped"
        )
    return exits.DONE


def ask(
    options: argparse.Namespace, traces: Sequence[Trace], first: TraceStep, base: EPConfig
) -> list[tuple[Question, list[Family]]]:
    """A question and its families for each number of shards. Raises ConfigError before anything is replayed."""
    recorded, steps = recorded_sizes(first), _steps(traces, first)
    widths = Widths(options.width, 0, ITEMSIZE[options.dtype])
    rows = options.rows or ("split" if base.emulates else "recorded")
    asked = []
    for shards in options.shards or [base.emulated_shards if base.emulates else first.header.ep]:
        dealing = deal(first.header, recorded, shards, rows, sum(map(len, traces)))
        question = Question(steps, dealing, widths, options.target, options.seed)
        wanted = families(options.policies, [shards], {name: getattr(options, name) for name in VARIED}, base)
        for family in wanted:
            family.check(question.shape)
        asked.append((question, wanted))
    return asked


def _steps(traces: Sequence[Trace], first: TraceStep) -> Callable[[], Iterable[TraceStep]]:
    """Reads all steps of all traces, once only where they fit in memory."""
    step_bytes = first.expert_ids_NMSTK.nbytes + first.weights_NMSTK.nbytes
    if step_bytes * sum(map(len, traces)) > MOST_HELD_BYTES:
        return lambda: (step for trace in traces for step in trace)
    return functools.cache(lambda: [step for trace in traces for step in trace])


def describe(traces: Sequence[Trace], first: TraceStep) -> str:
    """What was recorded, on one line."""
    recorded, header, steps = recorded_sizes(first), first.header, sum(map(len, traces))
    return (
        f"trace: {header.source}; {steps} steps of {recorded.step_rows} packed rows x {header.sequence_length} tokens, "
        f"{recorded.layers} layers, {header.num_experts} experts, top-{recorded.choices}, recorded with "
        f"{recorded.shards} shards in ep groups of {header.ep}"
    )


def report(question: Question, studies: Sequence[Study], first: TraceStep) -> list[str]:
    """The results for one number of shards as lines."""
    dealing, results = question.dealing, [result for study in studies for result in study.results]
    groups = len(results[0].outcome.steps_G)
    total = int(results[0].outcome.total_P[0])
    head = (
        f"EP{dealing.shards}: {groups} ep groups of {dealing.shards} shards x {question.shape.tokens:,} tokens, "
        f"{total:,} valid assignments; rows of {question.widths.row_bytes:,} bytes"
    )
    lines = ["", *wrap(head)]
    lines += wrap(dealing.assumption)
    if not first.header.order_known:
        lines += wrap(
            "WARNING: the trace has counts but no order of assignments: all but order-free policies "
            f"({', '.join(ORDER_FREE)}) are approximate"
        )
    lines += [*wrap(imbalance_line(results[0])), "", *results_table(results).splitlines(), ""]
    for study in studies:
        lines += recommendation(study, question)
    if len(studies[0].valid_U) < 10:
        lines += wrap(f"note: intervals from {len(studies[0].valid_U)} steps are rough; record more")
    return lines


def write_figure(path: Path, question: Question, studies: Sequence[Study], first: TraceStep) -> None:
    """Draws the studies. Raises ConfigError when that is not possible."""
    try:
        figure = draw(question, studies, f"{first.header.source}, EP{question.dealing.shards}")
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"--figure = {str(path)!r}: cannot be written: {error}") from None


def _check_files(options: argparse.Namespace) -> None:
    """Raises ConfigError for a file that could not be written at the end."""
    for name in ("csv", "parquet", "figure"):
        path = getattr(options, name)
        if path and not path.parent.is_dir():
            raise ConfigError(f"--{name} = {str(path)!r}: cannot be written: there is no folder {path.parent}")
    if options.parquet:
        check_parquet()
    if options.figure:
        if options.figure.suffix not in FIGURE_SUFFIXES:
            raise ConfigError(f"--figure = {str(options.figure)!r}: allowed are names in {', '.join(FIGURE_SUFFIXES)}")
        try:
            importlib.import_module("matplotlib")
        except ImportError:
            raise ConfigError("--figure: needs the package matplotlib") from None


def _say(text: str) -> None:
    print(f"  {text} ...", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m tools.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, metavar: str, kind: Callable[[str], Any], text: str, default: Any = None) -> None:
        parser.add_argument(name, type=kind, metavar=metavar, help=text, default=default)

    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="folder of a trace, or one file of it")
    parser.add_argument("--check", action="store_true", help="only compare with what the run counted")
    add("--shards", "N,...", _list_of(int), "ep sizes (as recorded)")
    rows = "packed rows of a shard: as many as recorded, joining steps where one has too few (the default); those of a "
    add("--rows", "recorded|split|N", _rows, rows + "recorded ep group, split over the shards; or a number")
    add(
        "--policies",
        "T,...",
        _list_of(str, TRANSPORTS),
        f"of {', '.join(TRANSPORTS)} (the first three)",
        TRANSPORTS[:3],
    )
    for name, choices in (("order", ORDERS), ("slots", SLOTS), ("receive", RECEIVES), ("agreed", AGREEMENTS)):
        add(f"--{name}", f"{name[0].upper()},...", _list_of(str, choices), f"of {', '.join(choices)} (as recorded)")
    add("--waves", "N,...", _list_of(int), "(as recorded)")
    add("--premix", "N,...", _list_of(int), "members of a pre-mix group (as recorded)")
    add("--sender", "F,...", _list_of(float), "sender factors to replay and to choose from, instead of a search")
    add("--receiver", "F,...", _list_of(float), "receiver factors; with one list alone, the other is as recorded")
    add("--target", "P", _rate, "share of assignments that may drop, as 0.5%% or 0.005 (0.5%%)", 0.005)
    add("--width", "N", _positive, "elements of a routed row, for bytes (3072)", 3072)
    parser.add_argument("--dtype", choices=sorted(ITEMSIZE), default="bfloat16", help="of a routed row (bfloat16)")
    add("--seed", "N", _seed, "of the bootstrap (0)", 0)
    add("--csv", "FILE", Path, "write all counts: by layer, expert, source shard, place, column and document")
    add("--parquet", "FILE", Path, "the same as Parquet; needs pandas and pyarrow")
    add("--figure", "FILE", Path, "draw the results for the last of --shards; needs matplotlib")
    return parser


def _list_of(kind: Callable[[str], Any], allowed: Sequence[str] = ()) -> Callable[[str], list[Any]]:
    """Reads values separated by commas: names that are allowed, or numbers above 0."""

    def read(text: str) -> list[Any]:
        try:
            values = [kind(part.strip()) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: allowed are numbers separated by commas") from None
        for value in values:
            if allowed and value not in allowed:
                near = difflib.get_close_matches(value, allowed, 1, 0.0)
                raise argparse.ArgumentTypeError(f"{value!r}: allowed are {', '.join(allowed)}; nearest {near[0]}")
            if not allowed and not 0 < value < float("inf"):
                raise argparse.ArgumentTypeError(f"{value!r}: allowed are numbers above 0")
        return values

    return read


def _rows(text: str) -> str | int:
    return text if text in ("recorded", "split") else _positive(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are whole numbers, at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are whole numbers, at least 1")
    return int(text)


def _rate(text: str) -> float:
    """0.5% and 0.005 as 0.005."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are 0% to below 100%, or 0 to below 1")
    return value


if __name__ == "__main__":
    exits.run_main(main)
