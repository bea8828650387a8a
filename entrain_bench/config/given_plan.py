"""``plan=FILE`` among the overrides of a run: job, strategy and layout of a plan, under what else is given.

A plan is data: it names registered choices and gives values to their keys, and that is all it can do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import OverrideType

from entrain_bench.base.errors import UserError, require
from entrain_bench.config.hub.files import is_reference
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import ASIDE, PLAIN_KEYS
from entrain_bench.program.plan_file import TrainingPlan, plan_overrides, read_plan

KEY = "plan"
# What a layout was planned for: another value would leave the layout as it is.
OF_THE_PLAN = ("strategy", "layout", "global_batch", "microbatch_size")
# Names of choices, and the keys that a plan may set: those of a run that decide its result, and keys inside of choices.
NAME = re.compile(r"\w[\w.+-]*")
# A published model, or the place of its configuration.
REFERENCE = re.compile(r"(hf:)?[\w.@/~+-]+")
JOB_KEYS = PLAIN_KEYS - {*ASIDE}
INSIDE_JOB = re.compile(r"(model|workload|cluster)([./][^\W_]\w*)+")
INSIDE_STRATEGY = re.compile(r"strategy([./][^\W_]\w*)+")
# Keys inside of values.
PLAIN_NAME = re.compile(r"[^\W_]\w*")


def with_plan(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides with those of a plan in the place of ``plan=FILE``; other values of the same keys replace its own.

    Raises:
        UserError: for a file that is no plan, for two of them, and for overrides of what the plan decides.
    """
    files = [text for text in overrides if text.partition("=")[0] == KEY]
    if not files:
        return tuple(overrides)
    if len(files) > 1:
        raise UserError(f"{files[1]}: plan must be given once")
    path = str(parse(files[0]).value())
    given = [text for text in overrides if text not in files]
    for text in given:
        if re.split(r"[./=]", text, maxsplit=1)[0] in OF_THE_PLAN:
            raise UserError(f"{text}: the plan decides it (plan={path}). Leave it out")
    keys = [parse(text).key_or_group for text in given]
    own = [text for text in plan_overrides(checked_plan(path), path) if not _replaced(text, keys)]
    return (*own, *given)


def checked_plan(path: str | Path) -> TrainingPlan:
    """The plan of a file that only names choices and gives values to keys; ``UserError`` names file and field."""
    plan = read_plan(path)
    try:
        check_model(plan.job.model)
        for name in ("workload", "cluster"):
            _check_name(f"job.{name}", getattr(plan.job, name))
        _check_name("strategy", plan.strategy)
        for text in plan.options:
            _check_override("options", text, INSIDE_STRATEGY)
        for text in plan.job.overrides:
            check_of_job("job.overrides", text)
    except UserError as error:
        raise UserError(f"{KEY}={path}: {error}") from error
    return plan


def check_of_job(field: str, text: str) -> None:
    """Raise ``UserError`` for an override that a plan cannot hold as one of its job."""
    _check_override(field, text, INSIDE_JOB)


def check_model(name: str) -> None:
    """Raise ``UserError`` for a model that is neither the name of a choice nor a published one."""
    if not (is_reference(name) and REFERENCE.fullmatch(name) and "://" not in name):
        _check_name("job.model", name)


def _check_name(field: str, name: str) -> None:
    require(bool(NAME.fullmatch(name)), field, name, "the name of a choice")


def _check_override(field: str, text: str, inside: re.Pattern[str]) -> None:
    """Refuse all overrides but those that give a known key a value, choose by name, or add a parameter to the job."""
    override = parse(text)
    key = override.key_or_group
    known = override.type is OverrideType.CHANGE and (key in JOB_KEYS or inside.fullmatch(key))
    # A parameter that the choice does not list, as +workload.on_overlong=drop: the class that takes it checks it.
    known = known or (override.type is OverrideType.ADD and "/" not in key and INSIDE_JOB.fullmatch(key))
    placed = override.package is None or inside.fullmatch(override.package)
    require(bool(known and placed), field, text, "KEY=VALUE with a key that a plan may set (docs/trust.md)")
    plain = not override.is_sweep_override() and _is_plain(override.value())
    require(plain, field, text, "plain: numbers, text without ${...} and URLs, true, false, null, lists and mappings")
    if "/" in key:
        _check_name(field, str(override.value()))


def _is_plain(value: Any) -> bool:
    """Whether a value is read as it is written: no interpolation, no target, no URL, nothing of Hydra's functions."""
    if isinstance(value, Mapping):
        return all(PLAIN_NAME.fullmatch(str(key)) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return "${" not in value and "://" not in value
    return value is None or isinstance(value, bool | int | float)


def _replaced(text: str, keys: Sequence[str]) -> bool:
    """Whether an override is of one of some keys, or inside of what one of them chooses."""
    key = parse(text).key_or_group
    return any(key == other or key.startswith((f"{other}.", f"{other}/")) for other in keys)
