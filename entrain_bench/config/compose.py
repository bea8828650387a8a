"""Runs and sweeps out of the configuration tree: Hydra composes each choice once, and plain values are set on it."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Glob, Override, OverrideType
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from entrain_bench.base.errors import UserError, require, unknown_choice, unknown_key
from entrain_bench.base.store import Store
from entrain_bench.config.given import with_plan
from entrain_bench.config.hub.files import is_reference
from entrain_bench.config.overrides import error_line, is_inside, parse, swept_keys, top_of, with_value
from entrain_bench.config.parts import sources_stamp
from entrain_bench.config.schema import GROUP_KEYS, NESTED, PLAIN_KEYS, ConfigSchema, RunConfig
from entrain_bench.config.sources import add_config_dir, compose_values
from entrain_bench.config.targets import TARGET, check_targets, class_of, is_trusted
from entrain_bench.config.tree import choices, folders

FIGURE = "figure"
HYDRA = "hydra"
SWEEP_KEYS = frozenset({HYDRA, FIGURE})
# Values of ``in_figures`` in a strategy's YAML with which ``glob(*)`` finds it for a figure.
SHOWN = "figure.strategies"
IN_FIGURES = ("all", "main", "none")
# Keys whose values on the command line select among those of a figure's jobs.
NARROWED = ("strategy", "workload", "model", "cluster", "seed")
# Keys of Hydra that change nothing: where it writes, how it names and logs. The records of the suite hold all of a run.
IGNORED = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.", "hydra.verbose", "hydra.mode")
HYDRA_KEYS = (*IGNORED, "hydra.launcher.", "hydra.sweeper.", "hydra/launcher", "hydra/sweeper")
INTERPOLATION = "${"
# The first key that an interpolation names.
INTERPOLATED = re.compile(r"\$\{\W*(\w+)")


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep and its launcher."""

    cells: tuple[tuple[str, ...], ...]  # overrides of every run; the last key varies first
    launcher: str
    num_processes: int  # that the launcher uses; -1 for all there is
    address: str | None  # of Ray's cluster; None for this machine


EMULATE = "emulate"


