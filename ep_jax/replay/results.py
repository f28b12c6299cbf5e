"""Results of a replay: outcomes with cost and confidence, as rows of CSV and Parquet files.

Letters: G groups, U steps, N layers, P stages (valid, sender, receiver), X things of one scope.

A row has the policy, what it costs, and the counts of one scope: `all`, or one `layer`, `expert` (of a layer), `source`
shard, `place` (packed row of the shard), `column` (bin of columns of a packed row), `document`. Starts no JAX backend.
"""

import csv
import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ep_jax.ep.capacity import LayerShape
from ep_jax.ep.traffic import Widths
from ep_jax.fields import ConfigError
from ep_jax.replay.cost import expert_rows, forward_bytes
from ep_jax.replay.policies import NUMBERS, VARIED
from ep_jax.replay.recommend import Interval, by_step, draw_steps, interval
from ep_jax.replay.replay import Outcome

COLUMNS = (
    "policy",
    "transport",
    *VARIED,  # empty where the transport does not use it, as the factors below
    "shards",
    "rows_per_shard",  # packed rows
    "sender_factor",
    "receiver_factor",
    "scope",
    "layer",  # of scopes layer and expert
    "index",  # which expert, source, place, column or document
    "valid",  # assignments
    "dropped_sender",
    "dropped_receiver",
    "drop_rate",  # 0 to 1
    "drop_rate_low",  # of all and of layers: 95 % interval over steps
    "drop_rate_high",
    "lost_weight_sender",  # dropped over all valid combine weight, 0 to 1; of all and of layers
    "lost_weight_receiver",
    "forward_bytes",  # that leave one GPU in one layer's forward pass, dispatch and return
    "expert_rows",  # buffer rows of one GPU's experts in one layer
    "shard_imbalance",  # most kept rows of a destination shard over the mean, averaged over groups and layers
    "expert_imbalance",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """An outcome with what is derived from it."""

    outcome: Outcome
    shape: LayerShape
    rows_per_shard: int
    forward_bytes: float  # that leave one GPU in one layer's forward pass
    expert_rows: int  # buffer rows of one GPU's experts in one layer
    interval: Interval  # floats, of all layers together
    layer_interval: Interval  # arrays [N]


def result_of(outcome: Outcome, shape: LayerShape, rows_per_shard: int, widths: Widths, seed: int) -> Result:
    """Adds cost and intervals; the seed is that of the bootstrap."""
    groups, layers, _ = outcome.counts_GNP.shape
    kept_away = outcome.kept_away / (groups * layers * shape.num_shards)
    counts_UNP = by_step(outcome.counts_GNP, outcome.steps_G)
    drops_UN, valid_U = counts_UNP[..., 1:].sum(axis=2), counts_UNP[:, 0, 0]  # every layer has the same valid ones
    drawn_BU = draw_steps(len(valid_U), seed)
    of_all = interval(drops_UN.sum(axis=1, keepdims=True), valid_U * layers, drawn_BU)
    return Result(
        outcome,
        shape,
        rows_per_shard,
        forward_bytes(outcome.settings, shape, widths, kept_away),
        expert_rows(outcome.settings, shape),
        Interval(*[float(values_1[0]) for values_1 in of_all]),
        interval(drops_UN, valid_U, drawn_BU),
    )


def rows_of(result: Result) -> Iterator[dict[str, Any]]:
    """Rows with COLUMNS; what does not apply is None."""
    outcome = result.outcome
    settings, used = outcome.settings, outcome.settings.used
    policy = dict.fromkeys(COLUMNS) | dict(
        policy=outcome.family.name,
        transport=settings.transport,
        shards=outcome.family.shards,
        rows_per_shard=result.rows_per_shard,
        forward_bytes=round(result.forward_bytes),
        expert_rows=result.expert_rows,
        **{name: getattr(settings, name) for name in (*VARIED, "sender_factor", "receiver_factor") if name in used},
    )
    imbalances = dict(
        shard_imbalance=float(outcome.shard_imbalance_GN.mean()),
        expert_imbalance=float(outcome.expert_imbalance_GN.mean()),
    )
    yield policy | _counted("all", outcome.total_P) | _sure(result.interval, outcome.weight_NP.sum(0)) | imbalances
    for layer, counts_P in enumerate(outcome.counts_GNP.sum(axis=0)):
        of_layer = Interval(*[float(values_N[layer]) for values_N in result.layer_interval])
        imbalances = dict(
            shard_imbalance=float(outcome.shard_imbalance_GN[:, layer].mean()),
            expert_imbalance=float(outcome.expert_imbalance_GN[:, layer].mean()),
        )
        sure = _sure(of_layer, outcome.weight_NP[layer])
        yield policy | _counted("layer", counts_P) | sure | imbalances | dict(layer=layer)
    for layer, counts_PE in enumerate(outcome.expert_NPE):
        for expert, counts_P in enumerate(counts_PE.T):
            yield policy | _counted("expert", counts_P) | dict(layer=layer, index=expert)
    documents_X = outcome.documents_D.tolist()
    scopes = dict(source=outcome.source_PS, place=outcome.place_PR, column=outcome.column_PC)
    for scope, counts_PX in scopes.items():
        for index, counts_P in enumerate(counts_PX.T):
            yield policy | _counted(scope, counts_P) | dict(index=index)
    for document, counts_P in zip(documents_X, outcome.document_PD.T, strict=True):
        yield policy | _counted("document", counts_P) | dict(index=document)


def _counted(scope: str, counts_P: np.ndarray) -> dict[str, Any]:
    valid, sender, receiver = counts_P.tolist()
    rate = (sender + receiver) / max(valid, 1)
    return dict(scope=scope, valid=valid, dropped_sender=sender, dropped_receiver=receiver, drop_rate=rate)


def _sure(of_rate: Interval, weight_P: np.ndarray) -> dict[str, Any]:
    valid, sender, receiver = weight_P.tolist()
    lost = [part / valid if valid > 0 else 0.0 for part in (sender, receiver)]
    return dict(
        drop_rate_low=of_rate.low,
        drop_rate_high=of_rate.high,
        lost_weight_sender=lost[0],
        lost_weight_receiver=lost[1],
    )


def write_csv(results: Iterable[Result], path: Path) -> None:
    """Writes all rows with a header line. Raises ConfigError when the file cannot be written."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for result in results for row in rows_of(result))
    except OSError as error:
        raise ConfigError(f"--csv = {str(path)!r}: cannot be written: {error.strerror}") from None


def check_parquet() -> None:
    """Raises ConfigError when a package that Parquet files need is not installed."""
    for package in ("pandas", "pyarrow"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise ConfigError(f"--parquet: needs the package {package}; --csv needs none") from None


def write_parquet(results: Sequence[Result], path: Path) -> None:
    """The same rows as a Parquet file. Raises ConfigError when it cannot be written or a package is missing."""
    check_parquet()
    import pandas

    frame = pandas.DataFrame([row for result in results for row in rows_of(result)], columns=list(COLUMNS))
    whole = [name for name in (*NUMBERS, "layer", "index") if name in frame]
    try:
        frame.astype(dict.fromkeys(whole, "Int64")).to_parquet(path, index=False)
    except OSError as error:
        raise ConfigError(f"--parquet = {str(path)!r}: cannot be written: {error.strerror}") from None
