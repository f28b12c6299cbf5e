"""A short training, timed: tokens/s, MFU, memory, start-up, and a table of where a step's time goes.

    python -m tools.bench train --config configs/h200.toml --steps 20 --out FILE.json [--section.key VALUE ...]

The step that is trained, on the run's own data, without checkpoints, evaluations and files: the compiled step of
`ep_jax.step`, its metrics fetched one step behind as the training loop does. A step's time is from one step's end to
the next one's. With `train.compilation_cache` a second call tells what the first one's cache saves; within one process
Mosaic would number its kernels on, which JAX's key covers. `--profile N` traces N further steps; on GPUs a traced run
does without command buffers, in the timed steps too, so `--profile 0` gives the figure without.
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ep_jax import exits
from ep_jax.cli import Option, split_args
from ep_jax.config import RunConfig, load, to_toml
from ep_jax.fields import ConfigError
from ep_jax.launch import Runtime, start
from ep_jax.profiling import ProfileConfig
from tools.bench.results import write_results

OPTIONS = (
    Option("steps", "N", "timed steps, 20 if left out"),
    Option("warmup", "N", "steps before them, 3 if left out; routers drop most in a run's first steps"),
    Option("profile", "N", "steps of the trace behind the table by phase, 3 if left out; 0 = none"),
    Option("out", "FILE", "JSON file of the result"),
)


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns the exit code. Raises ConfigError."""
    description = "Times training steps and tells where their time goes."
    arguments = split_args(argv, command="python -m tools.bench train", description=description, extra=OPTIONS)
    numbers = {"steps": 20, "warmup": 3, "profile": 3}
    for name, lowest in (("steps", 1), ("warmup", 1), ("profile", 0)):
        text = arguments.options.get(name, str(numbers[name]))
        if not text.isdecimal() or int(text) < lowest:
            raise ConfigError(f"--{name} {text}: allowed is an integer of at least {lowest}")
        numbers[name] = int(text)
    config = load(arguments.config, arguments.overrides)
    window = f"0:{numbers['profile']}" if numbers["profile"] else ""
    config = dataclasses.replace(config, profile=ProfileConfig(steps=window))

    from ep_jax.compilation import CompileWatch

    with CompileWatch() as watch:
        runtime = start(config)
        result = run(runtime, watch, **numbers)
    if "out" in arguments.options and runtime.is_main:
        result["config"] = to_toml(runtime.config)
        write_results(Path(arguments.options["out"]), ["train", *argv], [result], runtime.flags, runtime.mesh.size)
    return exits.DONE


def run(runtime: Runtime, watch: Any, *, steps: int, warmup: int, profile: int) -> dict[str, Any]:
    """Compiles, times `steps` steps after `warmup`, traces `profile` more; prints and returns what came of it."""
    import jax

    from ep_jax.data import open_dataset
    from ep_jax.data.batches import BatchStream
    from ep_jax.headroom import headroom
    from ep_jax.state import init_state
    from ep_jax.step import make_train_step
    from tools.bench.layer import memory_of
    from tools.bench.phases import phases_of, scopes_of

    config, mesh, say = runtime.config, runtime.mesh, runtime.say
    say(f"{config.mesh.shape_text()} on {mesh.size} x {jax.devices()[0].device_kind}, {config.ep.describe()}")
    dataset = open_dataset(config.data, vocab_size=config.model.vocab_size)
    stream = BatchStream.of_run(config, dataset.train, mesh)
    state = init_state(config, mesh)
    batches = stream.from_step(0)
    try:
        batch = next(batches)[1]
        before_step_s = watch.seconds
        compiled, compilation = compile_step(make_train_step(config, mesh), state, batch)
        began = time.perf_counter()
        with headroom(mesh):
            state, metrics = jax.block_until_ready(compiled(state, batch))
        startup = {
            "before_compiling_s": round(before_step_s, 2),
            "compilation_of_the_step": compilation,
            "first_step_s": round(time.perf_counter() - began, 3),
            "all_programs": watch.as_json(),
        }
        say("step: traced in {tracing_s} s, compiled in {compiling_s} s, cache: {cache}".format(**compilation))

        stepper = Stepper(compiled, state, batches)
        for _ in range(warmup):
            stepper.step()
        stepper.finish()
        timed = {"warmup_steps": warmup + 1} | stepper.timed(steps)  # with the one that finished start-up
        result = timed | rates_of(runtime, timed) | {"startup": startup}
        result |= {"memory_of_the_step": memory_of(compiled).as_json(), "peak_memory_gib": peak_memory_gib()}
        report(say, result)
        if profile:
            with tempfile.TemporaryDirectory() as folder:
                events = stepper.traced(profile, folder)
            phases = phases_of(events, scopes_of(compiled.as_text()), profile)
            say("", phases.table())
            result["phases"] = phases.as_json() | {"traced_steps": profile}
        return result
    finally:
        batches.close()


