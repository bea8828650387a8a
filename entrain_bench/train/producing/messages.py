"""What ranks and producers tell each other; only processes of one run do, so it is pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO

from entrain_bench.train.producing.blocks import Placement
from entrain_bench.train.producing.outline import Outline

type Maker = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first words.

    Attributes:
        lane: ranks of one lane are handed the same values; None for a rank that wants none.
        shared: what makers refer to, equal for all ranks; it travels once, so a producer's keeps what it has read.
    """

    lane: int | None
    shared: object = None


@dataclass(frozen=True, slots=True)
class Make:
    """What to make for the rank's lane, in order; one rank of a lane says it for all.

    Attributes:
        makers: pickled, but for what is shared.
    """

    makers: bytes

    @classmethod
    def of(cls, makers: Sequence[Maker], shared: object) -> Make:
        """The message; wherever makers refer to ``shared``, the producer's takes its place."""
        file = BytesIO()
        _Pickler(file, shared).dump([*makers])
        return cls(file.getvalue())

    def read(self, shared: object) -> list[Maker]:
        """The makers, which refer to ``shared``."""
        makers: list[Maker] = _Unpickler(BytesIO(self.makers), shared).load()
        return makers


class _Pickler(pickle.Pickler):
    def __init__(self, file: BytesIO, shared: object) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared = shared

    def persistent_id(self, value: object) -> object:
        return True if self.shared is not None and value is self.shared else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, shared: object) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, _: object) -> object:
        return self.shared


@dataclass(frozen=True, slots=True)
class Taken:
    """The rank has taken the next value."""


@dataclass(frozen=True, slots=True)
class Released:
    """The rank no longer refers to what is in a block."""

    block: int


@dataclass(frozen=True, slots=True)
class Made:
    """A value, all of which is in a block, so that the message has one size.

    Attributes:
        outline: how to read the value; a ``Failed`` stands for one that could not be made.
        place: its block, whose descriptor follows if it is new.
    """

    outline: Outline
    place: Placement


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of a value, what making it raised."""

    error: Exception
    trace: str
