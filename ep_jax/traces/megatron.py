"""JSON lines of Megatron-style routers as traces.

Letters: N layers, M microbatches of a step, S source shards, T tokens of a shard in a microbatch, K choices, E experts,
R packed rows of L tokens each.

Megatron-Core records routing in memory only (moe_enable_routing_replay, RouterReplay in its RECORD mode: a
[T,K] tensor for each MoE layer). Whoever stores it writes each of these as one line, a JSON object with the fields
  step, layer, rank  integers; `rank` numbers from 0 to S-1 those that hold different tokens, in mesh order
  microbatch         integer from 0 to M-1; 0 if left out
  topk_indices       [T][K] integers from 0 to E-1, distinct within a valid token, best choice first
  probs              [T][K] numbers, the combine weights of these choices; 1/K each if left out
  valid              [T] true/false or 1/0; all true if left out
  document           [T] integers >= 0 (padding: any), number of the token's document; if left out, each row is one
  position           [T] integers >= 0 (padding: any), input of the document; if left out, counted within the row
Other fields are ignored. Lines come in any order, in one or several files; each (step, layer, rank, microbatch) exactly
once, all with the same T, K and optional fields. Layers are numbered anew from 0, in order: models have dense ones too.
Megatron flattens [sequence, batch]: token t is column t div B of sequence t mod B, B = T/L (token order "sbh"). "bsh"
is row after row, as in the trace itself. Tensor and context parallel ranks hold pieces of sequences; join these first.

What was left out or ignored is said in the header's `source`.
"""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ep_jax.traces.file import TraceError, TraceHeader, TraceStep, id_type
from ep_jax.traces.json_values import HIGHEST, integer_of, numbers_of, object_of

