"""Counts what was dropped: by stage, expert, source shard, place in the shard, column and document.

Letters: S source shards, T tokens of a shard, K choices, A assignments or tokens of a group, E experts, R packed rows
of a shard, C bins of columns, d documents of the group.

Valid assignments are counted once per group and layer, drops per policy: they are few, so all but finding them is
cheap. Plain NumPy in int64; fates come from `factors.py`.
"""

from typing import NamedTuple

import numpy as np

from ep_jax.ep.drops import DROPPED_BY_SENDER
from ep_jax.replay.resharding import Group

COLUMN_BINS = 16


class Where(NamedTuple):
    """Where a group's tokens are; the same for every layer and policy."""

    documents_d: np.ndarray  # their numbers, ascending
    document_A: np.ndarray  # int32 [S*T], index into documents_d, unspecified at padding
    rows: int  # R
    length: int  # L


class Counts(NamedTuple):
    """Counts of assignments, [...] = stages: sender and receiver drops, or valid ones alone."""

    expert: np.ndarray  # int64 [..., E]
    source: np.ndarray  # int64 [..., S]
    place: np.ndarray  # int64 [..., R], packed row of the shard
    column: np.ndarray  # int64 [..., C]
    document: np.ndarray  # int64 [..., d]
    weight: np.ndarray  # float64 [...], combine weight
    away: np.ndarray  # int64 [...], whose expert is on another shard than the sender


def locate(group: Group, length: int) -> Where:
    """Where the tokens of a group are; `length` is the columns of a packed row."""
    documents_d, document_A = np.unique(group.document_ST.reshape(-1), return_inverse=True)
    if documents_d[0] < 0:  # padding, which is never counted
        documents_d, document_A = documents_d[1:], np.maximum(document_A - 1, 0)
    return Where(documents_d, document_A.astype(np.int32), group.document_ST.shape[1] // length, length)


def count_valid(group: Group, layer: int, where: Where, num_experts: int, premix: int) -> Counts:
    """The valid assignments of one layer."""
    ids_STK, valid_ST = group.expert_ids_NSTK[layer], group.valid_ST
    every = np.flatnonzero(valid_ST)
    tokens = _by_token(every, valid_ST.shape, where)
    choices = ids_STK.shape[-1]
    ids_AK, weights_AK = ids_STK.reshape(-1, choices), group.weights_NSTK[layer].reshape(-1, choices)
    if every.size < valid_ST.size:
        ids_AK, weights_AK = ids_AK[every], weights_AK[every]
    sizes = _sizes(valid_ST.shape, where)
    home_AK = _home(num_experts, len(valid_ST))[ids_AK]
    source, place, column, document = (
        choices * np.bincount(index, minlength=size) for index, size in zip(tokens, sizes, strict=True)
    )
    return Counts(
        expert=np.bincount(ids_AK.reshape(-1), minlength=num_experts),
        source=source,
        place=place,
        column=column,
        document=document,
        weight=np.array(weights_AK.sum(dtype=np.float64)),
        away=np.array(np.count_nonzero(home_AK != _sender(every, valid_ST.shape, premix)[:, None])),
    )


def count_drops(fate_STK: np.ndarray, group: Group, layer: int, where: Where, num_experts: int, premix: int) -> Counts:
    """The drops of one layer under one policy, [2, ...]: senders' and receivers'."""
    fate_A = fate_STK.reshape(-1)
    at = np.flatnonzero((fate_A - DROPPED_BY_SENDER).view(np.uint8) < 2)
    stage, token = fate_A[at].astype(np.int64) - DROPPED_BY_SENDER, at // fate_STK.shape[2]
    expert = group.expert_ids_NSTK[layer].reshape(-1)[at]
    shape = group.valid_ST.shape
    indices = (expert, *_by_token(token, shape, where))
    sizes = (num_experts, *_sizes(shape, where))
    away = _home(num_experts, shape[0])[expert] != _sender(token, shape, premix)
    by_expert, source, place, column, document = (
        np.bincount(stage * size + index, minlength=2 * size).reshape(2, size)
        for index, size in zip(indices, sizes, strict=True)
    )
    return Counts(
        expert=by_expert,
        source=source,
        place=place,
        column=column,
        document=document,
        weight=np.bincount(stage, weights=group.weights_NSTK[layer].reshape(-1)[at], minlength=2),
        away=np.bincount(stage[away], minlength=2),
    )


def _by_token(token: np.ndarray, shape: tuple[int, ...], where: Where) -> tuple[np.ndarray, ...]:
    """Source shard, place, bin of columns and document of tokens numbered over the whole group."""
    row, column = token // where.length, token % where.length
    width = -(-where.length // COLUMN_BINS)
    return token // shape[1], row % where.rows, column // width, where.document_A[token]


def _sizes(shape: tuple[int, ...], where: Where) -> tuple[int, ...]:
    """How many there are of each that `_by_token` returns."""
    width = -(-where.length // COLUMN_BINS)
    return shape[0], where.rows, -(-where.length // width), len(where.documents_d)


def _home(num_experts: int, shards: int) -> np.ndarray:
    """int32 [E]: the shard of each expert."""
    return np.arange(num_experts, dtype=np.int32) // (num_experts // shards)


def _sender(token: np.ndarray, shape: tuple[int, ...], premix: int) -> np.ndarray:
    """The shard that sends a token's rows: its own, or the member of the pre-mix group that it was dealt to."""
    source, place = token // shape[1], token % shape[1]
    return source // premix * premix + place % premix if premix > 1 else source
