"""Recorded routing dealt to ep groups of any size: who would have met whom, and what that assumes.

Letters: N layers, M microbatches, S shards of an ep group (in a trace: all source shards), R packed rows of a shard, L
columns of a packed row, T = R*L tokens of a shard, K choices, B packed rows of a step over all its microbatches.

A trace is a stream of packed rows: step by step, microbatch by microbatch, shard by shard. An ep group takes the next
S*R of them, shard 0 the first R. At the recorded degree with the recorded rows these are the recorded ep groups. A
shard holds whole packed rows; rows at the end that fill no group are left out. Other degrees need an assumption, in
words in `Dealing.assumption`. Starts no JAX backend.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from ep_jax.fields import ConfigError
from ep_jax.traces.file import TraceHeader, TraceStep


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The routing that one ep group meets in one microbatch; NumPy arrays as in the trace."""

    step: int  # of its first row, counted from 0 over the steps that were dealt
    expert_ids_NSTK: np.ndarray
    weights_NSTK: np.ndarray
    valid_ST: np.ndarray
    document_ST: np.ndarray


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Sizes of a recorded step, all that dealing needs to know of it."""

    layers: int
    microbatches: int
    shards: int
    rows: int  # R, packed rows of a source shard
    choices: int

    @property
    def step_rows(self) -> int:
        """B."""
        return self.microbatches * self.shards * self.rows


@dataclasses.dataclass(frozen=True)
class Dealing:
    """How packed rows become ep groups of `shards` shards with `rows` packed rows each."""

    header: TraceHeader
    recorded: Recorded
    shards: int
    rows: int

    @property
    def group_rows(self) -> int:
        return self.shards * self.rows

    @property
    def as_recorded(self) -> bool:
        """Whether the groups are the recorded ep groups."""
        return self.shards == self.header.ep and self.rows == self.recorded.rows

    @property
    def assumption(self) -> str:
        """What is taken for granted, on one line; empty at the recorded degree."""
        if self.as_recorded:
            return ""
        kept = "as recorded" if self.rows == self.recorded.rows else f"not {self.recorded.rows} as recorded"
        rows = f"{self.rows} packed row{'s' if self.rows > 1 else ''} per shard ({kept})"
        met = self.header.ep * self.recorded.rows
        if self.group_rows > self.recorded.step_rows:
            joined = f"rows of {-(-self.group_rows // self.recorded.step_rows)} recorded steps would have met in one"
        elif self.group_rows > met:
            joined = "rows of several recorded ep groups or microbatches would have met in one"
        else:
            joined = "the rows that met would have met in smaller shards or groups"
        return (
            f"assumes {rows}, consecutive rows together on a shard; {joined}, "
            f"routed as in the run of {self.recorded.shards} shards in groups of {self.header.ep}"
        )


def recorded_sizes(step: TraceStep) -> Recorded:
    """The sizes of a step."""
    layers, microbatches, shards, tokens, choices = step.expert_ids_NMSTK.shape
    return Recorded(layers, microbatches, shards, tokens // step.header.sequence_length, choices)


def deal(header: TraceHeader, recorded: Recorded, shards: int, rows: str | int, num_steps: int) -> Dealing:
    """The dealing for `shards` shards.

    rows: "recorded" keeps the packed rows of a shard and joins as many recorded shards as needed; "split" keeps the
    rows of a recorded ep group, so that more shards hold fewer; a number is the packed rows of a shard. Raises
    ConfigError when experts or rows cannot be dealt to so many shards, or `num_steps` recorded steps hold too few rows.
    """
    experts = header.num_experts
    if shards < 1 or experts % shards:
        divisors = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ConfigError(
            f"--shards {shards}: the trace has {experts} experts, and every shard holds as many; allowed are "
            f"{_list(divisors)}"
        )
    if rows == "recorded":
        rows = recorded.rows
    elif rows == "split":
        held = header.ep * recorded.rows
        if held % shards:
            raise ConfigError(
                f"--rows split: the {held} packed rows of a recorded ep group cannot be dealt to {shards} shards in "
                f"whole rows; allowed are {_list([n for n in range(1, held + 1) if held % n == experts % n == 0])}"
            )
        rows = held // shards
    if not isinstance(rows, int) or rows < 1:
        raise ConfigError(f"--rows {rows}: allowed are recorded, split or packed rows per shard, at least 1")
    dealing = Dealing(header, recorded, shards, rows)
    if dealing.group_rows > num_steps * recorded.step_rows:
        steps = -(-dealing.group_rows // recorded.step_rows)
        raise ConfigError(
            f"--shards {shards}: {shards} shards of {rows} packed rows need {dealing.group_rows} rows, the trace has "
            f"{num_steps} x {recorded.step_rows}: record at least {steps} steps, some {20 * steps} for intervals, "
            f"or use --rows split"
        )
    return dealing


def groups(dealing: Dealing, steps: Iterable[TraceStep]) -> Iterator[Group]:
    """The ep groups of consecutive steps, in order; holds no more than the steps a group needs.

    Raises ConfigError when a step has other layers or choices than the first.
    """
    held: list[Group] = []  # rows not dealt yet, as groups of one shard a row
    for number, step in enumerate(steps):
        sizes, first = recorded_sizes(step), dealing.recorded
        if (sizes.layers, sizes.choices) != (first.layers, first.choices):
            raise ConfigError(
                f"step {step.step}: {sizes.layers} layers, top-{sizes.choices}: expected {first.layers} layers, "
                f"top-{first.choices} as in the first"
            )
        held.append(_by_row(step, number))
        while sum(len(part.valid_ST) for part in held) >= dealing.group_rows:
            taken, held = _take(held, dealing.group_rows)
            yield _join(taken, dealing)


def _by_row(step: TraceStep, number: int) -> Group:
    """A step as one shard a packed row; views of its arrays."""
    length = step.header.sequence_length
    layers, *_, choices = step.expert_ids_NMSTK.shape
    return Group(
        number,
        step.expert_ids_NMSTK.reshape(layers, -1, length, choices),
        step.weights_NMSTK.reshape(layers, -1, length, choices),
        step.valid_MST.reshape(-1, length),
        step.document_MST.reshape(-1, length),
    )


def _take(held: list[Group], count: int) -> tuple[list[Group], list[Group]]:
    """(the first `count` rows, the others)."""
    taken = []
    for place, part in enumerate(held):
        size = len(part.valid_ST)
        if size > count:
            return [*taken, _rows_of(part, 0, count)], [_rows_of(part, count, size), *held[place + 1 :]]
        taken.append(part)
        count -= size
        if count == 0:
            return taken, held[place + 1 :]
    raise ValueError("fewer rows are held than are taken")


def _rows_of(part: Group, start: int, stop: int) -> Group:
    rows = slice(start, stop)
    arrays = (part.expert_ids_NSTK[:, rows], part.weights_NSTK[:, rows], part.valid_ST[rows], part.document_ST[rows])
    return Group(part.step, *arrays)


def _join(parts: list[Group], dealing: Dealing) -> Group:
    """Rows of several steps as one group of the dealing's shards."""
    layers, _, length, choices = parts[0].expert_ids_NSTK.shape
    wide, flat = (layers, dealing.shards, dealing.rows * length, choices), (dealing.shards, dealing.rows * length)

    def joined(name: str, axis: int) -> np.ndarray:
        arrays = [getattr(part, name) for part in parts]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis)

    return Group(
        parts[0].step,
        joined("expert_ids_NSTK", 1).reshape(wide),
        joined("weights_NSTK", 1).reshape(wide),
        joined("valid_ST", 0).reshape(flat),
        joined("document_ST", 0).reshape(flat),
    )


def _list(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers) or "none"
