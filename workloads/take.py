"""How much of a source is used: LLaVA-OneVision's and DFLOP's sampling strategies of a data set."""

from __future__ import annotations

import re
from dataclasses import dataclass

from entrain_bench.base.errors import UserError

ALL = "all"
_FIRST = re.compile(r"first:(\d+(?:\.\d+)?)(%?)")
_ALLOWED = "all, first:3000 or first:10%"


@dataclass(frozen=True, slots=True)
class Take:
    """The first of something: a share of all, in (0, 1], or a number."""

    share: float | None = 1.0
    number: int | None = None

    @classmethod
    def parse(cls, text: str, where: str) -> Take:
        """``all``, ``first:3000`` or ``first:10%``; ``UserError`` names the field ``where``."""
        if text == ALL:
            return cls()
        match = _FIRST.fullmatch(str(text))
        if match is None or (not match[2] and "." in match[1]):
            raise UserError(f"{where}={text}: must be {_ALLOWED}")
        value = float(match[1])
        if not 0 < value <= (100 if match[2] else 2**53):
            raise UserError(f"{where}={text}: must be above 0, and at most 100% where it is a share")
        return cls(value / 100, None) if match[2] else cls(None, int(value))

    def of(self, total: int) -> int:
        """Return how many of ``total`` to take: a share is rounded, and at least 1 if there are any."""
        if self.number is not None:
            return min(total, self.number)
        return min(total, max(1, round((self.share or 0.0) * total)))
