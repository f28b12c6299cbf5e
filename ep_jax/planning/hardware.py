"""Describes a cluster of equal GPUs: memory, peak rate and links, read from a TOML file of `configs/hardware`.

A domain is a set of GPUs joined by NVLink (a box, a rack); domains are joined by a network (InfiniBand). Rates are of
one GPU in one direction. Fractions say what of a data sheet's rate was measured; 1 where nothing was. Data sheets'
gigabytes of memory are taken as 1e9 bytes; devices have shown some 6 % more.
"""

import dataclasses
from pathlib import Path
from typing import ClassVar

from ep_jax.config_files import read_toml, shipped_configs
from ep_jax.fields import ConfigError, check, convert, setting
from ep_jax.flops import device_peak_flops

GIGA = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of GPU, how many stand in an NVLink domain, and how many domains there are."""

    SECTION: ClassVar[str] = "hardware"

    name: str = setting(doc="what the output calls it")
    device_kind: str = setting(doc="as JAX names it; the peak rate is looked up by it in ep_jax.flops")
    memory_gb: float = setting(above=0.0, unit="1e9 bytes", doc="memory of one GPU")
    memory_fraction: float = setting(0.9, above=0.0, at_most=1.0, doc="what XLA may take; the rest is NCCL and CUDA")
    devices_per_domain: int = setting(at_least=1, doc="GPUs in use of one NVLink domain")
    domains: int = setting(1, at_least=1, doc="NVLink domains")
    nvlink_gb_per_s: float = setting(above=0.0, unit="1e9 bytes/s", doc="NVLink, one GPU, one direction")
    network_gb_per_s: float = setting(above=0.0, unit="1e9 bytes/s", doc="network, one GPU, one direction")
    matmul_fraction: float = setting(1.0, above=0.0, at_most=1.0, doc="measured share of the peak matmul rate")
    nvlink_fraction: float = setting(1.0, above=0.0, at_most=1.0, doc="measured share of the NVLink rate")
    network_fraction: float = setting(1.0, above=0.0, at_most=1.0, doc="measured share of the network rate")

    def __post_init__(self):
        check(self)
        if device_peak_flops(self.device_kind, "bfloat16") is None:
            raise ConfigError(f"hardware.device_kind = {self.device_kind!r}: not in ep_jax.flops.PEAK_FLOPS")

    @property
    def num_devices(self) -> int:
        return self.domains * self.devices_per_domain

    @property
    def usable_bytes(self) -> int:
        """What one GPU offers to XLA."""
        return int(self.memory_gb * GIGA * self.memory_fraction)

    @property
    def peak_flops(self) -> float:
        """Data-sheet bfloat16 FLOP/s of one GPU, the denominator of MFU."""
        peak = device_peak_flops(self.device_kind, "bfloat16")
        assert peak is not None  # checked above
        return peak

    @property
    def nvlink_rate(self) -> float:
        """Bytes per second."""
        return self.nvlink_gb_per_s * GIGA * self.nvlink_fraction

    @property
    def network_rate(self) -> float:
        """Bytes per second."""
        return self.network_gb_per_s * GIGA * self.network_fraction


def shipped_hardware() -> dict[str, Path]:
    """Name without .toml -> path of the hardware files that come with ep_jax."""
    anywhere = next(iter(shipped_configs().values()))
    return {path.stem: path for path in sorted((anywhere.parent / "hardware").glob("*.toml"))}


def load_hardware(name: str) -> Hardware:
    """Reads a file, given as a path or as a shipped name ("gb200_nvl72"). Raises ConfigError on one line."""
    shipped = shipped_hardware()
    bare = name.removeprefix("configs/hardware/").removesuffix(".toml")
    if not Path(name).is_file() and bare not in shipped:
        raise ConfigError(f"--hardware = {name!r}: no such file; shipped are {', '.join(shipped)}")
    table = read_toml(name if Path(name).is_file() else str(shipped[bare]))
    fields = {field.name: field for field in dataclasses.fields(Hardware)}
    for key in table:
        if key not in fields:
            raise ConfigError(f"hardware.{key} = {table[key]!r}: no such key; allowed are {', '.join(fields)}")
    for key, field in fields.items():
        if key not in table and field.default is dataclasses.MISSING:
            raise ConfigError(f"hardware.{key}: is missing in {name}")
    return Hardware(**{key: convert(value, fields[key].type) for key, value in table.items()})
