"""`python -m ep_jax.evaluate`: the numbers of the end of training again, on any mesh, from any checkpoint."""

import json

import numpy as np
import pytest

from ep_jax import exits
from ep_jax.evaluate import EVALUATION_FILE
from ep_jax.fields import ConfigError
from tests.train.tiny_run import contents, evaluate_here, evaluations_of, finish, start_process, summary_of

NUMBERS = ("held_out_dropless", "held_out_as_trained", "held_out_bigram_cross_entropy")


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


def test_shows_both_losses_and_the_drop_rate(straight, copy_of):
    folder = copy_of(straight[0])
    lines = evaluate_here(folder).out.splitlines()
    assert lines[0] == f"{folder / 'checkpoints' / '10'} on mesh replica 1 x fsdp 2 x ep 4"
    numbers = evaluation_of(folder)
    [free] = [line for line in lines if line.startswith("  dropless")]
    [policy] = [line for line in lines if line.startswith("  pooled_wave as trained")]
    assert free.split()[-1] == f"{numbers['held_out_dropless']['cross_entropy']:.4f}"
    assert f"{numbers['held_out_as_trained']['cross_entropy']:.4f}" in policy
    assert f"{100 * numbers['held_out_as_trained']['drop_rate']:.2f} % dropped" in policy
    assert any(line.startswith("  bigram table") for line in lines)


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
    from ep_jax import evaluate

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
