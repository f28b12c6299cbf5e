"""`python -m ep_jax.evaluate`: the numbers of the end of training again, on any mesh, from any checkpoint; what drops
cost on shuffled rows and on rows in document order, and by layer.

Letters: B rows of a batch, or batches.
"""

import json

import numpy as np
import pytest

from ep_jax import evaluate, exits
from ep_jax.config import CONFIG_FILE, load
from ep_jax.data import open_dataset
from ep_jax.data.batches import held_out_rows
from ep_jax.evaluate import EVALUATION_FILE
from ep_jax.evaluation import Evaluator, per_target
from ep_jax.fields import ConfigError
from tests.train.tiny_run import (
    config_of,
    contents,
    evaluate_here,
    evaluations_of,
    finish,
    mesh_of,
    saved,
    start_process,
    summary_of,
)

NUMBERS = ("held_out_dropless", "held_out_as_trained", "held_out_bigram_cross_entropy")


@pytest.fixture(scope="module")
def held_out(straight):
    config = config_of(straight[0])
    return open_dataset(config.data, vocab_size=config.model.vocab_size).held_out


def evaluation_of(folder):
    return json.loads((folder / EVALUATION_FILE).read_text())


def test_equals_the_end_of_training_and_changes_nothing_else(straight, copy_of):
    folder = copy_of(straight[0])
    before = contents(folder)
    ended = evaluate_here(folder)
    assert ended.code == exits.DONE
    after = contents(folder)
    after.pop(EVALUATION_FILE)
    assert after == before
    summary, evaluation = summary_of(folder), evaluation_of(folder)
    assert evaluation["step"] == 10
    assert {name: evaluation[name] for name in NUMBERS} == {name: summary[name] for name in NUMBERS}
    assert evaluation["held_out_as_trained"]["drop_rate"] > evaluation["held_out_dropless"]["drop_rate"] == 0


def test_shows_losses_cost_and_drops_of_both_orders_side_by_side(straight, copy_of):
    folder = copy_of(straight[0])
    lines = evaluate_here(folder, "--train.eval_sequences", "24").out.splitlines()
    assert lines[0] == f"{folder / 'checkpoints' / '10'} on mesh replica 1 x fsdp 2 x ep 4"
    assert lines[1].startswith("protocol: pooled_wave, sender_factor 1.15")
    numbers = evaluation_of(folder)
    for title, name in (("  shuffled rows", "held_out"), ("  rows in document order", "document_order")):
        [line] = [line for line in lines if line.startswith(title)]
        free, policy, cost = (numbers[f"{name}_{what}"] for what in ("dropless", "as_trained", "cost"))
        assert free["drop_rate"] == 0 < policy["drop_rate"]
        assert line.removeprefix(title).split() == [
            f"{free['cross_entropy']:.4f}",
            f"{policy['cross_entropy']:.4f}",
            f"{cost['nats']:.5f}",
            "±",
            f"{cost['standard_error_nats']:.5f}",
            *(f"{100 * policy[f'drop_rate{stage}']:.2f}" for stage in ("", "_sender", "_receiver")),
            f"{free['valid_targets']}",
        ]
        np.testing.assert_allclose(cost["nats"], policy["cross_entropy"] - free["cross_entropy"], atol=1e-12)
        assert free["valid_targets"] == policy["valid_targets"] <= 24 * 16
    assert numbers["held_out_dropless"] != numbers["document_order_dropless"]
    assert any("over 3 batches" in line for line in lines)
    assert any(line.startswith("  bigram table") for line in lines)


def test_one_batch_gives_no_standard_error(straight, copy_of):
    folder = copy_of(straight[0])
    out = evaluate_here(folder, "--train.eval_sequences", "8").out
    assert evaluation_of(folder)["held_out_cost"]["standard_error_nats"] is None
    assert "± ?" in out
    assert out.count("may be noise") == 2


def test_both_evaluations_of_a_pair_see_the_rows_of_their_order(straight, held_out):
    config = load(str(straight[0] / CONFIG_FILE), [("train.eval_sequences", "24")])
    state, _ = saved(straight[0], 10)
    evaluator = Evaluator(config, mesh_of(config), held_out)
    for order in ("shuffled", "document"):
        rows = [held_out_rows(held_out, index, 8, 24, order) for index in range(3)]
        wanted_B = [held_out.batch(rows_B).valid.sum() for rows_B in rows]
        for evaluation in evaluator.paired(state["params"], state["router"]["bias"], order):
            np.testing.assert_array_equal(evaluation.targets_B, wanted_B)
            np.testing.assert_array_equal(evaluation.counts_NPE[:, 0].sum(1), 2 * sum(wanted_B))


