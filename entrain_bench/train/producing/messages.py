"""What ranks and producers tell each other; only processes of one run do, so it is pickled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from entrain_bench.train.producing.blocks import Placement
from entrain_bench.train.producing.outline import Outline

type Maker = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first words.

    Attributes:
        lane: ranks of one lane are handed the same values; None for a rank that wants none.
    """

    lane: int | None


@dataclass(frozen=True, slots=True)
class Make:
    """What to make for the rank's lane, in order; one rank of a lane says it for all."""

    makers: tuple[Maker, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """The rank has taken the next value."""


@dataclass(frozen=True, slots=True)
class Released:
    """The rank no longer refers to what is in a block."""

    block: int


@dataclass(frozen=True, slots=True)
class Made:
    """A value.

    Attributes:
        outline: the value without its tensors.
        place: the block of their bytes, whose descriptor follows if it is new; None without any.
    """

    outline: Outline
    place: Placement | None


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of a value, what making it raised.

    Attributes:
        error: for the rank to raise.
        trace: the producer's traceback.
    """

    error: Exception
    trace: str
