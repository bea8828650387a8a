"""Plan files: a job, its strategy and layout, and the expected iteration time; YAML with a version."""

import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml

from entrain_bench.base.errors import UserError, require
from entrain_bench.program.layout import Layout, ModuleLayout, layout_values, module_values
from entrain_bench.specs.parse import Count, Rate, between, check_keys, check_mapping, parse

VERSION = 1
MAX_BYTES = 4 * 2**20
HEADER = (
    "# A plan of entrain-bench: entrain-bench plan=THIS_FILE runs it, with harness=train on real ranks.\n"
    "# layers_per_stage counts embedding and head; ranks are [replica][stage], TP innermost.\n"
    "# widths are [TP, CP] of the groups of ranks that a sample or item may take; []: its replica.\n"
)


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """The training job of a plan; names are choices of the configuration."""

    model: str
    workload: str
    cluster: str
    global_batch: Count  # samples of an iteration
    microbatch_size: Count  # samples of a microbatch
    seed: Annotated[int, between(0, 2**32 - 1, "in 0..2^32-1")]  # of the samples that were planned with
    overrides: tuple[str, ...] = ()  # all other overrides, ``key=value``


@dataclass(frozen=True, slots=True)
class Expected:
    """Simulated iteration time of a plan, in seconds."""

    iteration_time_s: Rate  # mean over seeds
    # Ends of its 95% CI; the mean of a single seed.
    low_s: Rate
    high_s: Rate
    num_seeds: int  # how many


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A plan."""

    strategy: str  # the choice
    options: tuple[str, ...]  # its changed options, ``key=value``; none of its planner, because the plan has the layout
    job: PlannedJob  # planned training job
    layout: Layout  # planned layout
    expected: Expected  # simulated iteration time


class _Loader(yaml.SafeLoader):
    """Plain values without aliases, of which a few lines could make billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not supported")
        return super().compose_node(parent, index)


def plan_text(plan: TrainingPlan) -> str:
    """A plan as the text of its file."""
    values = {
        "version": VERSION,
        "strategy": plan.strategy,
        "options": [*plan.options],
        "job": asdict(plan.job) | {"overrides": [*plan.job.overrides]},
        "expected": asdict(plan.expected),
        "layout": layout_values(plan.layout),
    }
    # By JSON, so that no part is there twice, which YAML would write as an alias.
    plain = json.loads(json.dumps(values))
    return HEADER + yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10**9)


def read_plan(path: str | Path) -> TrainingPlan:
    """Return the plan of a file; ``UserError`` names file and invalid field. ``check_layout`` is not called."""
    where = f"plan={path}"
    try:
        size = Path(path).stat().st_size
        require(size <= MAX_BYTES, where, f"{size} bytes", f"at most {MAX_BYTES} bytes")
        values = yaml.load(Path(path).read_text(), _Loader)  # noqa: S506 (safe: plain values only)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{where}: is nested too deep") from error
    try:
        return _parsed(values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def plan_fingerprint(path: str | Path) -> str:
    """Hash of a plan's file; ``UserError`` if it cannot be read."""
    try:
        return sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"plan={path}: cannot be read ({error.strerror})") from error


def plan_overrides(plan: TrainingPlan, path: str | Path) -> tuple[str, ...]:
    """The overrides of a run that follows a plan, whose layout is read from its file."""
    job = plan.job
    quoted = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return (
        f"strategy={plan.strategy}",
        *plan.options,
        "strategy/planner=given",
        f"strategy.planner.path='{quoted}'",
        f"model={job.model}",
        f"workload={job.workload}",
        f"cluster={job.cluster}",
        f"global_batch={job.global_batch}",
        f"microbatch_size={job.microbatch_size}",
        f"seed={job.seed}",
        *job.overrides,
    )


def _parsed(values: Any) -> TrainingPlan:
    given = {"options": (), **check_mapping(values, "plan")}
    version = given.pop("version", None)
    require(version == VERSION, "version", version, f"{VERSION}, which this entrain-bench reads")
    if "layout" in given:
        check_keys(Layout, layout := given["layout"], "layout")
        modules = layout["modules"]
        require(isinstance(modules, list) and bool(modules), "layout.modules", modules, "at least one")
        placed = [_module(module, f"layout.modules[{index}]") for index, module in enumerate(modules)]
        given["layout"] = parse(Layout, {**layout, "modules": placed}, "layout")
    plan = parse(TrainingPlan, given, "plan")
    require(not plan.layout.options, "layout.options", [*plan.layout.options], "empty, because options has them")
    for where, texts in (("options", plan.options), ("job.overrides", plan.job.overrides)):
        for text in texts:
            require("=" in text, where, text, "key=value")
    return plan


def _module(values: Any, where: str) -> ModuleLayout:
    module = parse(ModuleLayout, module_values(check_mapping(values, where)), where)
    stages = module.layers_per_stage
    for degrees in module.widths:
        pair = len(degrees) == 2 and min(degrees) >= 1
        require(pair, f"{where}.widths", [*degrees], "TP and CP of a group, both at least 1")
    require(bool(stages) and min(stages) >= 1, f"{where}.layers_per_stage", [*stages], "at least 1 on each stage")
    shape = f"[replica][{len(stages)} stages][{module.tp * module.cp} ranks], whole numbers of at least 0"
    try:
        ranks = np.array(module.ranks)
        fits = ranks.ndim == 3 and ranks.dtype.kind == "i" and ranks.shape[1:] == (len(stages), module.tp * module.cp)
    except ValueError:
        fits = False
    require(fits and ranks.size > 0 and int(ranks.min()) >= 0, f"{where}.ranks", module.ranks, shape)
    return replace(module, ranks=ranks)
