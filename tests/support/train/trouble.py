"""A planner that gets the first rank into trouble, while the others wait for its layout."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class Troubled:
    """What happens on rank 0: ``abort``, ``exit``, ``raise`` or ``sleep``."""

    what: str

    def plan(self, *_: Any) -> NoReturn:
        """Never return a layout."""
        match self.what:
            case "abort":
                os.abort()
            case "exit":
                os._exit(3)
            case "raise":
                raise KeyError("x")
            case _:
                while True:
                    time.sleep(1)