class Composer:
    """Composes runs with the choices of a folder ``config_dir``, if any; results are stored until a YAML changes."""

    def __init__(self, config_dir: str | None = None) -> None:
        add_config_dir(config_dir)
        self.config_dir = config_dir
        self.version = _tree_hash(folders(config_dir))
        self._store = Store("compositions", self.version)
        self.fingerprints: dict[str, list[str]] = {}
        # Values by their choices, of this process alone.
        self._combined: dict[tuple[str, ...], Mapping[str, Any]] = {}

    def run(self, overrides: Sequence[str]) -> RunConfig:
        """Return the run of overrides; ``~key`` restores the key's default. ``UserError`` for an invalid one."""
        plain: dict[str, Any] = {}
        chosen: list[str] = []
        inside: list[Override] = []
        for text in with_plan(overrides):
            override = parse(text)
            top = top_of(override)
            if override.is_sweep_override():
                raise UserError(f"{text}: several values make a sweep. Add --multirun")
            if top == HYDRA:
                check_hydra_key(override)
            elif top not in ConfigSchema.__dataclass_fields__:
                raise unknown_key(text, ConfigSchema.__dataclass_fields__)
            elif override.key_or_group in PLAIN_KEYS:
                plain.pop(override.key_or_group, None)
                if override.type is not OverrideType.DEL:
                    plain[override.key_or_group] = _plain_value(text)
            elif is_inside(override):
                inside.append(override)
            else:
                self._check_group(override)
                # Hydra keeps the order of this override and earlier ones inside of its key.
                earlier = [one for one in inside if one.key_or_group.startswith(f"{override.key_or_group}.")]
                inside = [one for one in inside if one not in earlier]
                chosen += [*(str(one.input_line) for one in earlier), text]
        values = self._with_own_options({**self._choose(tuple(chosen))}, chosen)
        _check_file(values["workload"], inside)
        for override in inside:
            values = with_value(values, override)
        for group in NESTED:
            usual = values[group].items()
            values[group] = {name: plain.pop(f"{group}.{name}", value) for name, value in usual}
        config = RunConfig.from_values(_resolved(values | plain))
        if config.harness["label"] == EMULATE and is_reference(name := config.model["name"]):
            raise UserError(f"model={name}: cannot be emulated. Use harness=simulate, train, or another model")
        return config

    def sweep(self, overrides: Sequence[str]) -> Sweep:
        """Return a sweep, with a figure's values for keys not given; ``UserError`` for bad overrides or no runs."""
        parsed = [parse(text) for text in overrides]
        fixed = [one for one in parsed if top_of(one) in SWEEP_KEYS and not one.is_sweep_override()]
        for one in fixed:
            check_hydra_key(one)
        own = self._hydra(tuple(str(one.input_line) for one in fixed))
        # A sweep that is no figure's finds all strategies.
        of_figure = any(one.key_or_group == FIGURE for one in fixed)
        shown = own["shown"] or (IN_FIGURES[:1] if of_figure else IN_FIGURES)
        given = {one.key_or_group: self._texts(one, shown) for one in parsed if one.key_or_group != SHOWN}
        jobs = _jobs_of(own["jobs"], given)
        kept = [parse(f"{key}={value}") for key, value in own["params"].items() if key not in given]
        kept += [one for one in parsed if one.key_or_group in given.keys() - swept_keys(jobs[0]).keys()]
        products = [*itertools.product(*(self._texts(one, shown) for one in kept))]
        cells = tuple((*job, *cell) for job in jobs for cell in products)
        if not cells:
            why = "the sweep is empty, because a glob(...) matches no choice of its group"
            raise UserError(f"{' '.join(overrides)}: {why}. To list the choices, run entrain-bench --help=GROUP")
        launcher = own["launcher"]
        count = launcher.get("n_jobs", launcher.get("num_cpus", 1))
        fits = isinstance(count, int) and (count >= 1 or count == -1)
        require(fits, "hydra.launcher: number of processes", count, "an integer of at least 1, or -1 for all CPUs")
        return Sweep(cells, str(own["choices"]["hydra/launcher"]), count, launcher.get("address"))

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Chosen names and plain values of a run without overrides, by key."""
        values = self._default
        chosen = self._hydra(())["choices"]
        plain = (key.partition(".") for key in PLAIN_KEYS)
        return {group: chosen.get(group) for group in (*GROUP_KEYS, FIGURE)} | {
            f"{top}{dot}{name}": values[top][name] if dot else values[top] for top, dot, name in plain
        }

    def save(self) -> None:
        """Store composed results for the next process."""
        self._store.save()

    def _check_group(self, override: Override) -> None:
        group = override.key_or_group
        trees = folders(self.config_dir)
        if "/" in group and not any((tree / group).is_dir() for tree in trees):
            inside = (path for tree in trees for path in (tree / top_of(override)).rglob("*") if path.is_dir())
            raise unknown_key(str(override.input_line), {"/".join(path.parts[-2:]) for path in inside})

    def _choose(self, choices: tuple[str, ...]) -> Mapping[str, Any]:
        """Return the values of overrides that choose: each group is composed alone, unless it reaches into others."""
        if choices not in self._combined:
            by_group: dict[str, list[str]] = {}
            for text in choices:
                by_group.setdefault(top_of(parse(text)), []).append(text)
            values = {**self._default}
            for group, texts in by_group.items():
                changed = self._changes(tuple(texts))
                if {*changed} - {group}:
                    values = {**self._default, **self._changes(choices)}
                    break
                values |= changed
            self._combined[choices] = values
        return self._combined[choices]

    def _with_own_options(self, values: dict[str, Any], chosen: Sequence[str]) -> dict[str, Any]:
        """Leave out options that a strategy's YAML sets for its own part, if another part is chosen that has none."""
        picked = dict(text.split("=", 1) for text in chosen if "=" in text)
        parts = [key.partition("/")[2] for key in picked if key.startswith("strategy/")]
        places = (folder / "strategy" / f"{picked.get('strategy')}.yaml" for folder in folders(self.config_dir))
        file = next((place for place in places if place.is_file()), None)
        if not parts or file is None:
            return values
        strategy = dict(values["strategy"])
        for part in parts:
            node, own = strategy.get(part), _yaml_values(file).get(part)
            if isinstance(node, dict) and isinstance(own, dict) and is_trusted(target := node.get(TARGET)):
                known = {field.name for field in fields(cls)} if is_dataclass(cls := class_of(str(target))) else {*node}
                strategy[part] = {key: value for key, value in node.items() if key in known or key not in own}
        return values | {"strategy": strategy}

    def _changes(self, choices: tuple[str, ...]) -> Mapping[str, Any]:
        def changed() -> dict[str, Any]:
            values = compose_values(choices, self.config_dir)
            return {name: value for name, value in values.items() if value != self._default.get(name)}

        # The files of a published model are no YAML files, whose changes are seen.
        given = any(is_reference(one.value()) for one in map(parse, choices))
        return changed() if given else self._stored(changed, "changes", *choices)

    @cached_property
    def _default(self) -> Mapping[str, Any]:
        return self._stored(lambda: compose_values((), self.config_dir), "default")

    def _hydra(self, choices: tuple[str, ...]) -> Mapping[str, Any]:
        """Return a figure's sweep, its launcher, and the names of all choices."""

        def settings() -> dict[str, Any]:
            composed = compose_values(choices, self.config_dir, with_hydra=True)
            own = composed[HYDRA]
            shown = (composed[FIGURE] or {}).get("strategies")
            swept = {"params": own["sweeper"]["params"] or {}, "launcher": own["launcher"]}
            swept["jobs"] = (composed[FIGURE] or {}).get("jobs", [])
            return {"shown": shown, "choices": own["runtime"]["choices"], **swept}

        return self._stored(settings, HYDRA, *choices)

    def _stored(self, make: Callable[[], dict[str, Any]], *key: str) -> Mapping[str, Any]:
        values: dict[str, Any] | None = self._store.get(key)
        if values is None:
            values = make()
            self._store.put(key, values)
        return values

    def _texts(self, override: Override, shown: Sequence[str]) -> list[str]:
        """Return the override of every value; of ``glob`` over strategies those that are shown."""
        key = override.get_key_element()
        if not override.is_sweep_override():
            text = override.get_value_element_as_str()
            return [key if override.type is OverrideType.DEL and not text else f"{key}={text}"]
        glob = override.value()
        if isinstance(glob, Glob):
            names = glob.filter(choices(override.key_or_group, self.config_dir))
            of_strategies = override.key_or_group == "strategy"
            return [f"{key}={name}" for name in names if not of_strategies or self._in_figures(name) in shown]
        if not override.is_discrete_sweep():
            raise UserError(
                f"{override.input_line}: has no list of values. Use a,b,c or range(8), or hydra/sweeper=NAME"
            )
        return [f"{key}={text}" for text in override.sweep_string_iterator()]

    def _in_figures(self, strategy: str) -> str:
        places = (folder / "strategy" / f"{strategy}.yaml" for folder in folders(self.config_dir))
        word = str(_yaml_values(next(file for file in places if file.is_file())).get("in_figures", IN_FIGURES[0]))
        if word not in IN_FIGURES:
            raise unknown_choice(f"{strategy}: in_figures", word, IN_FIGURES)
        return word


