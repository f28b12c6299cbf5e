"""Reading drops: profile, rates, fairness, alarm, files and figure.

Run: python -m pytest tests/test_drop_report.py
"""

import numpy as np
import pytest

from ep_jax import drop_report
from ep_jax.ep.drops import profile


@pytest.fixture
def drops():
    """Two layers, three experts, two source shards, two rows, four bins; layer 1 loses most, and row 1 pays."""
    counts_NPE = np.array([[[40, 30, 30], [0, 0, 0], [0, 3, 0]], [[20, 50, 30], [10, 0, 5], [0, 5, 2]]], np.int32)
    source_counts_NDP = np.array([[[50, 0, 1], [50, 0, 2]], [[50, 10, 3], [50, 5, 4]]], np.int32)
    profile_NPRC = np.zeros((2, 3, 2, 4), np.int32)
    profile_NPRC[:, 0] = 25
    profile_NPRC[1, 1, 1] = [1, 2, 4, 8]
    profile_NPRC[:, 2, 1, 3] = [3, 7]
    return dict(counts_NPE=counts_NPE, source_counts_NDP=source_counts_NDP, profile_NPRC=profile_NPRC)


def test_profile_counts_every_fate_once():
    rng = np.random.default_rng(0)
    fate_TK = rng.integers(0, 4, size=(3 * 10, 2)).astype(np.int8)
    found = np.asarray(profile(fate_TK, 10, 4))
    by_row = fate_TK.reshape(3, 10, 2)
    assert found.shape == (3, 3, 4)
    assert found.dtype == np.int32
    for bin, columns in enumerate((slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10))):
        part = by_row[:, columns]
        np.testing.assert_array_equal(found[0, :, bin], (part != 3).sum(axis=(1, 2)))
        np.testing.assert_array_equal(found[1, :, bin], (part == 1).sum(axis=(1, 2)))
        np.testing.assert_array_equal(found[2, :, bin], (part == 2).sum(axis=(1, 2)))


def test_fairness_is_jains_index():
    assert drop_report.fairness(np.array([0.1, 0.1, 0.1])) == pytest.approx(1)
    assert drop_report.fairness(np.array([0.3, 0, 0])) == pytest.approx(1 / 3)
    assert drop_report.fairness(np.zeros(5)) == 1


def test_scalars_name_the_worst_and_stay_few(drops):
    found = drop_report.scalars(drops)
    assert len(found) == 9
    assert found["drop_worst_layer"] == pytest.approx(22 / 100)
    assert found["drop_worst_expert"] == pytest.approx(10 / 20)
    assert found["drop_worst_source"] == pytest.approx((1 + 13) / 100)
    assert found["drop_worst_row"] == pytest.approx(25 / 200)
    assert found["drop_worst_column"] == pytest.approx((8 + 10) / 100)
    assert found["drop_fairness_row"] == pytest.approx(1 / 2)
    assert set(drop_report.scalars({name: np.zeros_like(array) for name, array in drops.items()})) == set(found)


def test_alarm_names_stage_layer_and_expert(drops):
    message = drop_report.alarm(7, drops["counts_NPE"], 0.1)
    assert message == (
        "WARNING: step 7: 12.50 % of assignments dropped, alarm above 10 %; mostly at the sender; "
        "worst layer 1 22.00 %, its worst expert 0 50.00 %; ep.sender_factor is the setting"
    )
    assert drop_report.alarm(7, drops["counts_NPE"], 0.125) is None
    assert drop_report.alarm(7, drops["counts_NPE"], 0) is None


def test_counts_near_the_int32_limit_do_not_wrap(drops):
    counts_NPE = np.full((2, 3, 3), 2**30, np.int32)
    assert drop_report.rates(np.moveaxis(counts_NPE, 1, 0).sum(axis=(1, 2), dtype=np.int64)) == pytest.approx(2)
    assert "200.00 %" in drop_report.alarm(1, counts_NPE, 0.5)


def test_files_load_and_draw(drops, tmp_path):
    (tmp_path / "arrays").mkdir()
    for step in (1, 10):
        np.savez(tmp_path / "arrays" / f"step_{step:08d}.npz", **drops)
    by_step = drop_report.load(tmp_path)
    assert list(by_step) == [1, 10]
    figure = drop_report.draw(by_step)
    titled = {axis.get_title() for axis in figure.axes}
    assert {"dropped by stage", "by layer", "by source shard", "by place in the shard"} <= titled
    assert all(axis.get_xlabel() and axis.get_ylabel() for axis in figure.axes if axis.get_title())
    heights = [patch.get_height() for axis in figure.axes if axis.get_title() == "by layer" for patch in axis.patches]
    assert heights == pytest.approx([0, 15, 3, 7])  # % of layer 0, 1: sender, then receiver
    figure.savefig(tmp_path / "drops.png")
    with pytest.raises(FileNotFoundError, match="is it a run folder"):
        drop_report.load(tmp_path / "nothing")
