"""``plan=FILE`` among the overrides of a run: job, strategy and layout of a plan, under what else is given."""

from __future__ import annotations

import re
from collections.abc import Sequence

from entrain_bench.base.errors import UserError
from entrain_bench.config.overrides import parse
from entrain_bench.program.plan_file import plan_overrides, read_plan

KEY = "plan"
# What a layout was planned for: another value would leave the layout as it is.
OF_THE_PLAN = ("strategy", "layout", "global_batch", "microbatch_size")


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
            raise UserError(f"{text}: is decided by plan={path}; must be left out")
    keys = [parse(text).key_or_group for text in given]
    own = [text for text in plan_overrides(read_plan(path), path) if not _replaced(text, keys)]
    return (*own, *given)


def _replaced(text: str, keys: Sequence[str]) -> bool:
    """Whether an override is of one of some keys, or inside of what one of them chooses."""
    key = parse(text).key_or_group
    return any(key == other or key.startswith((f"{other}.", f"{other}/")) for other in keys)
