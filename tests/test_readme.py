"""The README's library example runs as printed, and the paths it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_library_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(compile(code, "README.md", "exec"), {})
    found = re.fullmatch(
        r"(\d+\.\d\d)% dropped: (\d+) by senders, (\d+) by receivers of (\d+)\n", capsys.readouterr().out
    )
    assert found, "the example prints its drops"
    rate, sender, receiver, valid = found.groups()
    assert int(valid) == 1024 * 2
    assert float(rate) == round(100 * (int(sender) + int(receiver)) / int(valid), 2)


def test_files_of_the_tree_exist():
    tree = README.split("## The tree")[1].split("```")[1]
    names = re.findall(r"(?:^|\s)([\w/]+(?:\.py|\.md|/))(?=\s)", tree)
    assert len(names) > 20
    for name in names:
        assert any((ROOT / folder / name).exists() for folder in ("", "ep_jax", "ep_jax/ep", "configs", "tools")), name
