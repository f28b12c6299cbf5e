"""`tools.reproduce` on a tiny model: equal runs, one that differs by a bit, other runs' files, processes, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_jax.state
from ep_jax.fields import ConfigError
from tests.test_distributed import environment, finish, free_port
from tests.train.tiny_run import settings
from tools.reproduce import checksums, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """Arguments that name a text."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / "texts" / f"{number}.txt").write_text(f"text {number} is learnt " * 60)
    return arguments_of({"data.source": "text", "data.path": folder / "texts", "data.cache_dir": folder / "tokens"})


@pytest.fixture(scope="module")
def arguments(corpus, tmp_path_factory):
    run = tmp_path_factory.mktemp("reproduce") / "run"
    yield [*arguments_of(settings((1, 2, 4), model__num_layers=1)), *corpus, "--run_dir", str(run)]
    assert not run.exists()


def arguments_of(overrides) -> list[str]:
    return [word for name, value in overrides.items() for word in (f"--{name}", str(value))]


@pytest.fixture(autouse=True, scope="module")
def compiled_in_a_hurry():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def lines(capsys, first: str) -> list[str]:
    """The lines of the part that begins so, up to its verdict."""
    text = capsys.readouterr().out
    return text[text.index(first) :].split("\n\n")[0].splitlines()


def test_the_same_steps_have_the_same_bits(arguments, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["--steps", "2", "--out", str(out), *arguments]) == 0
    _, _, *steps, verdict = lines(capsys, "the same steps again")
    assert verdict == "the same bits in 2 steps"
    assert [line.split()[0] for line in steps] == ["1", "2"]
    assert all("none of" in line for line in steps)
    taken = json.loads(out.read_text())
    assert [f"{after['loss']:.6f}" for after in taken] == [line.split()[1] for line in steps]
    assert {"params/embedding", "router/bias"} <= taken[0]["checksums"].keys()
    assert taken[0]["checksums"]["params/embedding"] != taken[1]["checksums"]["params/embedding"]

    taken[1]["checksums"]["router/bias"] ^= 1
    out.write_text(json.dumps(taken))
    assert main(["--steps", "1", "--against", str(out), *arguments]) == 0  # no step more than both have
    capsys.readouterr()
    assert main(["--steps", "2", "--against", str(out), *arguments]) == 1
    text = capsys.readouterr().out
    assert "1 of" in text.splitlines()[-3]
    assert text.splitlines()[-3].endswith(": router/bias")
    assert text.count("not the same bits") == 1


def test_one_bit_of_the_embedding_is_seen_and_named(arguments, monkeypatch, capsys):
    original, calls = ep_jax.state.init_state, []

    def init_state(config, mesh):
        state = original(config, mesh)
        calls.append(None)
        if len(calls) == 2:
            embedding = state["params"]["embedding"]
            state["params"]["embedding"] = embedding.at[3, 0].set(jnp.nextafter(embedding[3, 0], 1.0))
        return state

    monkeypatch.setattr(ep_jax.state, "init_state", init_state)
    assert main(["--steps", "1", *arguments]) == 1
    _, _, step, verdict = lines(capsys, "the same steps again")
    assert verdict == "not the same bits in 1 step"
    assert step.endswith(": params/embedding")  # no text has a byte 3, so nothing follows from it


def test_two_processes_reproduce(corpus, tmp_path):
    """With Gloo's reduce-scatter they did not: the end of one part of a gradient lacked the other process's share."""
    port = free_port()
    command = [sys.executable, "-m", "tools.reproduce", "--config", "tiny", "--steps", "1", "--model.num_layers", "2"]
    command += [*corpus, "--run_dir", str(tmp_path / "run")]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(process_id, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process_id in range(2)
    ]
    (code, out, err), (other_code, other_out, _) = finish(processes)
    assert (code, other_code) == (0, 0), out + err
    assert "none of" in out
    assert "none of" not in other_out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_checksums_see_a_bit_and_a_place(dtype):
    host = np.random.default_rng(0).integers(0, 2, (5, 7, 3))
    flipped = host.copy()
    flipped[4, 6, 2] ^= 1
    arrays = (host, host[::-1], host.swapaxes(0, 1), flipped)
    assert len({int(checksums(jnp.asarray(array, dtype))) for array in arrays}) == 4


def test_checksums_tell_zeros_and_keys_apart():
    assert int(checksums(jnp.zeros(4))) != int(checksums(-jnp.zeros(4)))
    assert int(checksums(jax.random.key(0))) != int(checksums(jax.random.key(1)))


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        (["--steps", "0"], None, "--steps 0: allowed is an integer of at least 1"),
        (["--against", "FILE"], None, "cannot be read: No such file"),
        (["--against", "FILE"], "[]", "expected a file that --out wrote"),
        (["--against", "FILE"], '[{"loss": 1, "grad_norm": 2.0, "checksums": {}}]', "expected a file that --out wrote"),
        (
            ["--against", "FILE"],
            '[{"loss": 1.0, "grad_norm": 2.0, "checksums": [1]}]',
            "expected a file that --out wrote",
        ),
        (["--out", "FILE/x.json"], None, "cannot be written: there is no folder"),
        (["--against", "FILE"], '[{"loss": 1}]', "expected a file that --out wrote"),
        (["--against", "FILE"], "no JSON", "expected a file that --out wrote"),
    ],
)
def test_refusals(words, content, message, tmp_path):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        main([word.replace("FILE", str(path)) for word in words])
