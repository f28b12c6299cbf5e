"""The baseline a language model must beat: a table of how often one token follows another.

P(y | x) = (count(x, y) + c * P(y)) / (count(x) + c) with c = PRIOR_WEIGHT, and the unigram P(y) = (count(y) + 1) /
(targets + V): a pair never seen falls back on how frequent y is, a token never seen keeps a small share. Counts are of
the training half's (input, target) pairs, BOS and EOS included. Only the pairs that occur are stored, so any
vocabulary works. Everything is float64.
"""

from collections.abc import Iterator

import numpy as np

from ep_jax.data.sequences import Sequences

PRIOR_WEIGHT = 1.0
CHUNK_TOKENS = 1 << 20


def bigram_cross_entropy(train: Sequences, held_out: Sequences) -> float:
    """Mean of -ln P(target | input) over the held-out pairs, in nats per target, for a table fitted on `train`."""
    vocab_size = train.store.manifest.tokenizer.vocab_size
    pairs, counts = pair_counts(train)
    of_input = np.bincount(pairs // vocab_size, weights=counts, minlength=vocab_size)
    of_target = np.bincount(pairs % vocab_size, weights=counts, minlength=vocab_size)
    unigram = (of_target + 1.0) / (of_target.sum() + vocab_size)

    held_pairs, held_counts = pair_counts(held_out)
    at = np.minimum(np.searchsorted(pairs, held_pairs), len(pairs) - 1)
    seen = np.where(pairs[at] == held_pairs, counts[at], 0)
    inputs, targets = np.divmod(held_pairs, vocab_size)
    probability = (seen + PRIOR_WEIGHT * unigram[targets]) / (of_input[inputs] + PRIOR_WEIGHT)
    return float(-(held_counts * np.log(probability)).sum() / held_counts.sum())


def pair_counts(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """The different (input, target) pairs as sorted int64 keys input * V + target, and how often each occurs."""
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for chunk in _pair_chunks(sequences):
        keys, inverse = np.unique(np.concatenate([keys, chunk[0]]), return_inverse=True)
        weights = np.concatenate([counts, chunk[1]])
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, inverse, weights)
    return keys, counts


def _pair_chunks(sequences: Sequences) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys and counts of about a million pairs at a time."""
    tokenizer, lengths = sequences.store.manifest.tokenizer, sequences.store.lengths
    keys: list[np.ndarray] = []
    num_keys = 0
    for document in sequences.documents.tolist():
        tokens = sequences.store.read(document, 0, int(lengths[document]))
        stream = np.concatenate([[tokenizer.bos], tokens, [tokenizer.eos]]).astype(np.int64)
        keys.append(stream[:-1] * tokenizer.vocab_size + stream[1:])
        num_keys += len(keys[-1])
        if num_keys >= CHUNK_TOKENS:
            yield np.unique(np.concatenate(keys), return_counts=True)
            keys, num_keys = [], 0
    if keys:
        yield np.unique(np.concatenate(keys), return_counts=True)
