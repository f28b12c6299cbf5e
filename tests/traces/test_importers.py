"""Imported routing: every number of the lines at its place in the trace, counts of histograms exact, faults refused.

Run: python -m pytest tests/traces/test_importers.py
"""

import json

import numpy as np
import pytest

from ep_jax.traces import Trace, TraceError, write_step
from ep_jax.traces.histogram import read_histogram
from ep_jax.traces.megatron import MegatronModel, read_megatron

EXPERTS, CHOICES, LENGTH, ROWS = 300, 3, 4, 2
TOKENS = LENGTH * ROWS
STEPS, LAYERS, RANKS, MICROBATCHES = (10, 20), (3, 5, 6), (0, 1), (0, 1)
MODEL = MegatronModel(num_experts=EXPERTS, sequence_length=LENGTH)


def make_lines(*, optional=("probs", "valid", "document", "position"), seed=0) -> list[dict]:
    """A line for each key, shuffled; tokens in Megatron's order: column outside, sequence inside."""
    rng = np.random.default_rng(seed)
    lines = []
    for step in STEPS:
        for rank in RANKS:
            for microbatch in MICROBATCHES:
                valid = rng.random(TOKENS) < 0.8
                document = rng.integers(1000, size=ROWS)  # one a row
                start = rng.integers(50, size=ROWS)
                token = {
                    "valid": valid.tolist(),
                    "document": [int(document[b]) for _ in range(LENGTH) for b in range(ROWS)],
                    "position": [int(start[b]) + column for column in range(LENGTH) for b in range(ROWS)],
                }
                for layer in LAYERS:
                    ids = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)])
                    ids[~valid] = -1
                    line = {"step": step, "layer": layer, "rank": rank, "microbatch": microbatch}
                    line |= {"topk_indices": ids.tolist(), "probs": rng.random((TOKENS, CHOICES)).tolist()} | token
                    lines.append(
                        {name: line[name] for name in line if name not in token | {"probs": 0} or name in optional}
                    )
    rng.shuffle(lines)
    return lines


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def refused(tmp_path, lines, message, model=MODEL):
    path = write_lines(tmp_path / "rank0.jsonl", lines)
    with pytest.raises(TraceError, match=message) as error:
        read_megatron([path], model)  # before a step is asked for
    assert "\n" not in str(error.value)


# --- JSON lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_every_number_is_at_its_place(tmp_path, order):
    """Two files with the lines of both ranks mixed; read back from a written trace, compared token by token."""
    lines = make_lines()
    if order == "bsh":  # the same tokens, row after row
        for line in lines:
            for name in ("topk_indices", "probs", "valid", "document", "position"):
                line[name] = [line[name][column * ROWS + b] for b in range(ROWS) for column in range(LENGTH)]
    half = len(lines) // 2
    paths = [write_lines(tmp_path / f"{i}.jsonl", part) for i, part in enumerate((lines[:half], lines[half:]))]
    for step in read_megatron(paths, MegatronModel(num_experts=EXPERTS, sequence_length=LENGTH, token_order=order)):
        write_step(tmp_path / "trace", step)
    trace = Trace(tmp_path / "trace")
    assert (trace.header.num_experts, trace.header.sequence_length, trace.header.ep) == (EXPERTS, LENGTH, 2)
    assert trace.header.order_known
    assert trace.header.source == f"Megatron-style 0.jsonl, 1.jsonl; token order {order}"
    assert trace.steps == list(STEPS)
    found = {step.step: step for step in trace}
    seen = 0
    for line in lines:
        step, n, m, s = found[line["step"]], LAYERS.index(line["layer"]), line["microbatch"], line["rank"]
        for b in range(ROWS):
            for column in range(LENGTH):
                t, theirs = b * LENGTH + column, column * ROWS + b if order == "sbh" else b * LENGTH + column
                assert step.valid_MST[m, s, t] == line["valid"][theirs]
                if not line["valid"][theirs]:
                    assert (step.document_MST[m, s, t], step.position_MST[m, s, t]) == (-1, -1)
                    assert step.expert_ids_NMSTK[n, m, s, t].tolist() == [0, 1, 2]
                    assert not step.weights_NMSTK[n, m, s, t].any()
                    continue
                seen += 1
                assert step.expert_ids_NMSTK[n, m, s, t].tolist() == line["topk_indices"][theirs]
                assert step.weights_NMSTK[n, m, s, t].tolist() == np.float32(line["probs"][theirs]).tolist()
                assert step.document_MST[m, s, t] == line["document"][theirs]
                assert step.position_MST[m, s, t] == line["position"][theirs]
    assert seen == sum(step.num_assignments for step in trace) // CHOICES > 0


