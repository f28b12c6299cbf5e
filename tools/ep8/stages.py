"""What `python -m tools.ep8` runs: one process a stage, the most telling ones first.

Expected seconds are for 8 H200, from what 2 of them took; they decide whether a stage is begun with little time left.
"""

import dataclasses
from pathlib import Path

from ep_jax import xla_flags
from ep_jax.config import load
from ep_jax.trackers import METRICS_FILE

TRAINED = ("pooled_wave", "rowwise", "ragged")
CONFIG, QUICK_CONFIG = "configs/h200.toml", "configs/tiny.toml"
TESTS = "tests/gpu/test_gpu_protocol.py"
ONE_CASE = "pooled_wave-0.9 and fsdp1"
VIRTUAL_DEVICES = 8
STARTUP_S = 90  # of a training, most of it compiling


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command and where its result is found."""

    name: str
    arguments: tuple[str, ...]  # of the Python interpreter
    expected_s: int
    result: Path  # JUnit XML, a result file of tools.bench, or a run folder
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    steps: int = 0  # of a training, which is ended once its last step is reported: its checkpoint is not needed

    @property
    def trains(self) -> bool:
        return self.steps > 0

    @property
    def least_s(self) -> int:
        """With less time than this it is not begun; of a training, even some steps tell something."""
        return STARTUP_S + 30 if self.trains else self.expected_s // 2

    @property
    def metrics(self) -> Path:
        return self.result / METRICS_FILE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What decides the commands."""

    platform: str  # "gpu" or "cpu"
    devices: int
    quick: bool = False  # small shapes and few steps, for the logic; what a machine without GPUs can do

    @property
    def environment(self) -> dict[str, str]:
        return {"JAX_NUM_CPU_DEVICES": str(self.devices)} if self.platform == "cpu" else {}


def stages(machine: Machine, work: Path, train_steps: int) -> list[Stage]:
    """All stages in order; their results lie in the folder `work`."""
    rowwise = "pooled_wave,rowwise"
    if machine.quick and machine.platform == "gpu":
        rowwise = "pooled_wave"  # its kernels do not take rows as short as the toy shape's
    few = "few1,few2" if machine.devices > 2 else "few2"
    found = [
        conformance(machine, work / "conformance.xml"),
        bench(machine, work, "collectives", 35, "collectives"),
        bench(machine, work, "layer", 100, "layer", transport=rowwise, sender="1.05", receiver="1.05"),
        # Drops by factor are the point of these.
        bench(
            machine,
            work,
            "few",
            140,
            "layer",
            shapes=few,
            routing="document",
            transport=rowwise,
            sender="1.05,1.15,1.5",
            receiver="1.05,1.15",
        ),
        # A process of its own: its XLA flags would slow the others down.
        bench(
            machine,
            work,
            "layer_ragged",
            70,
            "layer",
            transport="ragged",
            receiver="1.05",
        ),
        bench(machine, work, "waves", 110, "waves", waves="2", sender="1.05", receiver="1.05"),
    ]
    return found + [training(machine, work / f"train_{transport}", transport, train_steps) for transport in TRAINED]


def conformance(machine: Machine, result: Path) -> Stage:
    """Every transport on every mesh against the oracle; quick: one case."""
    words = ["-m", "pytest", TESTS, "-v", "-p", "no:cacheprovider", "--junitxml", str(result)]
    # Without "gpu" alone as its marker, the test session takes virtual CPU devices.
    words += ["-m", "gpu" if machine.platform == "gpu" else "gpu or not gpu"]
    words += ["-k", ONE_CASE] if machine.quick else []
    flags = " ".join(xla_flags.find_preset("gpu_ragged").flags) if machine.platform == "gpu" else ""
    return Stage("conformance", tuple(words), 120, result, {"XLA_FLAGS": flags} if flags else {})


def bench(machine: Machine, work: Path, name: str, expected_s: int, command: str, **options: str) -> Stage:
    """A command of tools.bench at shapes A, B and C unless told otherwise; quick: at the toy shape."""
    options = {"shapes": "A,B,C"} | options
    if machine.quick:
        options |= {"shapes": "toy", "iterations": "2", "dtype": "float32"}
    words = [word for option, value in options.items() for word in (f"--{option}", value)]
    file = work / f"{name}.json"
    arguments = ("-m", "tools.bench", command, *words, "--out", str(file))
    return Stage(name, arguments, expected_s, file, machine.environment)


def training(machine: Machine, folder: Path, transport: str, steps: int) -> Stage:
    """configs/h200.toml on all devices, each with one microbatch of what the file gives one GPU; one seed for all.

    Without accumulation 200 steps take minutes, not a quarter of an hour.
    """
    file = QUICK_CONFIG if machine.quick else CONFIG
    train = load(file).train
    at_a_time = train.sequences_per_device * machine.devices or train.sequences_per_step // train.accumulation
    options: dict[str, object] = {
        "run_dir": str(folder),
        "resume": "never",
        "train.steps": steps,
        "train.sequences_per_step": at_a_time,
        "train.accumulation": 1,
        "mesh.fsdp": 1,
        "mesh.ep": -1,
        "ep.transport": transport,
        "log.every": min(5, steps),
        "log.tensorboard": "false",
    }
    if machine.quick:
        options |= {"model.num_layers": 1, "data.sequence_length": 64}
    words = [f"--{name}={value}" for name, value in options.items()]
    arguments = ("-m", "ep_jax.train", "--config", file, *words)
    expected_s = STARTUP_S + round(steps * (2 if transport == "ragged" else 0.8))
    return Stage(f"train_{transport}", arguments, expected_s, folder, machine.environment, steps)
