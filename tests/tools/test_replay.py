"""The command tools/replay: one question answered, files whole, refusals in one line before anything is written.

Run: python -m pytest tests/tools/test_replay.py
"""

import csv
import dataclasses
import importlib

import numpy as np
import pandas
import pytest

from ep_jax import exits
from ep_jax.ep import EPConfig
from ep_jax.fields import ConfigError
from ep_jax.replay.check import replayed_counts
from ep_jax.replay.results import COLUMNS
from ep_jax.traces.file import write_step
from tests.replay.replay_cases import make_step
from tools.replay import _rate, main

POLICY = EPConfig(sender_factor=1.1, receiver_factor=1.2, waves=2, order="sequence")
STEPS = 4


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A trace with the counts of its run; returns its folder."""
    folder = tmp_path_factory.mktemp("run") / "trace"
    for number in range(1, STEPS + 1):
        step = make_step(number)
        header = dataclasses.replace(step.header, policy=dataclasses.asdict(POLICY))
        step = dataclasses.replace(step, header=header, counts_NPE=replayed_counts(step, POLICY))
        write_step(folder, step)
    return folder


def run(*words):
    return main([str(word) for word in words])


def refusal(*words):
    """The message of a command line that is refused."""
    with pytest.raises(ConfigError) as error:
        run(*words)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_question_of_a_new_user(trace, capsys, tmp_path):
    """No option but shards and target: a table, a recommendation for each family, and what was assumed."""
    figure = tmp_path / "replay.png"
    assert run(trace, "--shards", 8, "--target", "5%", "--figure", figure) == exits.DONE
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 120
    assert "a test; 4 steps of 32 packed rows x 8 tokens, 2 layers, 16 experts, top-3" in out
    assert "assumes 2 packed rows per shard (as recorded)" in out
    assert sum(line.startswith("pooled_wave sequence expert 2 waves ") for line in lines) == 3 + 1
    for policy in ("pooled_wave sequence expert 2 waves", "fixed_cell sequence 2 waves", "ragged round_robin 2 waves"):
        [start] = [place for place, line in enumerate(lines) if line.startswith(f"{policy} at EP8: ")]
        said = " ".join(lines[start : start + 3])
        assert "drops under 5.00 % (" in said
        assert "95 % interval" in said
        assert "per GPU and layer forward" in said
    assert figure.stat().st_size > 50_000


def test_a_grid_in_every_scope(trace, tmp_path, capsys):
    """The CSV has every pair of factors, and each scope adds up to the whole."""
    table = tmp_path / "out.csv"
    words = ["--policies", "pooled_wave", "--order", "position,weight", "--sender", "1,1.3", "--receiver", "1.1,1.4"]
    words += ["--premix", 2]
    assert run(trace, *words, "--shards", "4,8", "--csv", table) == exits.DONE
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    policies = {(row["order"], row["shards"], row["sender_factor"], row["receiver_factor"]) for row in rows}
    assert len(policies) == 2 * 2 * 2 * 2
    assert {row["waves"] for row in rows} == {"2"}  # as recorded
    for policy in policies:
        mine = [r for r in rows if (r["order"], r["shards"], r["sender_factor"], r["receiver_factor"]) == policy]
        sums = {}
        for row in mine:
            counts = np.array([int(row[name]) for name in ("valid", "dropped_sender", "dropped_receiver")])
            sums[row["scope"]] = sums.get(row["scope"], 0) + counts
        assert set(sums) == {"all", "layer", "expert", "source", "place", "column", "document"}
        assert all(counts.tolist() == sums["all"].tolist() for counts in sums.values())
        [whole] = [row for row in mine if row["scope"] == "all"]
        assert float(whole["drop_rate"]) == (sums["all"][1] + sums["all"][2]) / sums["all"][0]
        assert float(whole["drop_rate_low"]) <= float(whole["drop_rate"]) <= float(whole["drop_rate_high"])
    out = capsys.readouterr().out
    assert "pooled_wave weight expert 2 waves pre-mix 2 " in out
    assert max(map(len, out.splitlines())) <= 120


def test_parquet_has_the_rows_of_the_csv(trace, tmp_path, monkeypatch):
    """pyarrow is no dependency of the tests, so the frame is caught where it would be written."""
    frames = []
    monkeypatch.setattr("tools.replay.check_parquet", lambda: None)
    monkeypatch.setattr("ep_jax.replay.results.check_parquet", lambda: None)
    monkeypatch.setattr(pandas.DataFrame, "to_parquet", lambda frame, path, index: frames.append((frame, path, index)))
    table, parquet = tmp_path / "out.csv", tmp_path / "out.parquet"
    words = ["--policies", "ragged,fixed_cell", "--sender", 1.1, "--receiver", 1.1]
    run(trace, *words, "--csv", table, "--parquet", parquet)
    [(frame, path, index)] = frames
    assert (path, index) == (parquet, False)
    assert tuple(frame.columns) == COLUMNS
    assert all(frame[name].dtype == "Int64" for name in ("waves", "premix", "layer", "index"))
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(frame) == len(rows)
    assert frame["valid"].tolist() == [int(row["valid"]) for row in rows]
    assert frame["sender_factor"].isna().tolist() == [row["sender_factor"] == "" for row in rows]


def test_the_recorded_policy_drops_what_the_run_counted(trace, tmp_path):
    table = tmp_path / "out.csv"
    run(trace, "--policies", "pooled_wave", "--sender", 1.1, "--csv", table)  # the receiver factor is as recorded
    counted = sum(make_step_counts(trace)).sum(axis=(0, 2))
    with table.open() as file:
        [whole] = [row for row in csv.DictReader(file) if row["scope"] == "all"]
    assert [int(whole[name]) for name in ("valid", "dropped_sender", "dropped_receiver")] == counted.tolist()


def make_step_counts(trace):
    files = sorted(trace.glob("step_*.npz"))
    assert len(files) == STEPS
    return [np.load(file)["counts"] for file in files]


def test_check_agrees_or_says_where_not(trace, tmp_path, capsys):
    assert run(trace, "--check") == exits.DONE
    assert "agrees to the unit" in capsys.readouterr().out
    wrong = make_step(1)
    counts_NPE = replayed_counts(wrong, POLICY)
    counts_NPE[0, 1, 3] += 1
    header = dataclasses.replace(wrong.header, policy=dataclasses.asdict(POLICY))
    write_step(tmp_path, dataclasses.replace(wrong, header=header, counts_NPE=counts_NPE))
    assert run(trace, tmp_path, "--check") == exits.DIFFERS
    assert "DIFFERS: step 1, layer 0, expert 3, sender" in capsys.readouterr().out


def test_the_shipped_trace_drops_what_its_run_counted(pytestconfig, capsys):
    assert main([str(pytestconfig.rootpath / "experiments" / "traces" / "tiny"), "--check"]) == exits.DONE
    assert "agrees to the unit" in capsys.readouterr().out


def test_a_trace_without_order_is_approximate(tmp_path, capsys):
    step = make_step()
    write_step(tmp_path, dataclasses.replace(step, header=dataclasses.replace(step.header, order_known=False)))
    assert run(tmp_path, "--policies", "ragged", "--receiver", 1.5) == exits.DONE
    out = capsys.readouterr().out
    assert "WARNING: the trace has counts but no order" in out
    assert "one step, so no interval" in out or "no factors tried" in out


def test_refusals(trace, tmp_path, monkeypatch):
    other = tmp_path / "other"
    step = make_step(ep=8)
    write_step(other, step)
    assert refusal(trace, other).startswith(f"{other}: found 16 experts, packed rows of 8 and ep 8: expected those of ")
    assert "--check: needs a trace with the policy" in refusal(other, "--check")
    assert refusal(trace, "--check", "--shards", 8, "--order", "weight").endswith("beside it: --order, --shards")
    assert "whole numbers, at least 0" in refusal(trace, "--seed", "-1")
    assert "found no trace" in refusal(tmp_path / "nowhere")
    assert "--shards 3: the trace has 16 experts" in refusal(trace, "--shards", 3)
    assert "record at least 8 steps" in refusal(trace, "--shards", 16, "--rows", 16)
    assert "argument --policies: 'dense': allowed are pooled_wave," in refusal(trace, "--policies", "dense")
    assert "nearest weight" in refusal(trace, "--order", "wieght")
    assert "numbers above 0" in refusal(trace, "--sender", "1.1,-2")
    assert "numbers separated by commas" in refusal(trace, "--sender", "1.1;2")
    assert "0% to below 100%" in refusal(trace, "--target", "120%")
    assert "0% to below 100%" in refusal(trace, "--target", "low")
    assert "whole numbers, at least 1" in refusal(trace, "--rows", "many")
    assert "--premix 3: must divide" in refusal(trace, "--premix", 3)
    assert "cannot be written" in refusal(trace, "--csv", tmp_path / "no" / "x.csv")
    assert "there is no folder" in refusal(trace, "--figure", tmp_path / "no" / "x.png")
    assert "allowed are names in .png, .pdf, .svg" in refusal(trace, "--figure", tmp_path / "x.doc")
    monkeypatch.setattr(importlib, "import_module", _not_installed)
    assert (
        refusal(trace, "--parquet", tmp_path / "x.parquet") == "--parquet: needs the package pandas; --csv needs none"
    )
    assert refusal(trace, "--figure", tmp_path / "x.png") == "--figure: needs the package matplotlib"
    assert not list(tmp_path.glob("x.*"))


def _not_installed(name):
    raise ImportError(name)


def test_target_texts():
    assert [_rate(text) for text in ("0.5%", "0.005", "5e-3", "0")] == [0.005, 0.005, 0.005, 0]
