"""The training loop: steps, reports, checkpoints, evaluations, and the ways to end.

Steps are counted when completed. The host stays one step behind the device: it reports step n while step n+1 runs, and
waits only before a checkpoint, an evaluation or the end. Nothing is written to the run folder before the first step is
done, and nothing is saved that did not pass the finite check. What a step computes is in step.py.
"""

import contextlib
import dataclasses
from typing import Any

import jax

from ep_jax import exits
from ep_jax.checkpoint import CHECKPOINTS, Checkpointer
from ep_jax.compilation import CompileWatch
from ep_jax.config import to_toml, write_config
from ep_jax.data.batches import BatchStream
from ep_jax.evaluation import Evaluation, Evaluator
from ep_jax.headroom import headroom
from ep_jax.launch import Runtime
from ep_jax.metrics import DelayedMetrics, short_time
from ep_jax.profiling import Profiler, device_description
from ep_jax.report import DEVICES_FILE, NonFiniteError, Report, write_json
from ep_jax.signals import TerminationRequest
from ep_jax.state import State
from ep_jax.step import make_train_step
from ep_jax.traces.recorder import TRACE_FOLDER, Recorder
from ep_jax.watchdog import Watchdog


@dataclasses.dataclass
class Start:
    """Where a run begins: a new state, or that of a checkpoint."""

    state: State
    step: int  # completed steps
    totals: dict[str, Any]  # Report.totals at that step
    position: dict[str, Any]  # what the data order depends on, stored with every checkpoint
    owes_evaluation: bool = False  # the run was stopped at a step where an evaluation was due


