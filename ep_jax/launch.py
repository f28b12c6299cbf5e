"""From a configuration to running devices: flags, processes, device count, mesh. The same for every command.

Everything that can be refused without data is refused here, before anything is compiled or written. Not here: what the
flags are (xla_flags.py), how processes meet (distributed.py), where arrays live (mesh.py).
"""

import dataclasses
from collections.abc import Iterable

from jax.sharding import Mesh

from ep_jax import distributed, xla_flags
from ep_jax.config import RunConfig, check_run, placed
from ep_jax.ep.settings import EPConfig
from ep_jax.fields import ConfigError
from ep_jax.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What a command runs on."""

    config: RunConfig  # placed on the devices
    mesh: Mesh
    launch: distributed.Launch
    flags: tuple[str, ...]  # XLA flags and variables that were added
    notes: tuple[str, ...]  # what the user should know, one line each

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes shared files."""
        return self.launch.process_id == 0

    def say(self, *lines: str) -> None:
        """Prints on the main process only."""
        if self.is_main:
            print(*lines, sep="\n", flush=True)


def start(config: RunConfig) -> Runtime:
    """Sets flags, meets the other processes, makes the mesh and checks the rules that span sections.

    On CPU the device count comes from XLA_FLAGS or JAX_NUM_CPU_DEVICES, which the mesh must equal, or else from the
    mesh: that many virtual devices are made. Raises ConfigError.
    """
    platform = xla_flags.default_platform()
    launch = distributed.detect()
    notes = unused_accumulation(config)
    per_process = None
    if platform == "cpu":
        processes = launch.num_processes or 1
        given = xla_flags.requested_device_count()
        config = placed(config, None if given is None else given * processes)
        per_process, rest = divmod(config.mesh.size, processes)
        if rest:
            raise ConfigError(
                f"mesh.{config.mesh.shape_text()}: {config.mesh.size} devices do not divide over {processes} processes"
            )
        check_run(config)  # before a backend starts
        if given is None:
            notes.append(f"devices: {per_process} virtual CPU devices made for the mesh {config.mesh.shape_text()}")
    elif -1 not in config.mesh.shape:
        config = placed(config, None)  # the flags depend on it; the devices are counted later
    flags = xla_flags.prepare(preset_of(config, platform), per_process, profiling=bool(config.profile.steps))
    launch = distributed.initialize(launch)

    import jax

    from ep_jax.compilation import use_cache

    use_cache(config.train.compilation_cache)
    if platform != "cpu" and jax.default_backend() == "cpu":
        raise ConfigError(
            f"devices: JAX should have found a {platform} and runs on the CPU, its warning says why; "
            "JAX_PLATFORMS=cpu allows that"
        )
    from ep_jax.ep.choice import definite

    config = placed(config, jax.device_count())
    model = config.model
    settings, note = definite(
        config.ep,
        config.mesh.ep,
        jax.devices(),
        model.latent_dim,
        model.compute_dtype,
        config.router.experts_per_token,
    )
    notes += [note] if note else []
    config = dataclasses.replace(config, ep=settings)
    notes += unused_settings(config)
    check_run(config)
    return Runtime(config, make_mesh(config.mesh), launch, flags, tuple(notes))


def preset_of(config: RunConfig, platform: str) -> str:
    """The name of the XLA flags of a run. An accumulation that is not known yet (0) is taken for more than one part."""
    preset = exchange_preset([config.ep], platform)
    # A loop over parts of the batch would be taken apart too, at the cost of memory and compiling (xla_flags.py).
    scans = config.model.scan and config.train.accumulation == 1
    return "gpu_scan" if scans and preset in ("gpu", "gpu_in_order") else preset


def exchange_preset(variants: Iterable[EPConfig], platform: str) -> str:
    """The name of the XLA flags under which all of these exchange rows in one process."""
    variants = list(variants)
    if platform == "cpu":
        return "cpu"
    if any(settings.transport == "ragged" for settings in variants):
        return "gpu_ragged"
    return "gpu_in_order" if any(settings.exchanges_are_short for settings in variants) else "gpu"


def unused_accumulation(config: RunConfig) -> list[str]:
    """One line where both settings of how many rows are passed at a time are given; of a config not yet `placed`."""
    train = config.train
    if not (train.accumulation and train.sequences_per_device):
        return []
    given = f"train.sequences_per_device = {train.sequences_per_device}"
    return [f"not used: {given}, as train.accumulation = {train.accumulation} is not 0"]


def unused_settings(config: RunConfig) -> list[str]:
    """One line naming the settings that differ from their default but are not used by the chosen transport."""
    ep = config.ep
    unused = [
        f"ep.{field.name}"
        for field in dataclasses.fields(ep)
        if field.name not in (*ep.used, "transport") and getattr(ep, field.name) != field.default
    ]
    return [f"not used by ep.transport = {ep.transport}: {', '.join(unused)}"] if unused else []