def test_standard_error_is_that_of_resampled_batches():
    rng = np.random.default_rng(0)
    targets_B = rng.integers(10, 100, 100)
    nats_B = 0.3 * targets_B + rng.normal(0, 4, 100)
    found = per_target(nats_B, targets_B)
    picks = rng.integers(0, 100, (4000, 100))
    resampled = nats_B[picks].sum(1) / targets_B[picks].sum(1)
    np.testing.assert_allclose(found.nats, nats_B.sum() / targets_B.sum())
    np.testing.assert_allclose(found.standard_error_nats, resampled.std(), rtol=0.05)
    equal = per_target(nats_B, np.full(100, 7))
    np.testing.assert_allclose(equal.standard_error_nats, (nats_B / 7).std(ddof=1) / 10)


@pytest.mark.parametrize("batches", [2, 3, 6, 40])
def test_five_of_a_hundred_costs_of_nothing_are_taken_for_more_than_noise(batches):
    nats = np.random.default_rng(0).normal(0, 1, (4000, batches))
    alarms = np.mean([not per_target(nats_B, np.full(batches, 10)).is_noise for nats_B in nats])
    assert 0.03 < alarms < 0.06
    assert not per_target(1000 + nats[0], np.full(batches, 10)).is_noise


def by_document(sequences):
    """Rank of every row among all by (document, place) of its first token, looked up token by token."""
    first = [
        tuple(int(array[0, 0]) for array in sequences.origins(np.array([row]))) for row in range(sequences.num_rows)
    ]
    return {row: rank for rank, row in enumerate(sorted(range(sequences.num_rows), key=first.__getitem__))}


