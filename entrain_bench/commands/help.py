"""The screens of ``--help``: overview, keys of a verb, choices of a group, a choice, a key."""

from __future__ import annotations

import importlib
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from entrain_bench.base.errors import unknown_choice
from entrain_bench.commands import SUMMARIES
from entrain_bench.config.comments import documented_keys, groups, text_of
from entrain_bench.config.line import CONFIG_DIR, MULTIRUN

if TYPE_CHECKING:
    from entrain_bench.config.grammar import Verb

WIDTH = 100
INDENT = "  "
KEYS = "keys"
# Override of a group, where it is not the group alone.
PLACES = {group: f"{group}@model.modules.llm" for group in ("model/module", "model/module/family")}
TITLE = "entrain-bench: find the fastest load-balancing strategy for a multimodal LLM training job"
# Values of a key that are no choices of its group.
OTHER_VALUES = {
    "model": "Or of the Hugging Face hub: model=hf:ORG/NAME, whose JSON files are fetched; or the path of one",
    "cluster": "Or as many GPUs as you have, in nodes of one kind: cluster=16xh100, cluster=8xa100-80g",
    "workload": "Or a shape trace of your own: data=FILE.parquet, short for workload=trace workload.path=FILE.parquet",
}
# Six tasks, each with a command that can be pasted.
TASKS = {
    "recommend": "recommend workload=chartqa cluster=8xh100",
    "compare strategies": "--multirun strategy=megatron,entrain workload=chartqa seed=0,1",
    "describe my data": "trace source.path='data/*.parquet' output=mine.parquet",
    "draw figures": "figures iteration_time workload=chartqa,coco cluster=h100x64",
    "check my strategy": "check --config-dir examples/my_strategy strategy=mine",
    "train": "harness=train model=tiny cluster=tiny layout.dp=1 global_batch=8",
}
OPTIONS = {
    f"{MULTIRUN}, -m": "run a sweep over several values of keys: a,b or range(8); skip finished runs",
    f"{CONFIG_DIR} DIR": "add your folder: DIR/strategy/mine.yaml, DIR/figures/mine.py, ...",
    "plan=FILE": "execute the plan that recommend wrote",
    "--help=TOPIC": f"explain {KEYS} (all keys of a run), a verb, a key, or a group such as strategy",
}


def help_text(topic: str = "", config_dir: str | None = None) -> str:
    """Return the screen, or the text on a verb, all keys, a group, one of its choices (``harness/train``) or a key.

    A key may have a value, which is ignored. Groups include those of ``config_dir``, a folder of the user's.
    ``UserError`` for any other topic.
    """
    name = topic.partition("=")[0]
    if not name:
        shown = {command.split()[0] for command in TASKS.values()}
        others = columns({verb: purpose for verb, purpose in verbs().items() if verb not in shown} | OPTIONS)
        tasks = columns({task: f"entrain-bench {command}" for task, command in TASKS.items()})
        usage = "entrain-bench [VERB] [KEY=VALUE ...]; without a verb, a run or sweep. Other verbs and options:"
        return "\n\n".join([TITLE, tasks, f"{usage}\n{others}"])
    known = groups(config_dir)
    if name in verbs():
        return "\n\n".join(_verb(name, config_dir))
    if name == KEYS:
        return columns({f"{key.name}={key.default}": key.meaning for key in documented_keys()})
    if name in known:
        return "\n\n".join(_group(name, known))
    group, _, choice = name.rpartition("/")
    if choice in known.get(group, {}):
        return text_of(group, choice, config_dir)
    keys = [key for key in documented_keys() if f"{key.name}.".startswith(f"{name}.")]
    if not keys:
        raise unknown_choice("--help", name, [KEYS, *verbs(), *known])
    return columns({f"{key.name}={key.default}": key.comment for key in keys})


def verbs() -> dict[str, str]:
    """Return every verb with its help."""
    return {name: purpose for name, (_, purpose) in SUMMARIES.items()}


def takes(name: str) -> Verb[Any]:
    """Return the keys and options of a verb, or of ``run``."""
    verb: Verb[Any] = importlib.import_module(f"{__package__}.{name.replace('-', '_')}").VERB
    return verb


def _verb(name: str, config_dir: str | None) -> Iterator[str]:
    verb = takes(name)
    documented = {key.name: key.meaning for key in documented_keys()}
    arguments, purpose = SUMMARIES[name]
    yield f"entrain-bench {name} {arguments}: {purpose}"
    keys = {f"{one.name}={_shown(one.default)}": one.metadata["meaning"] or documented[one.name] for one in verb.fields}
    if keys:
        yield columns(keys)
    if "seed" in verb.passed:
        yield f"And keys of a run, such as model=, cluster=, layout.tp=: entrain-bench --help={KEYS}"
    elif passed := [key for key in verb.passed if key in {name.partition(".")[0] for name in documented}]:
        yield f"And of a run (entrain-bench --help={KEYS}): {', '.join(passed)}"
    if verb.examples:
        yield "\n".join(f"Example: entrain-bench {name} {example}".rstrip() for example in verb.examples)
    if verb.more:
        yield verb.more(config_dir)


def columns(rows: Mapping[str, str]) -> str:
    """Names with texts next to them, in as many lines as they need."""
    margin = len(INDENT) + max(map(len, rows)) + len(INDENT)
    lines = []
    for name, text in rows.items():
        first, *rest = textwrap.wrap(text, WIDTH - margin, break_on_hyphens=False) or [""]
        lines += [f"{INDENT}{name}".ljust(margin) + first, *(" " * margin + line for line in rest)]
    return "\n".join(lines)


def _shown(default: object) -> str:
    return "null" if default is None else json.dumps(default, separators=(",", ":")).strip('"')


def _group(group: str, known: dict[str, dict[str, str]]) -> Iterator[str]:
    default = next((f", default {key.default}" for key in documented_keys() if key.name == group), "")
    yield f"{PLACES.get(group, group)}=NAME{default}"
    yield columns(known[group])
    if group in OTHER_VALUES:
        yield OTHER_VALUES[group]
    yield f"All keys of one: --help={group}/{next(iter(known[group]))}"
    if inside := [name for name in known if name.startswith(f"{group}/")]:
        yield f"Parts of it: {', '.join(f'--help={name}' for name in inside)}"
