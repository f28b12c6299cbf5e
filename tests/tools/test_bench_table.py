"""The table of layer results: newest rows, fastest first, written between two comments of the README."""

import json

import pytest

from ep_jax.fields import ConfigError
from tools.bench.table import main, table, with_table


def result(ms: float, **changes):
    times = {"median_ms": ms, "p10_ms": ms - 0.1, "p90_ms": ms + 0.25}
    row = {"shape": "A", "routing": "uniform", "variant": "pooled_wave", "forward": times, "forward_backward": times}
    return row | {"limit_ms": {"forward": 5.0, "both": 10.0}, "drop_rate": 0.0123} | changes


def write(path, date, *rows, used=2):
    devices = {"device_kind": "NVIDIA H200", "devices": 8, "used_devices": used}
    path.write_text(json.dumps({"date": date, "devices": devices, "results": rows}))
    return path


def test_the_newest_result_counts_and_the_fastest_comes_first(tmp_path):
    files = [
        write(tmp_path / "a.json", "2026-12-02 08:00", result(15.0), result(20.0, variant="slow")),
        write(tmp_path / "b.json", "2026-12-01", result(14.0), {"shape": "A", "parts": 1, "forward_backward": {}}),
        write(tmp_path / "c.json", "2026-12-02 08:00", result(13.0, routing="skewed"), result(30.0), used=4),
    ]
    lines = table(files).splitlines()[2:]
    assert [line.split(" | ")[1:4] for line in lines] == [
        ["skewed", "pooled_wave", "4 x NVIDIA H200"],
        ["uniform", "pooled_wave", "2 x NVIDIA H200"],
        ["uniform", "slow", "2 x NVIDIA H200"],
        ["uniform", "pooled_wave", "4 x NVIDIA H200"],
    ]
    assert lines[1].endswith("| 15.00 | 15.00 (14.90-15.25) | 10.0 (1.50) | - | - | - | 1.23 | - | - |")


def test_what_a_result_says_is_in_the_table(tmp_path):
    achieved = {"both": {"tflops": 612.4, "off_device_gb_per_s": 41.7}}
    row = result(12.0, achieved=achieved, peak_gib=4.26, stock_ratio=21.04)
    row["forward_backward_after_pauses"] = {"median_ms": 11.256}
    line = table([write(tmp_path / "a.json", "2026-12-01", row)]).splitlines()[-1]
    assert line.endswith("| 12.00 | 12.00 (11.90-12.25) | 10.0 (1.20) | 11.26 | 612 | 42 | 1.23 | 4.3 | 21.0 |")


def test_the_readme_keeps_what_is_around_the_table(tmp_path, capsys):
    write(tmp_path / "layer_a.json", "2026-12-01", result(12.0))
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench table: layer_*.json -->\nold\n<!-- bench table end -->\nafter\n")
    assert main(["--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench table: layer_*.json -->\n\n| shape |")
    assert text.endswith("|\n\n<!-- bench table end -->\nafter\n")
    assert "old" not in text
    assert with_table(readme) == text
    assert main([str(tmp_path / "layer_a.json")]) == 0
    assert capsys.readouterr().out.strip() in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no comment", "expected <!-- bench table: PATTERNS -->"),
        ("<!-- bench table: none_*.json -->\n<!-- bench table end -->", "no file matches none_"),
    ],
)
def test_a_readme_without_comment_or_files_is_refused(tmp_path, text, message):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(ConfigError, match=message):
        main(["--readme", str(readme)])
    with pytest.raises(ConfigError, match="expected result files, or --readme"):
        main([])


def test_the_readmes_table_is_what_the_command_makes(pytestconfig):
    readme = pytestconfig.rootpath / "README.md"
    assert with_table(readme) == readme.read_text(), "run: python -m tools.bench table --readme README.md"
