"""What ``entrain-bench --help`` shows: a screen on everything, choices of a group, one of them, all about a key."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.comments import documented_keys, groups, text_of

WIDTH = 100
INDENT = "  "
# What is overridden, where that is not the group alone.
PLACES = {"model/module": "model/module@model.modules.llm"}
OPTIONS = {
    "--multirun, -m": "a sweep over several values of keys: a,b or range(8); finished runs are skipped",
    "--config-dir DIR": "a folder of yours with further choices: DIR/strategy/mine.yaml",
    "plan=FILE": "job, strategy and layout of a plan that recommend wrote",
    "--help=GROUP": "{groups}; or GROUP/NAME, or a KEY",
}
EXAMPLES = (
    "entrain-bench strategy=entrain workload=chartqa",
    "entrain-bench --multirun strategy=megatron,entrain workload=chartqa,coco seed='range(8)'",
    "entrain-bench workload=trace workload.path=mine.parquet",
)


def help_text(topic: str = "", config_dir: str | None = None) -> str:
    """All in one screen, or what can be chosen of a group, or a choice with its keys, or the whole comment on a key.

    Args:
        topic: a group, a choice (``harness/train``) or a key, with whatever value; empty for the screen.
        config_dir: a folder of the user's with further choices; None for none.

    Raises:
        UserError: for a topic that is none, with the groups.
    """
    name, known = topic.partition("=")[0], groups(config_dir)
    if name in known:
        return "\n".join(_group_lines(name, known))
    if not name:
        return "\n".join(_screen())
    group, _, choice = name.rpartition("/")
    if choice in known.get(group, {}):
        return text_of(group, choice, config_dir)
    if lines := [*_key_lines(name, known, config_dir)]:
        return "\n".join(lines)
    keys = [each for each in documented_keys() if f"{each.name}.".startswith(f"{name}.")]
    if not keys:
        raise unknown_choice("--help", name, known)
    return "\n".join(_columns({f"{key.name}={key.default}": key.comment for key in keys}))


def commands() -> dict[str, str]:
    """Every command and what it does: the modules beside this one whose docstrings begin with their command line."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        usage, _, purpose = (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("``: ")
        if usage.startswith(f"``entrain-bench {path.stem}"):
            found[path.stem] = purpose.splitlines()[0].rstrip(".")
    return found


def _screen() -> Iterator[str]:
    yield "entrain-bench: which load-balancing strategy for a multimodal-LLM training job, by how much, and why"
    yield ""
    yield "entrain-bench [KEY=VALUE ...]: one run, a short table, and a record in results_dir; or a command:"
    yield from _columns(commands())
    top = [group for group in groups() if "/" not in group]
    yield from _columns({option: text.format(groups=", ".join(top)) for option, text in OPTIONS.items()})
    yield ""
    yield "Keys and their defaults (null: the planner chooses; several values need --multirun):"
    yield from _columns({f"{key.name}={key.default}": key.meaning.replace("`", "") for key in documented_keys()})
    yield ""
    yield "Examples:"
    yield from (f"{INDENT}{example}" for example in EXAMPLES)


def _group_lines(group: str, known: dict[str, dict[str, str]]) -> Iterator[str]:
    """The choices of a group, how one is chosen, and the groups inside of it."""
    default = next((f", default {key.default}" for key in documented_keys() if key.name == group), "")
    yield f"{PLACES.get(group, group)}=NAME{default}"
    yield ""
    yield from _columns(known[group])
    yield ""
    yield f"All keys of one: --help={group}/{next(iter(known[group]))}"
    if inside := [name for name in known if name.startswith(f"{group}/")]:
        yield ""
        yield f"Parts of it: {', '.join(f'--help={name}' for name in inside)}"


def _key_lines(name: str, known: dict[str, dict[str, str]], config_dir: str | None) -> Iterator[str]:
    """What the choices of a group that have a key say of it: ``harness.dtype``."""
    *places, key = name.split(".")
    group = "/".join(places)
    for choice in known.get(group, {}):
        for line in text_of(group, choice, config_dir).splitlines():
            if line.startswith(f"{key}:"):
                yield f"{group}={choice}: {'.'.join(places)}.{line}"


def _columns(rows: dict[str, str]) -> Iterator[str]:
    """Names, and beside them texts in as many lines as they take."""
    margin = len(INDENT) + max(map(len, rows)) + len(INDENT)
    for name, text in rows.items():
        first, *rest = textwrap.wrap(text, WIDTH - margin, break_on_hyphens=False) or [""]
        yield f"{INDENT}{name}".ljust(margin) + first
        yield from (" " * margin + line for line in rest)