def test_what_is_left_out_gets_stated_defaults(tmp_path):
    lines = make_lines(optional=())
    for line in lines:
        ids = np.arange(TOKENS * CHOICES).reshape(TOKENS, CHOICES)
        line |= {"topk_indices": ids.tolist(), "loss": 1.5, "host": "a"}
    steps = list(read_megatron([write_lines(tmp_path / "x.jsonl", lines)], MODEL))
    assert steps[0].header.source == (
        "Megatron-style x.jsonl; token order sbh; no probs: weights are 1/K; no valid: all tokens count; "
        "no document: each row is one; no position: counted within the row; ignored host, loss"
    )
    for index, step in enumerate(steps):
        assert (step.weights_NMSTK == np.float32(1 / CHOICES)).all()
        assert step.valid_MST.all()
        rows = step.document_MST.reshape(-1, LENGTH)
        assert (rows == index * len(rows) + np.arange(len(rows))[:, None]).all()  # each row another one, in every step
        assert (step.position_MST.reshape(-1, LENGTH) == np.arange(LENGTH)).all()


def test_positions_are_counted_within_the_documents_of_a_row(tmp_path):
    document = [7, 7, 9, 9, 9, 9, 4, 4]
    line = {"step": 0, "layer": 0, "rank": 0, "topk_indices": [[0]] * TOKENS, "document": document}
    model = MegatronModel(num_experts=2, sequence_length=LENGTH, token_order="bsh")
    [step] = read_megatron([write_lines(tmp_path / "x.jsonl", [line])], model)
    assert step.position_MST.tolist() == [[[0, 1, 0, 1, 0, 1, 0, 1]]]
    assert step.document_MST.tolist() == [[document]]


def test_microbatch_may_be_left_out_and_lines_blank(tmp_path):
    lines = [line for line in make_lines() if not line.pop("microbatch")]
    path = tmp_path / "x.jsonl"
    path.write_text("\n \n".join(json.dumps(line) for line in lines))
    assert [step.expert_ids_NMSTK.shape for step in read_megatron([path], MODEL)] == [(3, 1, 2, TOKENS, CHOICES)] * 2


