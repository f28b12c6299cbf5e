"""What compiling took is counted while a watch is open, and a folder of programs spares it."""

import jax
import jax.numpy as jnp
import pytest

from ep_jax.compilation import CompileWatch, use_cache


@pytest.fixture
def cache(tmp_path):
    """An empty cache folder in use, for programs that compile quickly too; afterwards the session's settings again."""
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    use_cache(str(tmp_path / "programs"))
    yield tmp_path / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_second_compilation_is_read_from_the_folder(cache):
    argument = jnp.ones(3)
    found = []
    for _ in range(2):
        jax.clear_caches()
        with CompileWatch() as watch:
            jax.jit(lambda x: jnp.sin(x) * 3 + 1).lower(argument).compile()
        found.append((watch.programs, watch.cache_hits, watch.cache_misses))
        assert watch.cache_used
        assert 0 < watch.tracing_s + watch.compiling_s < watch.seconds
    assert found == [(1, 0, 1), (1, 1, 0)]
    assert list(cache.glob("jit_*"))
    assert "1 programs (cache: 1 read, 0 written)" in watch.describe()
    assert watch.as_json()["cache_hits"] == 1


def test_a_closed_watch_counts_no_more():
    watch = CompileWatch()
    watch.close()
    watch.close()
    jax.jit(lambda x: x - 17).lower(jax.ShapeDtypeStruct((2,), jnp.float32)).compile()
    assert (watch.programs, watch.tracing_s) == (0, 0)


def test_an_empty_name_changes_nothing():
    before = jax.config.jax_compilation_cache_dir
    use_cache("")
    assert jax.config.jax_compilation_cache_dir == before