def compose(*overrides: str, config_dir: str | None = None) -> RunConfig:
    """Return the run of overrides, as on the command line; ``UserError`` for an invalid one."""
    composer = Composer(config_dir)
    config = composer.run(overrides)
    composer.save()
    return config


def _jobs_of(jobs: Any, given: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """The overrides of every job of ``figure.jobs``; one job without any if there is none.

    A sweep is a product of values; jobs differ in several keys at once. The given overrides, by key, select among the
    jobs if their key is ``NARROWED`` and some jobs have these values; otherwise those of keys of jobs replace the list.
    ``UserError`` for anything but lists of plain overrides, one for each key.
    """
    listed = isinstance(jobs, list) and all(isinstance(job, list) for job in jobs)
    require(listed, "figure.jobs", jobs, "a list of jobs, each a list of overrides")
    several = dict[str, bool]()
    for job in jobs:
        several |= swept_keys(job)
    for key, sweeps in several.items():
        require(not sweeps, f"figure.jobs: {key}", "several values", "one value")
    known = {text for job in jobs for text in job}
    wanted = {key: {*texts} for key, texts in given.items() if key in several}
    narrows = all(key in NARROWED and texts <= known for key, texts in wanted.items())
    chosen = [tuple(job) for job in jobs if narrows and all(texts & {*job} for texts in wanted.values())]
    return chosen or [()]


def check_hydra_key(override: Override) -> None:
    """Raise ``UserError`` for a key of Hydra's that names places to search or classes to build."""
    key = override.key_or_group
    if top_of(override) != HYDRA:
        return
    if not key.startswith(HYDRA_KEYS) or any(part.startswith("_") for part in key.split(".")):
        raise UserError(
            f"{override.input_line}: is not supported. Of Hydra's keys those of launchers and sweepers are. "
            "To use a folder of YAML files, pass --config-dir"
        )
    check_targets(override.value(), key)


def _check_file(workload: Mapping[str, Any], inside: Sequence[Override]) -> None:
    changed = {override.key_or_group: override.value() for override in inside}
    path = changed.get("workload.path")
    if path is None or "workload.name" in changed or not isinstance(workload, Mapping) or not workload.get("name"):
        return
    if path != workload.get("path"):
        raise UserError(
            f"workload.path={path}: workload={workload['name']} always reads {workload.get('path')}. To use your file, "
            f"pass workload=trace workload.path={path}; to compare both, workload=trace "
            f"workload.path={path},{workload.get('path')}"
        )


@cache
def _plain_value(text: str) -> Any:
    override = parse(text)
    typed = OmegaConf.structured(ConfigSchema)
    try:
        OmegaConf.update(typed, override.key_or_group, override.value())
        value = OmegaConf.select(typed, override.key_or_group)
    except OmegaConfBaseException as error:
        raise UserError(error_line(error, text)) from error
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with interpolations resolved and targets checked; runs share the mappings of equal groups."""
    resolved = dict(values)
    for group in GROUP_KEYS:
        text = json.dumps(values[group])
        named = {*INTERPOLATED.findall(text)} & {*values} - {group} if INTERPOLATION in text else set()
        around = json.dumps({name: values[name] for name in sorted(named)}) if named else "{}"
        # A resolver, such as ``oc.env``, may give another value the next time.
        resolve = _resolved_group.__wrapped__ if "${oc." in text else _resolved_group
        resolved[group] = resolve(group, text, around)
    return resolved


@cache
def _resolved_group(group: str, text: str, around: str) -> Any:
    """Return a group's values, from their JSON and that of other keys ``around`` that interpolations name."""
    values = json.loads(text)
    if INTERPOLATION in text:
        try:
            whole = OmegaConf.create({**json.loads(around), group: values})
            values = OmegaConf.to_container(whole, resolve=True)[group]  # type: ignore[index,call-overload]
        except OmegaConfBaseException as error:
            raise UserError(error_line(error, group)) from error
    check_targets(values, group)
    return values


@cache
def _yaml_values(file: Path) -> Mapping[str, Any]:
    return yaml.safe_load(file.read_text()) or {}


def _tree_hash(trees: Sequence[Path]) -> str:
    """Return a hash of all that compositions depend on, besides their overrides: YAML files, parts and this package."""
    digest = hashlib.sha256(f"hydra {version('hydra-core')}, omegaconf {version('omegaconf')}".encode())
    digest.update(sources_stamp(f"_target_: {__name__}.{Composer.__name__}").encode())
    for folder in trees:
        digest.update(str(folder).encode() + b"\0")
        for file in sorted(map(str, folder.rglob("*.yaml"))):
            digest.update(file.removeprefix(str(folder)).encode() + b"\0" + Path(file).read_bytes() + b"\0")
        parts = [file.read_text() for file in sorted((folder / "strategy").glob("*/*.yaml"))]
        digest.update(sources_stamp("\n".join(parts)).encode())
    return digest.hexdigest()[:16]