class Loop:
    """Runs steps until the last one, a SIGTERM or a non-finite step; `state` is always the newest."""

    def __init__(
        self,
        runtime: Runtime,
        start: Start,
        stream: BatchStream,
        evaluator: Evaluator,
        termination: TerminationRequest,
        watch: CompileWatch,
        watchdog: Watchdog,
    ):
        """watch: open since the run began; it is closed with the first step."""
        self.runtime, self.config = runtime, runtime.config
        self.state, self.start = start.state, start
        self.stream, self.evaluator, self.termination, self.watch = stream, evaluator, termination, watch
        self.watchdog, self.has_evaluated = watchdog, False
        self.report = Report(runtime, first_step=start.step, totals=start.totals)
        self.delayed = DelayedMetrics()
        self.owed: Evaluation | None = None
        self.unrecorded: dict[int, Any] = {}  # routes and drop counts of launched steps that are not known to be good
        self.train_step = make_train_step(runtime.config, runtime.mesh)
        self.recorder = Recorder(
            runtime.config,
            runtime.mesh,
            stream.layout,
            runtime.config.folder / TRACE_FOLDER,
            f"training, run {runtime.config.folder.name}",
        )

    def run(self) -> int:
        """Returns the exit code; DONE means that the last step is done and saved. Raises CheckpointError."""
        config, first_step = self.config, self.start.step
        if first_step >= config.train.steps:  # a run that ended in its final evaluation: only the report is missing
            return exits.DONE
        self.owed = self._held_out(first_step) if self.start.owes_evaluation else None
        with contextlib.ExitStack() as stack:
            batches = self.stream.from_step(first_step)
            stack.callback(batches.close)
            saver = Checkpointer(config.folder / CHECKPOINTS, config.checkpoint)
            stack.callback(saver.close)
            stack.callback(self.recorder.close)
            profiler = stack.enter_context(Profiler(config.profile, config.folder, first_step, config.train.steps - 1))
            try:
                for index, batch in batches:
                    with profiler.at_step(index):
                        self._launch(index + 1, batch)
                    stop = self._end_of_step(index + 1, saver)
                    if stop and index + 1 < config.train.steps:
                        saver.wait()
                        self.runtime.say(f"stopped by SIGTERM: step {index + 1} is saved; the same command resumes it")
                        return exits.INTERRUPTED
                    if index + 1 == config.train.steps:
                        break
                self.watchdog.enter("the end of the last save", limited=False)  # written in the background until here
            except NonFiniteError as error:
                self.runtime.say(f"stopped: {error}; the state before it was kept, and nothing was saved since")
                return exits.NON_FINITE
        return exits.DONE

    def _launch(self, step: int, batch: Any) -> None:
        """Launches a step and reports the one before; the first step is waited for, and opens the run folder."""
        waits = f", waiting for step {step - 1}," if self.report.is_open else ""
        self.watchdog.enter(f"step {step}{waits}", limited=self.report.is_open)  # the first one compiles
        if self.report.is_open:
            self.state, metrics = self.train_step(self.state, batch)
        else:
            with headroom(self.runtime.mesh):
                self.state, metrics = jax.block_until_ready(self.train_step(self.state, batch))
        routes, metrics = metrics.routes, metrics._replace(routes=None)
        finished = self.delayed.push(step, metrics)
        if not self.report.is_open:
            finished = self.delayed.flush()
            self.watch.close()
            seconds = self.watch.seconds
            self.report.startup = {"seconds_to_first_step": round(seconds, 3), **self.watch.as_json()}
            self.runtime.say(f"first step done after {short_time(seconds)}: {self.watch.describe()}")
            self._open_folder()
        if routes is not None and self.config.trace.due(step):
            self.unrecorded[step] = routes, metrics.drops.counts_NPE
        self._step_done(finished)

    def _step_done(self, finished: tuple[int, Any] | None) -> None:
        """Reports a finished step and, now that it has passed the finite check, records its routing when due."""
        self.report.step_done(finished)
        if finished is not None and finished[0] in self.unrecorded:
            step = finished[0]
            routes, counts_NPE = self.unrecorded.pop(step)
            self.recorder.record(step, routes, counts_NPE, self.stream.rows(step - 1))

    def _open_folder(self) -> None:
        self.termination.arm()  # first: a signal from here on leaves a checkpoint beside what is written now
        if self.runtime.is_main:
            write_config(self.config)
            description = {**device_description(), "added_flags": self.runtime.flags}
            write_json(self.config.folder / DEVICES_FILE, description)
        self.report.open()
        self.recorder.forget_after(self.start.step)
        if self.config.trace.every:
            self.runtime.say(self.recorder.describe())
        if self.owed is not None:
            self.report.log_evaluation(self.start.step, self.owed)

    def _end_of_step(self, step: int, saver: Checkpointer) -> bool:
        """Saves and evaluates when due; True when some process was asked to stop, and then the step is saved."""
        train, every = self.config.train, self.config.checkpoint.every
        saver.check()
        stop, last = self.termination.requested_anywhere(), step == train.steps
        save = stop or last or (every > 0 and step % every == 0)
        evaluate = train.eval_every > 0 and step % train.eval_every == 0 and not last
        if save or evaluate:
            self.watchdog.enter(f"step {step}")
            self._step_done(self.delayed.flush())  # the state is good up to here, and rows up to here exist
        if evaluate and not stop:
            self.report.log_evaluation(step, self._held_out(step))
        if save:
            self.watchdog.enter(f"the save of step {step}")
            saver.save(step, self.state, self._metadata(step) | {"owes_evaluation": evaluate and stop})
        if save or evaluate:
            self.report.clock.pause()
        return stop

    def _held_out(self, step: int) -> Evaluation:
        self.watchdog.enter(f"the evaluation after step {step}", limited=self.has_evaluated)  # the first one compiles
        self.has_evaluated = True
        return self.evaluator(self.state["params"], self.state["router"]["bias"], self.config.ep)

    def _metadata(self, step: int) -> dict[str, Any]:
        from ep_jax import __version__

        origin = {"config": to_toml(self.config), "ep_jax": __version__, "jax": jax.__version__}
        return {"step": step, "totals": self.report.totals, **self.start.position, **origin}
