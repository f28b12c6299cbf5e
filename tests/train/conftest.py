"""A folder of text, the runs that several tests look at, and a compilation cache: most of the time here is XLA's."""

import os

import jax
import numpy as np
import pytest

from tests.train import tiny_run
from tests.train.tiny_run import STRAIGHT, on_batch, terminate, train_here

CACHE_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.2,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """The folder of the compilation cache, which lets runs of one program compile it once."""
    return jax.config.jax_compilation_cache_dir or str(tmp_path_factory.mktemp("compile_cache"))


@pytest.fixture(scope="package", autouse=True)
def cached_compilation(compile_cache):
    """Uses the cache in this process while the tests of this folder run."""
    changed = CACHE_SETTINGS | {"jax_compilation_cache_dir": compile_cache}
    before = {name: getattr(jax.config, name) for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def cached(compile_cache):
    """Variables that let a process of its own use the cache; settings that steer the compiler are part of its keys."""
    variables = {name.upper(): str(value) for name, value in CACHE_SETTINGS.items()}
    return variables | {
        "JAX_COMPILATION_CACHE_DIR": compile_cache,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": os.environ["XLA_FLAGS"],
    }


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of 40 text files, about 500 rows of 16 tokens made of few words, so that a model can learn."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 7)))) for _ in range(30)]
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(" ".join(rng.choice(words, 50)))
    return folder


@pytest.fixture(scope="session")
def straight(corpus, tmp_path_factory):
    """The folder of a run of 10 steps without a stop, and how it ended: the yardstick of those that stop and go on."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    return folder, train_here(corpus, folder, **STRAIGHT)


@pytest.fixture(scope="session")
def half(corpus, tmp_path_factory):
    """The folder of the same run stopped by SIGTERM during step 5, where a save and an evaluation are due."""
    folder = tmp_path_factory.mktemp("runs") / "half"
    with pytest.MonkeyPatch.context() as patch:
        on_batch(patch, lambda done: done == 4 and terminate())
        ended = train_here(corpus, folder, **STRAIGHT)
    assert ended.code == 5
    return folder


@pytest.fixture
def copy_of(tmp_path):
    """Copies a run folder, to go on from without changing it for the other tests."""
    return lambda folder: tiny_run.copy_run(folder, tmp_path / folder.name)
