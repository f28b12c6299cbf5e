"""Metric rows, throughput, delayed reading, the progress line and the drop table.

pytest tests/test_metrics.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_jax.fields import ConfigError
from ep_jax.metrics import (
    METRICS,
    DelayedMetrics,
    LogConfig,
    StepClock,
    add_drops,
    drop_rates,
    drop_table,
    metrics_row,
    progress_line,
    short_number,
    short_time,
    total_drops,
)

ROW = dict.fromkeys(METRICS, 0.0) | {
    "step": 120,
    "loss": 3.21541,
    "tokens_per_second": 12_345.6,
    "step_ms": 250.0,
    "mfu": None,
    "mfu_kept": None,
    "drop_rate": 0.0241,
    "drop_rate_sender": 0.023,
    "drop_rate_receiver": 0.0011,
}


class Ticks:
    """A clock that is set by hand."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def ticking(clock, now, durations, tokens=100):
    for seconds in durations:
        now.seconds += seconds
        clock.tick(tokens)


def test_clock_leaves_out_compilation_and_is_not_moved_by_one_slow_step():
    now = Ticks()
    clock = StepClock(warmup_steps=2, now=now)
    ticking(clock, now, [60.0, 9.0])
    assert clock.step_seconds is None
    assert clock.tokens_per_second is None
    ticking(clock, now, [0.5, 0.5, 0.5, 30.0, 0.5])
    assert clock.step_seconds == 0.5
    assert clock.tokens_per_second == 200.0


def test_clock_leaves_out_pauses_and_forgets_steps_outside_its_window():
    now = Ticks()
    clock = StepClock(warmup_steps=1, window=3, now=now)
    ticking(clock, now, [60.0, 1.0, 1.0, 1.0])
    clock.pause()
    ticking(clock, now, [500.0, 2.0, 2.0], tokens=300)
    assert clock.step_seconds == 2.0
    assert clock.tokens_per_second == (100 + 300 + 300) / 3 / 2.0


def test_delayed_metrics_return_each_step_once_in_order_as_numpy():
    delayed = DelayedMetrics()
    step = jax.jit(lambda x: {"loss": x * 2.0, "counts": jnp.full((2, 3), x, jnp.int32)})
    seen = [delayed.push(number, step(jnp.float32(number))) for number in (1, 2, 3)]
    assert seen[0] is None
    seen.append(delayed.flush())
    assert delayed.flush() is None
    assert [number for number, _ in seen[1:]] == [1, 2, 3]
    assert [float(metrics["loss"]) for _, metrics in seen[1:]] == [2.0, 4.0, 6.0]
    assert type(seen[1][1]["counts"]) is np.ndarray


def test_delayed_metrics_never_read_the_step_just_launched():
    reads = []

    class Device:
        def __init__(self, name):
            self.name = name

        def __array__(self, dtype=None, copy=None):
            reads.append(self.name)
            return np.zeros(())

    delayed = DelayedMetrics()
    delayed.push(1, Device("first"))
    assert reads == []
    delayed.push(2, Device("second"))
    assert reads == ["first"]


def test_counts_near_the_int32_limit_do_not_wrap():
    counts_LPE = np.zeros((3, 3, 2), np.int32)
    counts_LPE[:, 0] = 2**31 - 1
    counts_LPE[:, 1] = 2**30
    counts_LPE[:, 2] = 2**29
    valid = 6 * (2**31 - 1)
    assert total_drops(counts_LPE).tolist() == [valid, 6 * 2**30, 6 * 2**29]
    assert total_drops(jnp.asarray(counts_LPE)).tolist() == [valid, 6 * 2**30, 6 * 2**29]
    twice = add_drops(add_drops(None, counts_LPE), counts_LPE)
    assert twice.dtype == np.int64
    assert total_drops(twice).tolist() == [2 * valid, 12 * 2**30, 12 * 2**29]
    assert drop_rates(counts_LPE)["drop_rate_sender"] == 6 * 2**30 / valid
    assert f"{2 * valid:,}" in drop_table(twice)


def test_rates_are_of_sums_and_keep_their_stage():
    counts_LPE = np.array([[[10, 0], [5, 0], [0, 0]], [[600, 390], [0, 10], [20, 0]]])
    assert drop_rates(counts_LPE) == {
        "drop_rate": 35 / 1000,  # the mean of the layers' rates would be 0.265
        "drop_rate_sender": 15 / 1000,
        "drop_rate_receiver": 20 / 1000,
    }
    assert set(drop_rates(np.zeros((2, 3, 4), np.int32)).values()) == {0.0}


def test_drop_table_names_layers_stages_and_the_worst_expert():
    counts_LPE = np.array([[[10, 0], [5, 0], [0, 0]], [[600, 390], [0, 39], [20, 0]]])
    lines = drop_table(counts_LPE).split("\n")
    assert len(lines) == 4
    assert " ".join(lines[0].split()) == "layer valid dropped % sender % receiver % worst expert %"
    assert lines[1].split() == ["0", "10", "50.000", "50.000", "0.000", "50.00", "(expert", "0)"]
    assert lines[2].split() == ["1", "990", "5.960", "3.939", "2.020", "10.00", "(expert", "1)"]
    assert lines[3].split() == ["all", "1,000", "6.400", "4.400", "2.000"]
    huge = np.full((1, 3, 384), 2**35, np.int64)
    assert max(map(len, drop_table(huge).split("\n"))) <= 80


def test_progress_line():
    assert progress_line(ROW, 400) == (
        "step 120/400   30%  loss 3.2154  drop 2.41% (2.30 send, 0.11 recv)  12.3k tok/s  MFU -  ETA 1m10s"
    )


def test_progress_line_fits_120_columns_in_long_runs_and_before_the_first_timing():
    widest = ROW | {"step": 999_999, "loss": 12345.678, "mfu": 1.0, "step_ms": 1e7, "tokens_per_second": 999_400_000.0}
    widest |= {"drop_rate": 1.0, "drop_rate_sender": 1.0, "drop_rate_receiver": 1.0}
    assert len(progress_line(widest, 1_000_000)) <= 120
    unknown = ROW | {"tokens_per_second": None, "step_ms": None}
    assert progress_line(unknown, 400).endswith("- tok/s  MFU -  ETA -")


def test_short_numbers_and_times():
    assert [short_number(n) for n in (0, 950, 1000, 12_345, 999_999, 4_560_000, 2.5e9)] == [
        "0",
        "950",
        "1k",
        "12.3k",
        "1M",
        "4.56M",
        "2.5G",
    ]
    assert [short_time(s) for s in (0.4, 59.7, 185, 7800, 356_400)] == ["0s", "1m00s", "3m05s", "2h10m", "4d03h"]


def test_rows_have_the_documented_names_first_and_lack_none():
    row = metrics_row(**ROW | {"z_loss": jnp.float32(0.5), "loss": np.float32("nan")})
    assert tuple(row) == (*METRICS, "z_loss")
    assert row["z_loss"] == 0.5
    assert row["loss"] is None
    with pytest.raises(ValueError, match="metrics row lacks loss, tokens"):
        metrics_row(**{name: 0 for name in METRICS if name not in ("loss", "tokens")})


def test_log_interval_must_be_positive():
    with pytest.raises(ConfigError, match=r"log\.every = 0: allowed is at least 1"):
        LogConfig(every=0)
