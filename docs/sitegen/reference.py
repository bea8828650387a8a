"""Reference pages: the command line as ``--help`` has it, and the Python API as docstrings have it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence

import entrain_bench
from entrain_bench.commands.help import help_text, verbs
from entrain_bench.config.comments import groups
from sitegen.tables import markdown

# Of the interfaces that a strategy, a workload and an executor of yours meet, beside the public names.
INTERFACES = {
    "Strategy interface": (
        "entrain_bench.balancing.interface",
        ("Planner", "Assigner", "Observer", "Scheduler", "Strategy"),
    ),
    "Assignments": ("entrain_bench.program.assignment", ("same_microbatches",)),
    "Programs": ("entrain_bench.program.build", ("build_program",)),
    "Workloads": ("entrain_bench.specs.workload", ("Workload", "ShapeSource")),
}


def command_line_page() -> str:
    """Return the page on commands: the screen of ``--help``, then every verb and every group of choices."""
    parts = ["# Command line", "Generated from `entrain-bench --help`.", _block(help_text()), "## Commands"]
    for verb, purpose in verbs().items():
        parts += [f"### {verb}", f"{purpose[:1].upper()}{purpose[1:]}.", _block(help_text(verb))]
    parts.append("## Choices")
    for group, found in groups().items():
        rows = [[f"`{name}`", sentence.replace("|", "\\|")] for name, sentence in found.items()]
        parts += [f"### {group}", markdown([f"`{group}=`", "what it is"], rows)]
    return "\n\n".join(parts) + "\n"


def api_page() -> str:
    """Return the page on the public names and the interfaces of a user's own parts."""
    public = [(name, getattr(entrain_bench, name)) for name in entrain_bench.__all__]
    parts = [
        "# Python API",
        "`import entrain_bench as eb` has these names; each is imported when it is first used. "
        "[Examples](docs/python.md).",
        markdown(
            ["name", "what it is"], [[f"[`{name}`](#{_anchor(name)})", _first_line(value)] for name, value in public]
        ),
        *(text for name, value in public for text in _entry(name, value)),
    ]
    for title, (module, names) in INTERFACES.items():
        values = [(name, getattr(importlib.import_module(module), name)) for name in names]
        parts += [f"## {title}", f"In `{module}`."]
        parts += [_auto(value) for _, value in values]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, value: object) -> Sequence[str]:
    return f"({_anchor(name)})=\n## {name}", _auto(value)


def _auto(value: object) -> str:
    """The directive that documents a class with its public methods, or a function."""
    where = f"{inspect.getmodule(value).__name__}.{value.__name__}"  # type: ignore[attr-defined,union-attr]
    if not inspect.isclass(value):
        return f"```{{eval-rst}}\n.. autofunction:: {where}\n```"
    return f"```{{eval-rst}}\n.. autoclass:: {where}\n   :members:\n   :exclude-members: __init__\n```"


def _first_line(value: object) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0].replace("``", "`").replace("|", "\\|")


def _anchor(name: str) -> str:
    return f"api-{name.lower()}"


def _block(text: str) -> str:
    return f"```text\n{text}\n```"
