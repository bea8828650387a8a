"""Choices that no YAML states: clusters by number of GPUs (``cluster=16xh100``), ``data=FILE``, and ``plan=FILE``."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import OverrideType

from entrain_bench.base.errors import UserError, require
from entrain_bench.config.hub.files import is_reference
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import ASIDE, PLAIN_KEYS
from entrain_bench.config.tree import config_tree
from entrain_bench.program.plan_file import TrainingPlan, plan_overrides, read_plan

MODEL = "model"
CLUSTER = "cluster"
DATA = "data"
TRACE = "trace"
# 16xh100 or 8xa100-80g, and the same as the choices of a cluster are called: h100x16.
COUNTED = re.compile(r"(?P<count>\d+)x(?P<device>[a-z0-9][\w-]*)")
NAMED = re.compile(r"(?P<device>[a-z][\w-]*?)x(?P<count>\d+)")
# Makers before a device's name, and other names of devices.
MAKERS = frozenset({"nvidia", "amd", "geforce", "tesla", "instinct"})
ALIASES = {"4090": "rtx4090", "mi300": "mi300x"}
# Words behind a device's name, of which its memory must be right.
WORDS = frozenset({"sxm", "sxm4", "sxm5", "hbm2e", "hbm3", "hbm3e", "ada", "nvl72"})
MEMORY = re.compile(r"(\d+)gb?")
MEMORY_GB = {"a100": 80, "a800": 80, "a40": 48, "h100": 80, "h20": 96, "h200": 141, "h800": 80} | {
    "b200": 180,
    "b300": 288,
    "gb200": 186,
    "l40s": 48,
    "rtx4090": 24,
    "rtx6000": 48,
    "mi300x": 192,
}
NODES = ("x8", "x72")  # of the names of YAMLs of one node

PLAN = "plan"
# Keys that a layout was planned for: another value would not change the layout.
OF_THE_PLAN = ("strategy", "layout", "global_batch", "microbatch_size")
# Names of choices, and the keys that a plan may set: those of a run that decide its result, and keys inside of choices.
NAME = re.compile(r"\w[\w.+-]*")
# A published model, or the place of its configuration.
REFERENCE = re.compile(r"(hf:)?[\w.@/~+-]+")
JOB_KEYS = PLAIN_KEYS - {*ASIDE}
INSIDE_JOB = re.compile(r"(model|workload|cluster)([./][^\W_]\w*)+")
INSIDE_STRATEGY = re.compile(r"strategy([./][^\W_]\w*)+")
PLAIN_NAME = re.compile(r"[^\W_]\w*")


def cluster_values(name: str, tree: Path) -> dict[str, Any] | None:
    """The YAML of ``16xh100``; None if there is one, or no such device; ``UserError`` for a wrong number or variant."""
    match = COUNTED.fullmatch(name.lower()) or NAMED.fullmatch(name.lower())
    if not match or (tree / CLUSTER / f"{name}.yaml").is_file():
        return None
    device, words = device_of(match["device"])
    count = int(match["count"])
    same, *nodes = (tree / CLUSTER / f"{device}{size}.yaml" for size in (f"x{count}", *NODES))
    node = next((file for file in nodes if file.is_file()), nodes[0])
    if not same.is_file() and not node.is_file():
        return None
    for word in words:
        memory = MEMORY.fullmatch(word)
        if not (int(memory[1]) == MEMORY_GB.get(device) if memory else word in WORDS):
            where = f"{CLUSTER}={name}: {device} has no variant {word}"
            raise UserError(f"{where}. Leave it out, or use --config-dir with a YAML")
    if same.is_file():
        return {"defaults": [same.stem]}
    return {"defaults": [node.stem, "_self_"], **resized(_node_values(node), count)}


def device_of(name: str) -> tuple[str, list[str]]:
    """A device as its YAML is called, and further words of its name: ``nvidia-h100_80gb_hbm3``, ``rtx-4090``."""
    first, *words = [word for word in re.split(r"[-_ ]", name.lower()) if word and word not in MAKERS] or [""]
    if first == "rtx" and words:
        first += words.pop(0)
    return ALIASES.get(first, first), words


def resized(cluster: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """Return changed keys for a cluster of ``num_gpus``: whole nodes or a part of one; ``UserError`` for others."""
    width = int(cluster["gpus_per_node"])
    name = f"{re.sub(r'x[0-9]+$', '', str(cluster['name']))}x{num_gpus}"
    allowed = f"from 1 to {width} GPUs, or a multiple of {width}, which a node has"
    fits = 1 <= num_gpus < width or (num_gpus > 0 and num_gpus % width == 0)
    require(fits, CLUSTER, f"{num_gpus}x{name.partition('x')[0]}", allowed)
    if num_gpus >= width:
        return {"name": name, "num_nodes": num_gpus // width}
    inner = cluster["tiers"][:-1]
    outermost = cluster["tiers"][-1]
    # Links inside a node as far as there are GPUs to join; a tier that joins no more than the one before is left out.
    tiers: list[dict[str, Any]] = []
    for tier in inner:
        size = min(int(tier["num_ranks"]), num_gpus)
        if size > max((int(other["num_ranks"]) for other in tiers), default=1):
            tiers.append({**tier, "num_ranks": size})
    return {"name": name, "num_nodes": 1, "gpus_per_node": num_gpus, "tiers": [*tiers, outermost]}


def with_data(overrides: Sequence[str]) -> tuple[str, ...]:
    """Replace ``data=FILE.parquet`` by ``workload=trace workload.path=FILE``; ``UserError`` for a second workload."""
    replaced: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key != DATA:
            replaced.append(text)
            continue
        if other := next((one for one in overrides if one.startswith(("workload=", "workload.path="))), None):
            raise UserError(f"{text}: means workload=trace workload.path={value}. Leave {other} out")
        if not all(name.strip("'\"[] ").endswith(".parquet") for name in value.split(",")):
            scan = "entrain-bench trace source=NAME source.path=FILE output=mine.parquet"
            raise UserError(f"{text}: must be a shape trace (a Parquet file). To make one of a dataset, run `{scan}`")
        replaced += [f"workload={TRACE}", f"workload.path={value}"]
    return tuple(replaced)


def _node_values(file: Path) -> dict[str, Any]:
    """Return the keys of a cluster's YAML, and those of the nodes and clusters among its defaults."""
    values: dict[str, Any] = yaml.safe_load(file.read_text())
    below = dict[str, Any]()
    for entry in values.get("defaults", ()):
        name = f"node/{entry['node']}" if isinstance(entry, dict) and "node" in entry else entry
        places = [tree / CLUSTER / f"{name}.yaml" for tree in (file.parents[1], config_tree())]
        found = next((place for place in places if place.is_file() and place != file), None)
        below |= _node_values(found) if found else {}
    return below | values


def with_plan(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides with those of ``plan=FILE``; ``UserError`` for none, two, and keys that a plan decides."""
    files = [text for text in overrides if text.partition("=")[0] == PLAN]
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
        raise UserError(f"{PLAN}={path}: {error}") from error
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
    require(bool(known and placed), field, text, "PLAN=VALUE with a key that a plan may set (docs/trust.md)")
    plain = not override.is_sweep_override() and _is_plain(override.value())
    require(plain, field, text, "plain: numbers, text without ${...} and URLs, true, false, null, lists and mappings")
    if "/" in key:
        _check_name(field, str(override.value()))


def _is_plain(value: Any) -> bool:
    """Return whether a value is plain: without interpolation, target, URL and Hydra functions."""
    if isinstance(value, Mapping):
        return all(PLAIN_NAME.fullmatch(str(key)) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return "${" not in value and "://" not in value
    return value is None or isinstance(value, bool | int | float)


def _replaced(text: str, keys: Sequence[str]) -> bool:
    key = parse(text).key_or_group
    return any(key == other or key.startswith((f"{other}.", f"{other}/")) for other in keys)
