"""Training by programs: the suite's own models (``harness=train``), and any Hugging Face model (``ProgramRunner``)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entrain_bench.train.runner.chats import Chats as Chats
    from entrain_bench.train.runner.checkpoints import resume as resume
    from entrain_bench.train.runner.checkpoints import save_checkpoint as save_checkpoint
    from entrain_bench.train.runner.families import Family as Family
    from entrain_bench.train.runner.process import ranks as ranks
    from entrain_bench.train.runner.runner import ProgramRunner as ProgramRunner

_HOMES = {
    "Chats": "chats",
    "Family": "families",
    "ProgramRunner": "runner",
    "ranks": "process",
    "resume": "checkpoints",
    "save_checkpoint": "checkpoints",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.runner.{_HOMES[name]}"), name)