@pytest.mark.parametrize("num_rows", [0, 16, 20, 41])
def test_document_order_takes_runs_of_neighbours_spread_over_all_rows(held_out, num_rows):
    rank = by_document(held_out)
    wanted = num_rows or held_out.num_rows
    batches = [held_out_rows(held_out, index, 8, num_rows, "document") for index in range(-(-wanted // 8))]
    rows_B = np.concatenate(batches)
    assert (rows_B[wanted:] == -1).all()
    assert len(set(rows_B[:wanted].tolist())) == wanted <= held_out.num_rows
    starts = []
    for rows in batches:
        ranks = [rank[row] for row in rows.tolist() if row >= 0]
        assert np.all(np.diff(ranks) == 1)
        starts.append(ranks[0])
    assert starts[0] == 0
    distance = 8 * held_out.num_rows / wanted
    np.testing.assert_allclose(np.diff(starts), distance, atol=1)
    assert starts[-1] + distance >= held_out.num_rows - 1


def test_a_batch_in_document_order_holds_few_documents(held_out):
    def documents(order):
        batches = [held_out_rows(held_out, index, 8, 32, order) for index in range(4)]
        return np.mean([len(np.unique(held_out.origins(rows)[0])) for rows in batches])

    assert documents("document") < 0.6 * documents("shuffled")


def test_attributes_the_cost_to_layers(straight, copy_of, tmp_path):
    folder = copy_of(straight[0])
    ended = evaluate_here(
        folder,
        "--attribute",
        "--figure",
        tmp_path / "cost.png",
        "--ep.sender_factor",
        "1.0",
        "--train.eval_sequences",
        "16",
    )
    assert ended.code == exits.DONE
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    numbers = evaluation_of(folder)
    assert list(numbers["cost_by_layer"]) == ["shuffled", "document"]
    for order, name in (("shuffled", "held_out"), ("document", "document_order")):
        found, cost = numbers["cost_by_layer"][order], numbers[f"{name}_cost"]
        assert found["cost"] == cost
        first, second = found["layers"]
        # Of two layers, sparing one is dropping in the other alone.
        for one, other in ((first, second), (second, first)):
            np.testing.assert_allclose(
                one["saved_alone"]["nats"], cost["nats"] - other["lost_alone"]["nats"], atol=1e-6
            )
        alone = first["lost_alone"]["nats"] + second["lost_alone"]["nats"]
        np.testing.assert_allclose(found["sum_alone"]["nats"], alone, atol=1e-9)
        np.testing.assert_allclose(found["interaction"]["nats"], cost["nats"] - alone, atol=1e-6)
        assert first["drop_rate"] > 0
        assert second["drop_rate"] > 0
    assert ended.out.count("cost of drops by layer on") == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--attribute", "--ep.transport", "dense"], "--attribute: ep.transport = 'dense' drops nothing"),
        (["--attribute=yes"], "--attribute = 'yes': takes no value; allowed is --attribute"),
        (["--figure", "cost.png"], "--figure cost.png: shows what --attribute finds"),
        (["--attribute", "--figure", "cost.bmp"], r"--figure cost.bmp: allowed .* \.pdf, \.png, \.svg"),
        (["--attribute", "--figure", "nowhere/cost.png"], "--figure nowhere/cost.png: allowed is a file in a folder"),
    ],
)
def test_an_attribution_that_cannot_be_made_is_refused_before_the_work(straight, copy_of, monkeypatch, argv, message):
    folder = copy_of(straight[0])
    before = contents(folder)
    monkeypatch.setattr("ep_jax.launch.start", lambda config: pytest.fail("work has begun"))
    with pytest.raises(ConfigError, match=message):
        evaluate_here(folder, *argv)
    assert contents(folder) == before


def test_help_shows_the_flag(capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["--help"])
    out = capsys.readouterr().out
    assert "[--attribute]" in out
    assert "[--figure FILE]" in out


def test_on_another_mesh(straight, copy_of):
    folder = copy_of(straight[0])
    assert evaluate_here(folder, "--mesh.fsdp", "1", "--mesh.ep", "8").code == exits.DONE
    wanted = summary_of(folder)["held_out_dropless"]
    got = evaluation_of(folder)["held_out_dropless"]
    np.testing.assert_allclose(got["cross_entropy"], wanted["cross_entropy"], rtol=1e-5)
    assert got["valid_targets"] == wanted["valid_targets"]


def test_an_earlier_step_gives_the_loss_of_that_step(straight, copy_of):
    folder = copy_of(straight[0])
    [during_training] = evaluations_of(folder)
    assert evaluate_here(folder, "--step", "5").code == exits.DONE
    evaluation = evaluation_of(folder)
    assert evaluation["step"] == during_training["step"] == 5
    assert evaluation["held_out_as_trained"]["cross_entropy"] == during_training["cross_entropy"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--run: missing"),
        (["--run", "."], "found no config.toml there; allowed is the folder of a run"),
        (["--runs", "."], "did you mean --run"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        evaluate.main(argv)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_checkpoint_or_that_step_is_refused(straight, copy_of):
    folder = copy_of(straight[0])
    with pytest.raises(ConfigError, match=r"checkpoints/7.*: no such path .*holds 5, 10"):
        evaluate_here(folder, "--step", "7")
    (folder / "checkpoints").rename(folder / "elsewhere")
    with pytest.raises(ConfigError, match="checkpoint"):
        evaluate_here(folder)


def test_other_documents_are_pointed_out(straight, copy_of):
    """A held-out loss on other documents is not the run's."""
    folder = copy_of(straight[0])
    ended = evaluate_here(folder, "--data.held_out_fraction", "0.3")
    assert ended.code == exits.DONE
    assert "WARNING" in ended.out
    assert "other held-out" in ended.out or "another data" in ended.out


def test_a_process_evaluates_from_any_folder(straight, copy_of, tmp_path, cached):
    folder = copy_of(straight[0])
    (tmp_path / "cwd").mkdir()
    run = start_process("--run", folder, module="ep_jax.evaluate", cwd=tmp_path / "cwd", **cached)
    refused = start_process("--run", tmp_path / "cwd", module="ep_jax.evaluate", cwd=tmp_path)
    ended, refusal = finish(run, refused)
    assert ended.code == exits.DONE, ended.err
    wanted = summary_of(folder)["held_out_dropless"]["cross_entropy"]
    np.testing.assert_allclose(evaluation_of(folder)["held_out_dropless"]["cross_entropy"], wanted, rtol=1e-5)
    assert refusal.code == exits.REFUSED
    assert len(refusal.err.splitlines()) == 1