def test_ep_groups(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", make_lines())
    [step, _] = read_megatron([path], MegatronModel(num_experts=EXPERTS, sequence_length=LENGTH, ep=1))
    assert step.header.ep == 1
    with pytest.raises(TraceError, match="ep = 4: allowed is a divisor of 2, the ranks in x.jsonl"):
        read_megatron([path], MegatronModel(num_experts=EXPERTS, sequence_length=LENGTH, ep=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": None}, "step is missing; allowed is an integer from 0"),
        ({"layer": "3"}, "layer = '3'; allowed is an integer"),
        ({"rank": True}, "rank = True; allowed is an integer"),
        ({"microbatch": -1}, "microbatch = -1; allowed is an integer from 0"),
        ({"topk_indices": None}, "topk_indices is missing; allowed are lists of equally long lists of integers"),
        ({"topk_indices": [[0, 1, 2]] * 7}, "topk_indices: found 7 tokens; allowed is a multiple of 4"),
        ({"topk_indices": [[0, 1, 2]] * 7 + [[0, 1]]}, "topk_indices: found lists of different lengths"),
        ({"topk_indices": [[0.5, 1, 2]] * 8}, r"topk_indices: found \[8, 3\] of float64; allowed"),
        ({"topk_indices": [[0, 1]] * 8}, "probs: found shape .8, 3.; allowed is .8, 2., as in topk_indices"),
        ({"topk_indices": [[0, 1, 300]] * 8}, r"topk_indices\[\d\] = \[0, 1, 300\]; .*integers from 0 to 299"),
        ({"topk_indices": [[4, 1, 4]] * 8}, r"topk_indices\[\d\] = \[4, 1, 4\]; allowed are distinct"),
        ({"probs": [[0.1, 0.2, "x"]] * 8}, "probs: found .8, 3. of .*; allowed are lists of equally long"),
        ({"probs": [[0.1, 0.2, float("nan")]] * 8}, "probs: found another number; .*finite float32 numbers"),
        ({"probs": [[0.1, 0.2, 1e39]] * 8}, "probs: found another number; .*finite float32 numbers"),
        ({"valid": [2] * 8}, "valid: found another number; allowed is a list of true/false or 1/0"),
        ({"valid": [True] * 4}, "valid: found shape .4.; allowed is .8., as in topk_indices"),
        ({"valid": [True] * 8, "topk_indices": [[0, 1, 2]] * 8, "document": [-1] * 8}, "document: found -1"),
        ({"document": None}, "found topk_indices .8, 3. with probs, valid, position; allowed is the same in"),
        ({"position": [40] * 8, "valid": [1] * 8, "topk_indices": [[0, 1, 2]] * 8}, "position: found 40, then 40 in"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(tmp_path, change, message):
    lines = make_lines()
    lines[1] = {name: value for name, value in (lines[1] | change).items() if value is not None}
    refused(tmp_path, lines, f"^{tmp_path}/rank0.jsonl, line 2: {message}")


def test_lines_that_are_no_objects(tmp_path):
    path = tmp_path / "x.jsonl"
    for text, message in (("[1]", "found a list; allowed is a JSON object"), ("{", "allowed is a JSON object; ")):
        path.write_text(text)
        with pytest.raises(TraceError, match=f"{path}, line 1: {message}"):
            read_megatron([path], MODEL)
    path.write_text("\n")
    with pytest.raises(TraceError, match="x.jsonl: found no line"):
        read_megatron([path], MODEL)
    with pytest.raises(TraceError, match="missing.jsonl: cannot be read: No such file"):
        read_megatron([tmp_path / "missing.jsonl"], MODEL)


def test_each_key_exactly_once(tmp_path):
    lines = make_lines()
    first = ", ".join(f"{name} {lines[0][name]}" for name in ("step", "layer", "rank", "microbatch"))
    refused(
        tmp_path, [*lines, lines[0]], f"line 25: {first} is already in {tmp_path}/rank0.jsonl, line 1; allowed is once"
    )
    refused(tmp_path, lines[1:], f"rank0.jsonl: {first} is missing; allowed is each exactly once")
    only_late = [line for line in lines if line["rank"] == 1]
    refused(tmp_path, only_late, "rank0.jsonl: rank 0 is missing; allowed is every one from 0 to 1")
    only_late = [line for line in lines if line["microbatch"] == 1]
    refused(tmp_path, only_late, "rank0.jsonl: microbatch 0 is missing; allowed is every one from 0 to 1")


def test_layers_must_have_the_same_tokens(tmp_path):
    lines = make_lines()
    lines[20]["document"] = [document + 1 for document in lines[20]["document"]]
    refused(
        tmp_path, lines, r"line \d+: valid, document, position: found others than in .*line \d+; allowed are the same"
    )


def test_a_wrong_token_order_is_noticed_by_positions(tmp_path):
    lines = make_lines()
    for line in lines:
        line |= {"valid": [1] * TOKENS, "topk_indices": [[0, 1, 2]] * TOKENS, "document": [5] * TOKENS}
    model = MegatronModel(num_experts=EXPERTS, sequence_length=LENGTH, token_order="bsh")
    refused(tmp_path, lines, "line 1: position: found .*of token order bsh.; allowed is to count up by 1", model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_order": "tbh"}, "token_order = 'tbh': allowed is one of sbh, bsh"),
        ({"num_experts": 0}, "num_experts = 0: allowed is 1 to 65536"),
        ({"sequence_length": -4}, "sequence_length = -4: allowed is 1 to"),
        ({"ep": 0}, "ep = 0: allowed is 1 to"),
    ],
)
def test_the_model_is_checked(change, message):
    with pytest.raises(TraceError, match=message):
        MegatronModel(**({"num_experts": 8, "sequence_length": 4} | change))


# --- histogram --------------------------------------------------------------------------------------------------------


def skewed_counts(rng, experts, choices, tokens) -> np.ndarray:
    """Counts that some routing has: of real choices, with one expert in nearly all tokens and one in none."""
    popularity = np.exp(rng.standard_normal(experts))
    popularity[:2] = 1e6, 1e-9
    scores = np.log(popularity) + rng.gumbel(size=(tokens, experts))
    return np.bincount(np.argsort(-scores, axis=1)[:, :choices].reshape(-1), minlength=experts)


def write_histogram(path, counts, tokens, choices=4, **more):
    fields = {"num_experts": int(np.shape(counts)[-1]), "experts_per_token": choices, "tokens_per_shard": tokens}
    path.write_text(json.dumps(fields | {"counts": np.asarray(counts).tolist()} | more))
    return path


def counted(ids, experts):
    return np.bincount(ids.reshape(-1), minlength=experts)


@pytest.mark.parametrize("tokens", [64, 63])
def test_counts_of_shards_are_exact_and_ids_distinct(tmp_path, tokens):
    rng = np.random.default_rng(0)
    counts = np.array([[skewed_counts(rng, 20, 4, tokens) for _ in range(3)] for _ in range(2)])
    path = write_histogram(tmp_path / "h.json", counts, tokens)
    first, second = read_histogram(path, steps=2, seed=3)
    for step in (first, second):
        assert step.expert_ids_NMSTK.shape == (2, 1, 3, tokens, 4)
        for layer in range(2):
            for shard in range(3):
                ids_TK = step.expert_ids_NMSTK[layer, 0, shard]
                assert counted(ids_TK, 20).tolist() == counts[layer, shard].tolist()
                assert all(len(set(token)) == 4 for token in ids_TK.tolist())
        assert (step.weights_NMSTK == 0.25).all()
    assert (first.header.order_known, first.header.ep, first.header.sequence_length) == (False, 3, tokens)
    assert first.header.source == "histogram h.json seed 3; order, documents and which experts meet are random"
    assert (first.expert_ids_NMSTK != second.expert_ids_NMSTK).any()
    again = list(read_histogram(path, steps=2, seed=3))
    np.testing.assert_array_equal(again[1].expert_ids_NMSTK, second.expert_ids_NMSTK)
    assert not set(first.document_MST.flat) & set(second.document_MST.flat)


def test_counts_over_all_shards_are_dealt_out(tmp_path):
    counts = [skewed_counts(np.random.default_rng(layer), 20, 4, 256) for layer in range(2)]
    [step] = read_histogram(write_histogram(tmp_path / "h.json", counts, 64), sequence_length=16)
    assert step.expert_ids_NMSTK.shape == (2, 1, 4, 64, 4)
    for layer in range(2):
        assert counted(step.expert_ids_NMSTK[layer], 20).tolist() == counts[layer].tolist()
    shards = np.array([counted(ids_TK, 20) for ids_TK in step.expert_ids_NMSTK[0, 0]])
    assert (shards != shards[0]).any()
    expected = counts[0] / 4
    assert (np.abs(shards - expected) < 6 * np.sqrt(expected + 1)).all()
    assert (step.position_MST[0, 0] == np.arange(64) % 16).all()
    assert len(set(step.document_MST.flat)) == 4 * 4


def test_experts_meet_as_if_drawn_independently(tmp_path):
    """Pairs of experts in a token: as spread around their mean as those of independent draws with the same counts."""
    experts, tokens, choices = 32, 2048, 4
    [step] = read_histogram(
        write_histogram(tmp_path / "h.json", [[[tokens * choices // experts] * experts]], tokens, choices)
    )
    ids_TK = step.expert_ids_NMSTK[0, 0, 0]
    member_TE = np.zeros((tokens, experts))
    member_TE[np.arange(tokens)[:, None], ids_TK] = 1
    pairs = (member_TE.T @ member_TE)[np.triu_indices(experts, 1)]
    expected = tokens * choices * (choices - 1) / (experts * (experts - 1))
    assert pairs.mean() == pytest.approx(expected)
    assert 0.7 < ((pairs - expected) ** 2).mean() / expected < 1.3  # 128 without the exchanges
    # Neither the place in a token nor the place among tokens says anything about the expert.
    quarter_4E = member_TE.reshape(4, -1, experts).sum(axis=1)
    place_KE = np.array([counted(column_T, experts) for column_T in ids_TK.T])
    for counts in (quarter_4E, place_KE):
        mean = tokens * choices / experts / 4
        assert 0.4 < ((counts - mean) ** 2).mean() / mean < 1.2


def test_a_histogram_with_no_freedom(tmp_path):
    """Every token must choose every expert; and one token alone."""
    [step] = read_histogram(write_histogram(tmp_path / "h.json", [[[8, 8, 8]]], 8, 3))
    assert (np.sort(step.expert_ids_NMSTK, axis=-1) == np.arange(3)).all()
    [step] = read_histogram(write_histogram(tmp_path / "h.json", [[[0, 1, 1]]], 1, 2))
    assert sorted(step.expert_ids_NMSTK.reshape(-1).tolist()) == [1, 2]


def test_order_is_random_whatever_can_be_exchanged(tmp_path, monkeypatch):
    """Experts that every token has can never be exchanged; and exchanges are not what shuffles tokens."""
    [step] = read_histogram(write_histogram(tmp_path / "h.json", [[[64, 64, 0]]], 64, 2))
    places = (step.expert_ids_NMSTK[0, 0, 0] == 0).sum(axis=0)
    assert places.sum() == 64
    assert places.min() > 16
    monkeypatch.setattr("ep_jax.traces.histogram.SWAPS_PER_ASSIGNMENT", 0)
    [step] = read_histogram(write_histogram(tmp_path / "h.json", [[[32, 32]]], 64, 1))
    assert 16 < np.count_nonzero(np.diff(step.expert_ids_NMSTK[0, 0, 0, :, 0].astype(int))) < 48


@pytest.mark.parametrize(
    ("counts", "more", "message"),
    [
        ([[[9, 3, 4]]], {}, r"counts\[0, 0, 0\] = 9; allowed is 0 to 8, the tokens"),
        ([[[-1, 8, 9]]], {}, r"counts\[0, 0, 0\] = -1; allowed is 0 to 8"),
        ([[[5, 5, 6], [5, 5, 5]]], {}, r"counts\[0, 1\] sums to 15; allowed is 16 \(tokens_per_shard x"),
        ([[10, 10, 11]], {}, r"counts\[0\] sums to 31; allowed is a multiple of 16, the same in all layers"),
        ([[10, 10, 12], [5, 5, 6]], {}, r"counts\[1\] sums to 16; allowed is a multiple of 16, the same in"),
        ([[0, 0, 0]], {}, r"counts\[0\] sums to 0; allowed is a multiple of 16"),
        ([[17, 7, 8]], {}, r"counts\[0, 0\] = 17; allowed is 0 to 16"),
        ([[5, 5, 6]], {"num_experts": 4}, "counts: found 3 experts; allowed is num_experts = 4"),
        ([[5, 5, 6]], {"experts_per_token": 5}, "experts_per_token = 5; allowed is 1 to 3"),
        ([[5, 5, 6]], {"tokens_per_shard": 0}, "tokens_per_shard = 0; allowed is an integer from 1"),
        ([[5, 5, 6.5]], {}, r"counts: found \[1, 3\] of float64; allowed are lists of equally long lists of integers"),
        ([5, 5, 6], {}, r"counts: found \[3\] of int64; allowed are lists of equally long lists of integers"),
        ([[5, 5, 6]], {"count": 1}, "count is unknown; allowed are exactly num_experts, experts_per_token"),
    ],
)
def test_impossible_histograms(tmp_path, counts, more, message):
    path = write_histogram(tmp_path / "h.json", counts, 8, 2, **more)
    with pytest.raises(TraceError, match=f"^{path}: {message}"):
        read_histogram(path)


def test_histogram_files_and_arguments(tmp_path):
    path = write_histogram(tmp_path / "h.json", [[5, 5, 6]], 8, 2)
    for arguments, message in (
        ({"sequence_length": 3}, "sequence_length = 3: allowed is a divisor of tokens_per_shard = 8"),
        ({"steps": 0}, "steps = 0: allowed is at least 1"),
        ({"seed": -1}, "seed = -1: allowed is at least 0"),
    ):
        with pytest.raises(TraceError, match=message):
            read_histogram(path, **arguments)
    path.write_text(json.dumps({"num_experts": 3}))
    with pytest.raises(TraceError, match="h.json: counts is missing; allowed are exactly"):
        read_histogram(path)
    path.write_text("{'counts'")
    with pytest.raises(TraceError, match="h.json: allowed is a JSON object"):
        read_histogram(path)
    with pytest.raises(TraceError, match="none.json: cannot be read"):
        read_histogram(tmp_path / "none.json")
