"""What compiling costs, and JAX's persistent cache of compiled programs.

`CompileWatch` sums what JAX reports about tracing and compiling while it is open; `use_cache` puts compiled programs
into a folder, where the next process finds them. JAX keeps only programs there that took a second or longer to compile
(`jax_persistent_cache_min_compile_time_secs`), and the key covers program, devices, flags and versions.
"""

import dataclasses
import os
import time

import jax

TRACING = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")
COMPILING = "/jax/core/compile/backend_compile_duration"
HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


def use_cache(folder: str) -> None:
    """Keeps compiled programs in `folder`, made if needed; "" leaves JAX as it is (JAX_COMPILATION_CACHE_DIR)."""
    if not folder:
        return
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", os.path.abspath(os.path.expanduser(folder)))
    compilation_cache.reset_cache()  # JAX decides once per process, at its first compilation


@dataclasses.dataclass
class CompileWatch:
    """Seconds and counts since the watch began, of all programs of this process; a context manager, or `close` it."""

    tracing_s: float = 0.0  # Python to StableHLO
    compiling_s: float = 0.0  # StableHLO to a program, or reading it from the cache
    programs: int = 0
    cache_hits: int = 0
    cache_misses: int = 0  # compiled and written

    def __post_init__(self):
        self.began = time.perf_counter()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        self.is_open = True

    @property
    def seconds(self) -> float:
        """Since the watch began."""
        return time.perf_counter() - self.began

    @property
    def cache_used(self) -> bool:
        return bool(jax.config.jax_compilation_cache_dir)

    def as_json(self) -> dict[str, float | int | bool]:
        return {name: round(value, 3) for name, value in dataclasses.asdict(self).items()} | {
            "cache_used": self.cache_used
        }

    def describe(self) -> str:
        """For example "2.1 s tracing, 9.3 s compiling 7 programs (cache: 1 read, 2 written)"."""
        cache = f"cache: {self.cache_hits} read, {self.cache_misses} written" if self.cache_used else "no cache"
        return f"{self.tracing_s:.1f} s tracing, {self.compiling_s:.1f} s compiling {self.programs} programs ({cache})"

    def close(self) -> None:
        """Ends the counting; safe to call again."""
        if self.is_open:
            self.is_open = False
            jax.monitoring.unregister_event_duration_listener(self._on_duration)
            jax.monitoring.unregister_event_listener(self._on_event)

    def __enter__(self) -> "CompileWatch":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _on_duration(self, event: str, duration_secs: float, **kwargs) -> None:
        if event in TRACING:
            self.tracing_s += duration_secs
        elif event == COMPILING:
            self.compiling_s += duration_secs
            self.programs += 1

    def _on_event(self, event: str, **kwargs) -> None:
        self.cache_hits += event == HIT
        self.cache_misses += event == MISS