TOKEN_ORDERS = ("sbh", "bsh")
KEYS = ("step", "layer", "rank", "microbatch")
# field -> what is in its lists (JSON_KINDS), their depth, what its absence means
OPTIONAL = {
    "probs": ("finite float32 numbers", 2, "no probs: weights are 1/K"),
    "valid": ("true/false or 1/0", 1, "no valid: all tokens count"),
    "document": ("integers", 1, "no document: each row is one"),
    "position": ("integers", 1, "no position: counted within the row"),
}
PER_TOKEN = ("valid", "document", "position")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MegatronModel:
    """What the lines do not say."""

    num_experts: int
    sequence_length: int
    ep: int | None = None  # shards of an ep group; None: all of them
    token_order: str = "sbh"

    def __post_init__(self):
        for name, highest in (("num_experts", 65536), ("sequence_length", HIGHEST), ("ep", HIGHEST)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= highest:
                raise TraceError(f"{name} = {value}: allowed is 1 to {highest}")
        if self.token_order not in TOKEN_ORDERS:
            raise TraceError(f"token_order = {self.token_order!r}: allowed is one of {', '.join(TOKEN_ORDERS)}")


class _Place(NamedTuple):
    path: Path
    line: int  # from 1
    start: int  # first byte

    def __str__(self):
        return f"{self.path}, line {self.line}"


def read_megatron(paths: Sequence[str | Path], model: MegatronModel) -> Iterator[TraceStep]:
    """Steps of JSON-lines routing, ascending. Every line is checked before the first step is made.

    Raises TraceError naming file, line, field and what is allowed. Reads the files twice and holds one step at a time.
    """
    names = ", ".join(Path(path).name for path in paths)
    places, present, ignored = _index(paths, model)
    if not places:
        raise TraceError(f"{names}: found no line; allowed is one JSON object a line")
    steps, layers, ranks, microbatches = (sorted(set(values)) for values in zip(*places, strict=True))
    _check_complete(names, places, (steps, layers, ranks, microbatches))
    ep = model.ep or len(ranks)
    if len(ranks) % ep:
        raise TraceError(f"ep = {ep}: allowed is a divisor of {len(ranks)}, the ranks in {names}")
    notes = [
        f"token order {model.token_order}",
        *(note for name, (*_, note) in OPTIONAL.items() if name not in present),
    ]
    if ignored:
        notes.append(f"ignored {', '.join(sorted(ignored))}")
    header = TraceHeader(
        num_experts=model.num_experts,
        sequence_length=model.sequence_length,
        ep=ep,
        source=f"Megatron-style {names}; {'; '.join(notes)}",
    )
    sizes = (len(layers), len(microbatches), len(ranks))
    of_step: dict[int, list[_Place]] = {step: [] for step in steps}
    for key in sorted(places, key=lambda key: (key[0], key[1], key[3], key[2])):  # layer, microbatch, rank
        of_step[key[0]].append(places[key])
    return (_megatron_step(header, model, step, index, sizes, of_step[step]) for index, step in enumerate(steps))


def _index(
    paths: Sequence[str | Path], model: MegatronModel
) -> tuple[dict[tuple[int, ...], _Place], set[str], set[str]]:
    """Where each key is, the optional fields that all lines have, and the ignored ones; checks lines by themselves."""
    places: dict[tuple[int, ...], _Place] = {}
    tokens_of: dict[tuple[int, ...], tuple[int, _Place]] = {}  # what layers share -> its checksum, where first seen
    shared, present, ignored = None, set(), set()
    for place, text in (line for path in paths for line in _lines(Path(path))):
        fields = object_of(str(place), text)
        key, arrays = _parse(str(place), fields, model)
        if key in places:
            raise TraceError(f"{place}: {_named(key)} is already in {places[key]}; allowed is once")
        names = ", ".join(name for name in OPTIONAL if name in arrays) or "no other field"
        kind = f"topk_indices {list(arrays['topk_indices'].shape)} with {names}"
        shared = shared or (kind, place)
        if kind != shared[0]:
            raise TraceError(f"{place}: found {kind}; allowed is the same in all lines, {shared[0]} in {shared[1]}")
        checksum = zlib.crc32(b"".join(arrays[name].tobytes() for name in PER_TOKEN if name in arrays))
        first = tokens_of.setdefault((key[0], *key[2:]), (checksum, place))
        if first[0] != checksum:
            raise TraceError(
                f"{place}: {', '.join(PER_TOKEN)}: found others than in {first[1]}; allowed are the same in all layers"
            )
        places[key] = place
        present |= arrays.keys()
        ignored |= fields.keys() - {*KEYS, "topk_indices", *OPTIONAL}
    return places, present, ignored


def _lines(path: Path) -> Iterator[tuple[_Place, bytes]]:
    """Every line that is not blank."""
    start = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield _Place(path, number, start), text
                start += len(text)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(where: str, fields: dict[str, Any], model: MegatronModel) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    """The key of a line (KEYS) and its arrays by field, row after row."""
    key = tuple(integer_of(where, name, fields.get(name, 0 if name == "microbatch" else None)) for name in KEYS)
    ids_TK = numbers_of(where, "topk_indices", fields.get("topk_indices"), "integers", 2)
    arrays = {"topk_indices": ids_TK}
    tokens, length = len(ids_TK), model.sequence_length
    if tokens % length:
        raise TraceError(f"{where}: topk_indices: found {tokens} tokens; allowed is a multiple of {length}, a sequence")
    for name in OPTIONAL.keys() & fields.keys():
        kind, axes, _ = OPTIONAL[name]
        arrays[name] = numbers_of(where, name, fields[name], kind, axes)
        if arrays[name].shape != ids_TK.shape[:axes]:
            found, wanted = list(arrays[name].shape), list(ids_TK.shape[:axes])
            raise TraceError(f"{where}: {name}: found shape {found}; allowed is {wanted}, as in topk_indices")
    valid_T = arrays.get("valid", np.ones(tokens, bool))
    for name in ("document", "position"):
        if name in arrays and (negative := arrays[name][(arrays[name] < 0) & valid_T]).size:
            raise TraceError(f"{where}: {name}: found {negative[0]}; allowed is at least 0 at valid tokens")
    _check_ids(where, ids_TK, valid_T, model.num_experts)
    order_T = np.arange(tokens)
    if model.token_order == "sbh":
        order_T = order_T.reshape(length, -1).T.reshape(-1)
    arrays = {name: array[order_T] for name, array in arrays.items()}
    if "document" in arrays and "position" in arrays:
        _check_positions(where, arrays["document"], arrays["position"], valid_T[order_T], model)
    return key, arrays


def _check_positions(
    where: str, document_T: np.ndarray, position_T: np.ndarray, valid_T: np.ndarray, model: MegatronModel
) -> None:
    """In a row, positions of a document count up by one; they do not when the token order is the other one."""
    document_RL, position_RL, valid_RL = (
        x.reshape(-1, model.sequence_length) for x in (document_T, position_T, valid_T)
    )
    same_RL = (document_RL[:, 1:] == document_RL[:, :-1]) & valid_RL[:, 1:] & valid_RL[:, :-1]
    bad = np.argwhere(same_RL & (np.diff(position_RL, axis=1) != 1))
    if bad.size:
        row, column = bad[0]
        found = position_RL[row, column : column + 2].tolist()
        raise TraceError(
            f"{where}: position: found {found[0]}, then {found[1]} in document {document_RL[row, column]} of row {row} "
            f"(of token order {model.token_order}); allowed is to count up by 1"
        )


def _check_ids(where: str, ids_TK: np.ndarray, valid_T: np.ndarray, num_experts: int) -> None:
    sorted_TK = np.sort(ids_TK, axis=1)
    outside_T = (sorted_TK[:, 0] < 0) | (sorted_TK[:, -1] >= num_experts)
    repeated_T = (sorted_TK[:, 1:] == sorted_TK[:, :-1]).any(axis=1)
    bad = np.flatnonzero(valid_T & (outside_T | repeated_T))
    if bad.size:
        raise TraceError(
            f"{where}: topk_indices[{bad[0]}] = {ids_TK[bad[0]].tolist()}; allowed are distinct integers from 0 to "
            f"{num_experts - 1}"
        )


def _named(key: Sequence[int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(KEYS, key, strict=True))


def _check_complete(names: str, places: dict[tuple[int, ...], _Place], values: tuple[list[int], ...]) -> None:
    """Refuses ranks or microbatches that do not count from 0, and a hole in steps x layers x ranks x microbatches."""
    steps, layers, ranks, microbatches = values
    for name, found in (("rank", ranks), ("microbatch", microbatches)):
        for expected, value in enumerate(found):
            if value != expected:
                raise TraceError(f"{names}: {name} {expected} is missing; allowed is every one from 0 to {found[-1]}")
    for key in ((s, n, r, m) for s in steps for n in layers for r in ranks for m in microbatches):
        if key not in places:
            raise TraceError(f"{names}: {_named(key)} is missing; allowed is each exactly once")


def _megatron_step(
    header: TraceHeader, model: MegatronModel, step: int, index: int, sizes: tuple[int, int, int], places: list[_Place]
) -> TraceStep:
    """The step from its lines in the order layer, microbatch, rank; `index` counts steps from 0."""
    records = [_parse(str(place), object_of(str(place), _line_at(place)), model)[1] for place in places]
    fields = {name: np.stack([record[name] for record in records]) for name in records[0]}
    fields = {name: array.reshape(*sizes, *array.shape[1:]) for name, array in fields.items()}
    ids_NMSTK = fields["topk_indices"]
    _, microbatches, ranks, tokens, choices = ids_NMSTK.shape
    shape = (microbatches, ranks, tokens)
    valid_MST = fields["valid"][0] if "valid" in fields else np.ones(shape, bool)
    rows = tokens // model.sequence_length
    first_row = index * microbatches * ranks * rows
    row_MST = (first_row + np.arange(microbatches * ranks * rows).repeat(model.sequence_length)).reshape(shape)
    document_MST = fields["document"][0] if "document" in fields else row_MST
    position_MST = fields["position"][0] if "position" in fields else _count(document_MST, model.sequence_length)
    weights = fields.get("probs", np.full(ids_NMSTK.shape, 1 / choices))
    valid_1MST1 = valid_MST[None, ..., None]
    return TraceStep(
        header=header,
        step=step,
        # Padding may hold anything, also -1, which a file has no room for.
        expert_ids_NMSTK=np.where(valid_1MST1, ids_NMSTK, np.arange(choices)).astype(id_type(header.num_experts)),
        weights_NMSTK=np.where(valid_1MST1, weights, 0).astype(np.float32),
        valid_MST=valid_MST,
        document_MST=np.where(valid_MST, document_MST, -1),
        position_MST=np.where(valid_MST, position_MST, -1),
    )


def _count(document_MST: np.ndarray, length: int) -> np.ndarray:
    """Place of each token in its document, counted from the row's beginning or from where the document changes."""
    document_RL = document_MST.reshape(-1, length)
    column_RL = np.broadcast_to(np.arange(length), document_RL.shape)
    begins_RL = np.diff(document_RL, axis=1, prepend=-2) != 0
    return (column_RL - np.maximum.accumulate(np.where(begins_RL, column_RL, 0), axis=1)).reshape(document_MST.shape)


def _line_at(place: _Place) -> bytes:
    with place.path.open("rb") as file:
        file.seek(place.start)
        return file.readline()