def compile_step(step: Any, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """(the compiled step, what compiling took); "cache" is "off", "miss" or "hit"."""
    from ep_jax.compilation import CompileWatch

    with CompileWatch() as watch:
        began = time.perf_counter()
        lowered = step.lower(state, batch)
        traced = time.perf_counter()
        compiled = lowered.compile()
        ended = time.perf_counter()
    cache = "off" if not watch.cache_used else "hit" if watch.cache_hits else "miss"
    seconds = {"tracing_s": traced - began, "compiling_s": ended - traced}
    return compiled, {name: round(value, 3) for name, value in seconds.items()} | {"cache": cache}


class Stepper:
    """Runs steps on one batch after the other, metrics one step behind; `state` is always the newest."""

    def __init__(self, compiled: Any, state: Any, batches: Iterator[tuple[int, Any]]):
        from ep_jax.metrics import DelayedMetrics

        self.compiled, self.state, self.batches = compiled, state, batches
        self.delayed = DelayedMetrics()
        self.newest: Any = None

    def step(self) -> Any:
        """Launches a step; returns the host metrics of the one before, None at first."""
        index, batch = next(self.batches)
        self.state, metrics = self.compiled(self.state, batch)
        self.newest = metrics.loss
        finished = self.delayed.push(index, metrics._replace(routes=None))
        return None if finished is None else finished[1]

    def finish(self) -> Any:
        """Waits for the last step; returns its metrics."""
        finished = self.delayed.flush()
        return None if finished is None else finished[1]

    def timed(self, steps: int) -> dict[str, Any]:
        """Times `steps` steps; the one before them only marks their beginning. Raises NonFiniteError.

        A thread takes the time when a step's results are there: launching the next step may last as long as a step.
        """
        import jax
        import numpy as np

        from ep_jax.report import refuse_non_finite
        from tools.bench.timing import Times

        def end_of(loss: Any) -> float:
            jax.block_until_ready(loss)
            return time.perf_counter()

        with ThreadPoolExecutor(1) as waiter:
            done, ends = [], []
            for _ in range(steps + 1):
                done.append(self.step())
                ends.append(waiter.submit(end_of, self.newest))
            done = [*done[2:], self.finish()]  # without the step before the first one, and that one
        for number, metrics in enumerate(done, 1):
            refuse_non_finite(number, metrics)
        times = Times(tuple(1e3 * np.diff([end.result() for end in ends])), "host")
        counts_SP = np.sum([metrics.drops.counts_NPE for metrics in done], axis=(1, 3), dtype=np.int64)
        drop_rates = counts_SP[:, 1:].sum(axis=1) / counts_SP[:, 0]
        return {
            "steps": steps,
            "step_ms": {
                "median_ms": round(times.median, 3),
                "p10_ms": round(times.low, 3),
                "p90_ms": round(times.high, 3),
                "iterations": steps,
            },
            "tokens_per_step": float(np.mean([metrics.valid_targets for metrics in done])),
            "drop_rate": float(counts_SP[:, 1:].sum() / counts_SP[:, 0].sum()),
            "drop_rates": [round(float(rate), 5) for rate in drop_rates],  # of each step
            "loss": float(done[-1].loss),
        }

    def traced(self, steps: int, folder: str) -> list[Any]:
        """The events of a trace of `steps` whole steps."""
        import jax

        from ep_jax.profiling import read_trace

        with jax.profiler.trace(folder):
            for _ in range(steps):
                self.step()
            self.finish()
            jax.block_until_ready(self.state)
        return read_trace(folder, with_stats=True)


def rates_of(runtime: Runtime, timed: dict[str, Any]) -> dict[str, float | None]:
    """tokens/s over all devices at the median step, and utilisation with and without dropped assignments."""
    import jax

    from ep_jax import flops

    config: RunConfig = runtime.config
    speed = timed["tokens_per_step"] / timed["step_ms"]["median_ms"] * 1e3
    per_token = flops.flops_per_token(config.model, config.router, config.data.sequence_length)
    peak = flops.device_peak_flops(jax.devices()[0].device_kind, config.model.compute_dtype)
    used = flops.mfu(speed, per_token, peak, runtime.mesh.size)
    return {
        "tokens_per_second": round(speed, 1),
        "mfu": used,
        "mfu_kept": flops.mfu_kept(used, per_token, timed["drop_rate"]),
        "tflops_per_device": round(speed * per_token.training / runtime.mesh.size / 1e12, 3),
    }


def peak_memory_gib() -> float | None:
    """Of the first device since start, start-up included; None where the backend does not say (CPU)."""
    from ep_jax.report import peak_memory_bytes

    peak = peak_memory_bytes()
    return None if peak is None else round(peak / 2**30, 2)


def report(say: Any, result: dict[str, Any]) -> None:
    """Prints the figures."""
    times, startup, memory = result["step_ms"], result["startup"], result["memory_of_the_step"]
    mfu = "-" if result["mfu"] is None else f"{100 * result['mfu']:.1f} %"
    peak = "-" if result["peak_memory_gib"] is None else f"{result['peak_memory_gib']} GiB"
    say(
        f"step: {times['median_ms']} ms ({times['p10_ms']}-{times['p90_ms']}, {times['iterations']} steps), "
        f"{result['tokens_per_second']:,.0f} tokens/s, MFU {mfu}, {result['tflops_per_device']:.1f} TFLOP/s a device, "
        f"drops {100 * result['drop_rate']:.2f} %, loss {result['loss']:.4f}",
        f"memory: peak {peak} of the process; of the step alone {memory['peak_gib']} GiB (arguments "
        f"{memory['arguments_gib']}, outputs {memory['outputs_gib']}, temporary {memory['temporary_gib']})",
        f"start-up: {startup['before_compiling_s']} s devices, data and state; first step {startup['first_step_s']} s",
    )
