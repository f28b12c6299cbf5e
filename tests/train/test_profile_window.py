"""`--profile.steps a:b` in a training run: a trace with the steps of the window, counted from this run's first step."""

import pytest

from ep_jax import exits
from ep_jax.profiling import STEP_NAME, read_trace, trace_files
from tests.train.tiny_run import train_here


def traced_steps(folder):
    """Numbers of the steps in the run's trace, read by jax.profiler.ProfileData."""
    events = [event for event in read_trace(folder / "profile", with_stats=True) if event.name == STEP_NAME]
    return {event.stats["step_num"] for event in events}


def test_a_window_gives_one_trace_of_its_steps(corpus, tmp_path):
    assert train_here(corpus, tmp_path, profile__steps="1:3").code == exits.DONE
    [file] = trace_files(tmp_path / "profile")
    assert file.stat().st_size > 10_000
    assert traced_steps(tmp_path) == {1, 2}


def test_a_window_counts_from_where_the_run_goes_on(corpus, half, copy_of):
    folder = copy_of(half)
    assert train_here(corpus, folder, profile__steps="1:3").code == exits.DONE
    assert traced_steps(folder) == {6, 7}


def test_a_window_outside_the_run_is_pointed_out(corpus, tmp_path):
    with pytest.warns(UserWarning, match=r"'10:12' means steps 10 to 11, this run has steps 0 to 9: no step is traced"):
        assert train_here(corpus, tmp_path, profile__steps="10:12").code == exits.DONE
    assert not (tmp_path / "profile").exists()


def test_off_leaves_no_folder(straight):
    assert not (straight[0] / "profile").exists()
