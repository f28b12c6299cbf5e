"""The command line: names refused with the nearest one (BL-69), help, a command's own options, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ep_jax import cli, config, exits
from ep_jax.fields import ConfigError

ROOT = Path(__file__).parents[1]


def parse(*argv: str) -> config.RunConfig:
    return cli.parse_args(argv, command="python -m ep_jax.train", description="Trains.")


def refusal(function, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def toml(tmp_path):
    """Writes a TOML file and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "given.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# Names (BL-69)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("learning_rat", "optimizer.learning_rate"),
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("optimzer.learning_rate", "optimizer.learning_rate"),
        ("train.lr", "optimizer.learning_rate"),
        ("train.learning_rate", "optimizer.learning_rate"),
        ("num-experts", "router.num_experts"),
        ("model.num_experts", "router.num_experts"),
        ("train.sequences-per-step", "train.sequences_per_step"),
        ("Train.steps", "train.steps"),
        ("rundir", "run_dir"),
        ("model.tie_embedings", "model.tie_embeddings"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(toml, key, nearest):
    *section, leaf = key.split(".")
    table = f"[{'.'.join(section)}]\n{leaf} = 5\n" if section else f"{leaf} = 5\n"
    for message in (refusal(parse, f"--{key}=5"), refusal(config.load, toml(table))):
        assert message.startswith(f"{key} = ")
        assert f"did you mean {nearest}?" in message


def test_an_unknown_section_is_refused_naming_the_sections_and_a_near_key(toml):
    message = refusal(config.load, toml("[moe]\ncapcity_factor = 1.25\n"))
    assert message.startswith("moe.capcity_factor = 1.25: no section moe (sections: train, mesh, data, ")
    assert message.endswith(("did you mean ep.sender_factor?", "did you mean ep.receiver_factor?"))
    assert "no such key" in refusal(config.load, toml("[moe]\n"))
    assert "no section train.more" in refusal(config.load, toml("[train.more]\nsteps = 5\n"))


def test_a_section_is_not_a_value(toml):
    for message in (refusal(parse, "--profile=5"), refusal(config.load, toml("profile = 5\n"))):
        assert "is a section; its keys are profile.steps" in message
    assert "is a section" in refusal(config.load, toml("[[train]]\nsteps = 5\n"))
    assert config.load(toml("[train]\n")) == config.RunConfig()


@pytest.mark.parametrize(
    "text",
    [
        "[train]\nsteps = 5\nsteps = 6\n",
        "[train]\nsteps = 5\n[train]\nseed = 6\n",
        "train.steps = 5\n[train]\nsteps = 6\n",
        "run_dir = 'a'\nrun_dir = 'b'\n",
    ],
)
def test_a_key_given_twice_in_a_file_is_refused_with_its_line(toml, text):
    message = refusal(config.load, toml(text))
    assert "given.toml" in message
    assert "given twice" in message
    number = int(message.split("line ")[1].split(",")[0])
    assert text.split("\n")[number - 1] in message


def test_a_quoted_dotted_key_is_not_a_second_way_to_give_a_key(toml):
    message = refusal(config.load, toml('"train.steps" = 5\n[train]\nsteps = 6\n'))
    assert message.startswith('"train.steps" = 5: no such key; did you mean train.steps?')


def test_an_option_given_twice_is_refused():
    assert refusal(parse, "--train.steps", "5", "--train.steps=6") == "train.steps = '6': already given as '5'; " + (
        "allowed is once"
    )
    assert "already given as 'tiny'" in refusal(parse, "--config", "tiny", "--config", "tiny")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["train.steps=5"], "'train.steps=5': not an option"),
        (["-train.steps", "5"], "'-train.steps': not an option"),
        (["--"], "'--': not an option"),
        (["--train.steps"], "--train.steps: has no value"),
        (["--train.steps", "--train.seed", "5"], "--train.steps: has no value"),
        (["--confg", "tiny"], "did you mean --config?"),
        (["--run_dir", ""], "run_dir = ''"),
        (["--resume", ""], "resume = ''"),
        (["--run_dir", "a\udcff"], "UTF-8"),
        (["--run_dir\n", "a"], "run_dir  = 'a': no such key; did you mean run_dir?"),
    ],
)
def test_a_malformed_command_line_is_refused(argv, part):
    assert part in refusal(parse, *argv)


# Help and commands


def test_help_shows_every_key_with_type_unit_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help", "--nonsense")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.split("\n")) <= 110
    flat = " ".join(text.split())
    for key in config.keys().values():
        assert f"--{key.name} " in flat
        assert " ".join(key.metadata["doc"].split()) in flat, key.name
        assert key.metadata["doc"].isprintable(), key.name  # one line: it is also a comment in the file
        assert key.metadata["doc"], key.name
    assert "--train.steps INTEGER optimizer steps of the whole run (steps; default 400; at least 1)" in flat
    assert "--ep.rescale true|false" in flat
    assert "one of pooled_wave, fixed_cell, ragged, rowwise, ring, dense" in flat


def test_a_command_may_have_options_of_its_own(capsys):
    extra = (cli.Option("run", "DIR", "the run folder to evaluate"),)

    def split(*argv):
        return cli.split_args(argv, command="evaluate", description="Evaluates.", extra=extra)

    arguments = split("--run", "runs/a", "--ep.transport=dense")
    assert arguments == cli.Arguments(None, (("ep.transport", "dense"),), {"run": "runs/a"})
    assert "already given as 'a'" in refusal(split, "--run=a", "--run=b")
    assert "did you mean train.steps" in refusal(split, "--train.stps=5")
    with pytest.raises(SystemExit):
        split("-h")
    assert "--run DIR" in capsys.readouterr().out
    assert "run = 'a'" in refusal(parse, "--run", "a")


def test_run_main_exits_with_the_code_of_the_command(capsys):
    for returned, code in ((None, exits.DONE), (exits.NON_FINITE, exits.NON_FINITE)):
        with pytest.raises(SystemExit) as stopped:
            exits.run_main(lambda argv, returned=returned: returned, [])
        assert stopped.value.code == code
    assert capsys.readouterr().err == ""


def test_output_that_nobody_reads_ends_a_command_without_a_traceback():
    code = "from ep_jax.exits import run_main; run_main(lambda argv: print('line\\n' * 100_000), [])"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.wait(60) == exits.READER_GONE
    assert process.stderr.read() == b""
    process.stderr.close()


ENTRY = """
import jax
from ep_jax.cli import parse_args
from ep_jax.exits import run_main

def main(argv):
    print(parse_args(argv, command="entry", description="An entry.").run_dir)
    jax.config.update("jax_num_cpu_devices", 3)  # raises once a backend has started

run_main(main)
"""


def run_entry(*argv: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", ENTRY, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_a_refused_command_prints_one_line_and_exits_with_2(tmp_path):
    refused = run_entry(f"--run_dir={tmp_path}/new", "--train.lr=1e-4")
    assert refused.returncode == exits.REFUSED == 2
    assert refused.stdout == ""
    assert refused.stderr == "refused: train.lr = '1e-4': no such key; did you mean optimizer.learning_rate?\n"
    assert not (tmp_path / "new").exists()


def test_an_accepted_command_line_starts_no_jax_backend():
    accepted = run_entry("--config=tiny")
    assert (accepted.returncode, accepted.stdout, accepted.stderr) == (0, "runs/tiny\n", "")
