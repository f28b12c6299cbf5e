"""Looks at routing traces, imports other stacks' routing, makes synthetic ones.

    python -m tools.trace info runs/tiny/trace
    python -m tools.trace import --format megatron rank*.jsonl --num-experts 64 --sequence-length 4096 --out DIR
    python -m tools.trace import --format histogram counts.json --out DIR
    python -m tools.trace synthetic document_skew --shards 64 --sigma 1.47 --out DIR

What the files must hold stands in ep_jax/traces/megatron.py and histogram.py, the kinds in synthetic.py there.
A folder is written whole or not at all and never overwritten. Starts no device; replaying a trace is tools.replay.
"""

import argparse
import collections
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ep_jax.cli import CommandParser
from ep_jax.data.manifest import new_folder
from ep_jax.exits import run_main
from ep_jax.fields import ConfigError
from ep_jax.traces import Trace, TraceHeader, TraceStep, write_step
from ep_jax.traces.histogram import read_histogram
from ep_jax.traces.megatron import TOKEN_ORDERS, MegatronModel, read_megatron
from ep_jax.traces.synthetic import KINDS, generate

COLUMNS = 100


def main(argv: Sequence[str]) -> None:
    """Runs one of the three commands. Raises ConfigError."""
    options = _parser().parse_args(argv)
    if options.command == "info":
        print("\n".join(info(Trace(options.trace))))
        return
    out = Path(options.out).expanduser()
    if out.exists():
        raise ConfigError(f"--out {out}: exists already and is not overwritten")
    count = write(out, _imported(options) if options.command == "import" else _generated(options))
    print(f"{out}: {count} {'step' if count == 1 else 'steps'}; look at it with: python -m tools.trace info {out}")


def write(out: Path, steps: Iterator[TraceStep]) -> int:
    """Writes steps into the new folder `out`, whole or not at all; returns their number. Raises ConfigError."""
    try:
        with new_folder(out) as unfinished:
            return len([write_step(unfinished, step) for step in steps])
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror} ({error.filename})") from None


# What `import` takes for one format only.
FORMAT_OPTIONS = {"megatron": ("num_experts", "ep", "token_order"), "histogram": ("steps", "seed")}


def _imported(options: argparse.Namespace) -> Iterator[TraceStep]:
    for name in FORMAT_OPTIONS["megatron" if options.format == "histogram" else "histogram"]:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: is not an option of --format {options.format}")
    if options.format == "histogram":
        if len(options.file) > 1:
            raise ConfigError(f"{options.file[1]}: allowed is one file with --format histogram")
        return read_histogram(
            options.file[0],
            sequence_length=options.sequence_length,
            steps=1 if options.steps is None else options.steps,
            seed=options.seed or 0,
        )
    for name in ("num_experts", "sequence_length"):
        if getattr(options, name) is None:
            raise ConfigError(f"--{name.replace('_', '-')}: is missing; --format megatron needs it")
    model = MegatronModel(
        num_experts=options.num_experts,
        sequence_length=options.sequence_length,
        ep=options.ep,
        token_order=options.token_order or TOKEN_ORDERS[0],
    )
    return read_megatron(options.file, model)


def _generated(options: argparse.Namespace) -> Iterator[TraceStep]:
    arguments = {name: value for name, value in vars(options).items() if name not in ("command", "kind", "out")}
    return generate(options.kind, **arguments)


# --- info -------------------------------------------------------------------------------------------------------------


def info(trace: Trace) -> list[str]:
    """What a trace holds and how balanced it is, as lines of at most COLUMNS columns. Reads every step."""
    ratios: dict[int, list[np.ndarray]] = collections.defaultdict(list)  # layer -> load_ratios of each ep group
    assignments, valid, tokens, documents, shape = 0, 0, 0, [], (0,) * 5
    for step in trace:
        shape = step.expert_ids_NMSTK.shape
        assignments += step.num_assignments
        valid, tokens = valid + int(step.valid_MST.sum()), tokens + step.valid_MST.size
        documents += [len(np.unique(document_T[document_T >= 0])) for document_T in _flat(step.document_MST)]
        for layer, ids_MSTK in enumerate(step.expert_ids_NMSTK):
            for ids_STK, valid_ST in zip(ids_MSTK, step.valid_MST, strict=True):
                ratios[layer].append(load_ratios(ids_STK, valid_ST, trace.header))
    files = [trace.path] if trace.path.is_file() else list(trace.path.glob("step_*.npz"))
    size = sum(file.stat().st_size for file in files)
    layers, microbatches, shards, shard_tokens, choices = shape
    header, steps = trace.header, trace.steps
    head = [
        f"{trace.path}: {header.source}",
        f"{layers} layers of {header.num_experts} experts, top-{choices}; rows of {header.sequence_length} tokens",
        f"{shards} source shards in ep groups of {header.ep}; {microbatches} x {shard_tokens:,} tokens a shard and "
        "step (microbatches x tokens)",
        f"steps: {len(steps):,}, from {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"step: {steps[0]:,}",
        f"{assignments:,} assignments in {size:,} bytes: {size / max(assignments, 1):.2f} bytes an assignment, "
        f"{len(files)} {'file' if len(files) == 1 else 'files'}",
        f"padding: {1 - valid / tokens:.2%} of the tokens",
        f"documents of a shard and microbatch: {np.mean(documents):.1f} on average, {min(documents)} to "
        f"{max(documents)}",
    ]
    if not header.order_known:
        head.append("order unknown: only counts are real, so policies that look at order or documents see noise")
    if header.policy:
        head.append("recorded under: " + ", ".join(f"{name} {value}" for name, value in header.policy.items()))
    wrapped = [line for text in head for line in textwrap.wrap(text, COLUMNS, subsequent_indent="  ")]
    return [*wrapped, "", *_balance(ratios)]


