"""The trace command: folders whole or absent, balance by another count, refusals of one line.

Run: python -m pytest tests/tools/test_trace.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.ep import EPConfig
from ep_jax.ep.simulate import simulate
from ep_jax.exits import REFUSED
from ep_jax.fields import ConfigError
from ep_jax.traces import Trace, TraceHeader
from ep_jax.traces.synthetic import generate
from tools.trace import info, load_ratios, main

ROOT = Path(__file__).parents[2]
SMALL = ["--shards", "4", "--rows-per-shard", "4", "--sequence-length", "16"]
SMALL += ["--num-experts", "16", "--experts-per-token", "2"]


def test_synthetic_writes_what_generate_makes(tmp_path, capsys):
    out = tmp_path / "deep" / "trace"
    main(["synthetic", "document_skew", "--out", str(out), *SMALL, "--steps", "2", "--sigma", "2", "--seed", "9"])
    assert capsys.readouterr().out == f"{out}: 2 steps; look at it with: python -m tools.trace info {out}\n"
    shape = dict(shards=4, rows_per_shard=4, sequence_length=16, num_experts=16, experts_per_token=2)
    for found, wanted in zip(Trace(out), generate("document_skew", **shape, steps=2, sigma=2.0, seed=9), strict=True):
        np.testing.assert_array_equal(found.expert_ids_NMSTK, wanted.expert_ids_NMSTK)
        np.testing.assert_array_equal(found.weights_NMSTK, wanted.weights_NMSTK)
        assert found.header == wanted.header


def test_import_of_both_formats(tmp_path, capsys):
    lines = [
        {"step": 5, "layer": layer, "rank": rank, "topk_indices": [[0, 2], [3, 1], [rank, 2], [layer, 3]]}
        for layer in (0, 1)
        for rank in (0, 1)
    ]
    files = [tmp_path / "rank0.jsonl", tmp_path / "rank1.jsonl"]
    for rank, file in enumerate(files):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines if line["rank"] == rank))
    out = tmp_path / "lines"
    arguments = ["--num-experts", "4", "--sequence-length", "2", "--ep", "1", "--out", str(out)]
    main(["import", "--format", "megatron", *map(str, files), *arguments])
    [step] = Trace(out)
    # Token order sbh: rows of the tokens 0, 2 and 1, 3.
    assert step.expert_ids_NMSTK[1, 0, 1].tolist() == [[0, 2], [1, 2], [3, 1], [1, 3]]
    assert step.header.ep == 1

    histogram = tmp_path / "counts.json"
    histogram.write_text(
        json.dumps({"num_experts": 4, "experts_per_token": 2, "tokens_per_shard": 8, "counts": [[8, 6, 8, 10]]})
    )
    main(["import", "--format", "histogram", str(histogram), "--out", str(tmp_path / "h"), "--steps", "3"])
    for step in Trace(tmp_path / "h"):
        assert np.bincount(step.expert_ids_NMSTK.reshape(-1)).tolist() == [8, 6, 8, 10]
    capsys.readouterr()
    main(["info", str(tmp_path / "h")])
    out = capsys.readouterr().out
    assert "order unknown: only counts are real" in out
    assert "steps: 3, from 1 to 3" in out


def test_info_fits_a_terminal_and_is_right(tmp_path, capsys):
    out = tmp_path / "trace"
    options = ["--num-layers", "2", "--steps", "2", "--padding-fraction", "0.25", "--documents-per-shard", "3"]
    main(["synthetic", "global_skew", "--out", str(out), *SMALL, *options])
    lines = info(Trace(out))
    capsys.readouterr()
    main(["info", str(out)])
    assert capsys.readouterr().out == "\n".join(lines) + "\n"
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    size = sum(path.stat().st_size for path in out.iterdir())
    assignments = 2 * 2 * 4 * 48 * 2  # steps, layers, shards, valid tokens, choices
    assert f"{assignments:,} assignments in {size:,} bytes: {size / assignments:.2f} bytes an assignment" in text
    for part in ("synthetic global_skew sigma 1.47 seed 0", "2 layers of 16 experts, top-2", "padding: 25.00%"):
        assert part in text
    assert "documents of a shard and microbatch: 3.0 on average, 3 to 3" in text
    for layer in range(2):
        worst = [expected_ratios(step, layer) for step in Trace(out)]
        [row] = [line.split() for line in lines if line.split()[:1] == [str(layer)] and len(line.split()) == 7]
        for column in range(3):
            values = [ratios[column] for ratios in worst]
            assert float(row[1 + 2 * column]) == pytest.approx(np.mean(values), abs=0.00051)
            assert max(values) <= float(row[2 + 2 * column]) < max(values) + 0.001  # rounded up


def expected_ratios(step, layer) -> tuple[float, float, float]:
    """Largest load over mean load of experts, destinations and pairs, one assignment at a time; ep = all shards."""
    shards, experts = step.header.ep, step.header.num_experts
    expert, destination, pair = np.zeros(experts), np.zeros(shards), np.zeros((shards, shards))
    for s, t in zip(*np.nonzero(step.valid_MST[0]), strict=True):
        for g in step.expert_ids_NMSTK[layer, 0, s, t]:
            expert[g] += 1
            destination[g // (experts // shards)] += 1
            pair[s, g // (experts // shards)] += 1
    pairs = max(max(row) / row.mean() for row in pair)
    return expert.max() / expert.mean(), destination.max() / destination.mean(), pairs


def test_ratios_are_factors_that_drop_nothing():
    """The worst pair and the worst expert as factors: nothing drops; a little less: something does, at that stage."""
    [step] = generate(
        "document_skew", shards=4, rows_per_shard=4, sequence_length=32, num_experts=16, experts_per_token=2
    )
    ids_STK, valid_ST = step.expert_ids_NMSTK[0, 0], step.valid_MST[0]
    [[expert, _, pair]] = load_ratios(ids_STK, valid_ST, step.header)

    def drops(sender, receiver):
        settings = EPConfig(sender_factor=sender, receiver_factor=receiver)
        arrays = (ids_STK.astype(np.int32), step.weights_NMSTK[0, 0], valid_ST)
        fate = np.asarray(simulate(*map(jnp.asarray, arrays), num_experts=16, sequence_length=32, settings=settings))
        return (fate == 1).sum(), (fate == 2).sum()

    up = [float(np.ceil(ratio * 1000) / 1000) for ratio in (pair, expert)]
    down = [round(0.97 * ratio, 3) for ratio in up]
    assert drops(*up) == (0, 0)
    assert drops(down[0], up[1])[0] > 0
    assert drops(up[0], down[1])[1] > 0


def test_ratios_where_there_is_nothing_to_divide():
    ids_STK = np.array([[[0], [1]], [[0], [0]]])
    header = TraceHeader(num_experts=3, sequence_length=2, ep=2, source="")
    [ratios] = load_ratios(ids_STK, np.ones((2, 2), bool), header)
    assert ratios[0] == 3 * 3 / 4
    assert np.isnan(ratios[1:]).all()  # 3 experts on 2 shards
    header = TraceHeader(num_experts=2, sequence_length=2, ep=1, source="")
    ratios_G3 = load_ratios(ids_STK, np.array([[True, True], [False, False]]), header)
    np.testing.assert_array_equal(ratios_G3, [[1, 1, 1], [np.nan, np.nan, np.nan]])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: info|import|synthetic"),
        (["show"], "invalid choice: 'show'"),
        (["info", "missing"], "missing: found no trace"),
        (["synthetic", "skew", "--out", "x"], "invalid choice: 'skew' .choose from 'balanced', 'uniform'"),
        (["synthetic", "uniform"], "the following arguments are required: --out"),
        (["synthetic", "uniform", "--out", "new", "--shards", "0"], "shards = 0: allowed is at least 1"),
        (["synthetic", "uniform", "--out", "new", "--shards", "x"], "argument --shards: invalid int value: 'x'"),
        (["import", "x.json", "--out", "new"], "the following arguments are required: --format"),
        (["import", "x", "--format", "megatron", "--out", "new"], "--num-experts: is missing"),
        (
            ["import", "x", "--format", "megatron", "--out", "new", "--num-experts", "8"],
            "--sequence-length: is missing",
        ),
        (
            ["import", "x", "y", "--format", "histogram", "--out", "new"],
            "y: allowed is one file with --format histogram",
        ),
        (["import", "x", "--format", "histogram", "--out", "new"], "x: cannot be read: No such file or directory"),
        (["synthetic", "uniform", "--out", "old"], "--out old: exists already and is not overwritten"),
        (["synthetic", "uniform", "--out", "file/new", *SMALL], "--out file/new: Not a directory"),
    ],
)
def test_refusals_leave_nothing(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message) as error:
        main(argv)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "old"]


def test_an_interrupted_import_leaves_nothing(tmp_path, monkeypatch):
    """Damage that comes to light after the first step was written."""
    steps = generate(
        "uniform", shards=2, rows_per_shard=1, sequence_length=8, num_experts=4, experts_per_token=2, steps=2
    )

    def interrupted(*_, **__):
        yield next(steps)
        raise ConfigError("the second step is damaged")

    monkeypatch.setattr("tools.trace.generate", interrupted)
    with pytest.raises(ConfigError, match="the second step is damaged"):
        main(["synthetic", "uniform", "--out", str(tmp_path / "new")])
    assert not list(tmp_path.iterdir())


def test_command_starts_no_backend_and_refuses_on_one_line(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}  # any use of a device would fail

    def command(*argv):
        return subprocess.run(
            [sys.executable, "-m", "tools.trace", *argv],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    made = command("synthetic", "uniform", "--out", str(tmp_path / "new"), *SMALL)
    assert (made.returncode, made.stderr) == (0, "")
    refused = command("info", str(tmp_path / "old"))
    assert (refused.returncode, refused.stdout) == (REFUSED, "")
    assert refused.stderr.startswith(f"refused: {tmp_path}/old: found no trace; allowed is a folder of step_")
    assert refused.stderr.count("\n") == 1