def load_ratios(ids_STK: np.ndarray, valid_ST: np.ndarray, header: TraceHeader) -> np.ndarray:
    """float64 [G,3]: the largest load over the mean load of an expert, a destination shard, and a pair of shards.

    A pair is a source and a destination; its mean is that of its source. NaN where experts do not divide into `ep`
    destinations, or nothing is valid.
    """
    shards, experts, ep = len(ids_STK), header.num_experts, header.ep
    flat = (np.arange(shards)[:, None, None] * experts + ids_STK)[valid_ST]
    counts_GSE = np.bincount(flat.reshape(-1), minlength=shards * experts).reshape(-1, ep, experts)
    loads = [counts_GSE.sum(axis=1)]
    if experts % ep == 0:
        counts_GSD = counts_GSE.reshape(-1, ep, ep, experts // ep).sum(axis=3)
        loads += [counts_GSD.sum(axis=1), counts_GSD]
    ratios_G3 = np.full((len(counts_GSE), 3), np.nan)
    for column, load in enumerate(loads):
        mean = load.mean(axis=-1, keepdims=True)
        ratio = np.divide(load, mean, out=np.full(load.shape, np.nan), where=mean > 0)
        # A source without a valid token has no pairs to look at.
        ratios_G3[:, column] = np.fmax.reduce(ratio.reshape(len(ratio), -1), axis=1)
    return ratios_G3


def _balance(ratios: dict[int, list[np.ndarray]]) -> list[str]:
    table = {str(layer): np.concatenate(found) for layer, found in ratios.items()}
    table["all"] = np.concatenate(list(table.values()))
    lines = [
        "largest load over mean load      an expert       a destination   a source's destination",
        "layer                           mean   worst      mean   worst      mean   worst",
    ]
    for layer, ratios_X3 in table.items():
        cells = ""
        for column in ratios_X3.T:
            known = column[~np.isnan(column)]
            if not known.size:
                cells += f"{'-':>10}{'-':>8}"
                continue
            worst = math.ceil(known.max() * 1000) / 1000  # up, so that the number shown is enough as a factor
            cells += f"{known.mean():10.3f}{worst:8.3f}"
        lines.append(f"{layer:>5}{'':21}{cells}")
    return [
        *lines,
        *textwrap.wrap(
            "Mean and worst are over steps, microbatches and ep groups. The worst source's destination is the least "
            "sender_factor of pooled_wave that drops nothing at senders; the worst expert, the least receiver_factor "
            "that is then sure to drop nothing in one wave.",
            COLUMNS,
        ),
    ]


def _flat(values_MST: np.ndarray) -> np.ndarray:
    return values_MST.reshape(-1, values_MST.shape[-1])


# --- command line -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m tools.trace", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="info|import|synthetic")

    command = commands.add_parser("info", help="what a trace holds and how balanced it is")
    command.add_argument("trace", metavar="TRACE", help="folder of a trace, or one of its files")

    command = commands.add_parser("import", help="routing of another stack to a trace")
    command.add_argument("file", metavar="FILE", nargs="+", help="megatron: JSON-lines files; histogram: one JSON file")
    command.add_argument("--format", choices=("megatron", "histogram"), required=True, help="what the file holds")
    command.add_argument("--out", metavar="DIR", required=True, help="folder to write; must not exist")
    command.add_argument("--num-experts", type=int, metavar="N", help="megatron: experts of a layer")
    command.add_argument("--sequence-length", type=int, metavar="N", help="tokens of a row (histogram: all of a shard)")
    command.add_argument("--ep", type=int, metavar="N", help="megatron: ranks of an ep group (all)")
    command.add_argument(
        "--token-order", choices=TOKEN_ORDERS, help=f"megatron: how tokens are flattened ({TOKEN_ORDERS[0]})"
    )
    command.add_argument("--steps", type=int, metavar="N", help="histogram: independent draws (1)")
    command.add_argument("--seed", type=int, metavar="N", help="histogram: of the draws (0)")

    command = commands.add_parser("synthetic", help="a labelled skew, by default of the published hero's shape")
    command.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    command.add_argument("--out", metavar="DIR", required=True, help="folder to write; must not exist")
    command.add_argument("--shards", type=int, metavar="N", default=64, help="source shards, one ep group (64)")
    command.add_argument("--rows-per-shard", type=int, metavar="N", default=16, help="packed rows of a shard (16)")
    command.add_argument("--sequence-length", type=int, metavar="N", default=256, help="tokens of a row (256)")
    command.add_argument("--num-experts", type=int, metavar="N", default=384, help="experts of a layer (384)")
    command.add_argument("--experts-per-token", type=int, metavar="N", default=8, help="choices of a token (8)")
    command.add_argument(
        "--num-layers", type=int, metavar="N", default=1, help="layers, each with skews of its own (1)"
    )
    command.add_argument("--steps", type=int, metavar="N", default=1, help="steps, each with documents of its own (1)")
    command.add_argument("--documents-per-shard", type=int, metavar="N", help="equally long ones (one a row)")
    command.add_argument("--sigma", type=float, metavar="X", default=1.47, help="strength of a skew, in logits (1.47)")
    command.add_argument("--seed", type=int, metavar="N", default=0, help="of everything random (0)")
    command.add_argument("--padding-fraction", type=float, metavar="X", default=0.0, help="invalid end of each row (0)")
    return parser


if __name__ == "__main__":
    run_main(main)
