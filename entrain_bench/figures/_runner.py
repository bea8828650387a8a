"""Figures of the suite and of a folder of the user's: found, with their sweeps for the figure's own job or the user's.

Each is loaded, drawn and written, with a caption and the command that draws it again in ``<name>.json``.
"""

import ast
import hashlib
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from hydra.core.override_parser.types import Glob

import entrain_bench.figures as package
from entrain_bench.answers.commands import command_line
from entrain_bench.answers.documents.mechanisms import row_label
from entrain_bench.answers.documents.posterior import posterior_runs, posterior_sweeps, read_plan
from entrain_bench.answers.labels import cost_source
from entrain_bench.answers.text import consecutive, listing
from entrain_bench.base.errors import TRACEBACK_VARIABLE, UserError, explain, require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.config.comments import first_sentence
from entrain_bench.config.compose import NARROWED
from entrain_bench.config.overrides import parse, swept_keys
from entrain_bench.config.targets import import_file
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.figures._style import MODEL_ERROR, Picture, empty_figure, styled
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import labels_of
from entrain_bench.run.study import Output, Study, SweepOverrides, by_strategy

# Folder of the user's modules, and of sweeps that name a module as their ``figure.drawing``.
MODULES = "figures"
SWEEPS = "figure"


def discover(config_dir: str | None = None) -> dict[str, str]:
    """Every figure and its first line, not imported; ``UserError`` for one of the user's called as one of ours."""
    return {name: _summary(path) for name, path in _files(config_dir).items()}


def module_of(name: str, config_dir: str | None = None) -> tuple[ModuleType, str]:
    """The module that draws a figure, and its sweep's YAML; ``UserError`` for one that cannot be imported."""
    files = _files(config_dir)
    if files[name].suffix == ".py":
        module = _imported(files[name])
        return module, module.EXPERIMENT
    drawing = drawing_of(files[name])
    if drawing not in files or files[drawing].suffix != ".py":
        modules = [each for each, path in files.items() if path.suffix == ".py"]
        raise unknown_choice(f"{files[name]}: figure.drawing", drawing, modules)
    return _imported(files[drawing]), name


def _files(config_dir: str | None) -> dict[str, Path]:
    """The module of every figure, or the YAML of a sweep that another figure's module draws."""
    places = [(Path(package.__path__[0]), config_tree())]
    if config_dir is not None:
        places.append((Path(config_dir, MODULES), Path(config_dir)))
    known = dict[str, Path]()
    for modules, tree in places:
        sweeps = (path for path in (tree / SWEEPS).glob("*.yaml") if drawing_of(path))
        for path in sorted((*modules.glob("[!_]*.py"), *sweeps), key=lambda path: path.stem):
            if path.stem in known:
                raise UserError(f"{path}: there is a figure {path.stem}; must have another name")
            known[path.stem] = path
    return known


def _summary(path: Path) -> str:
    if path.suffix == ".yaml":
        return first_sentence(path)
    try:
        return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: not Python: {error.msg}") from error


def _imported(path: Path) -> ModuleType:
    if path.parent == Path(package.__path__[0]):
        return importlib.import_module(f"{package.__name__}.{path.stem}")
    name = f"{package.__name__}._theirs_{path.stem}"
    module = import_file(path, name)
    # Pickle looks there for what the module defines.
    sys.modules[name] = module
    for member in ("EXPERIMENT", "RUNS", "load", "draw"):
        if not hasattr(module, member):
            raise UserError(f"{path}: must define EXPERIMENT, RUNS, load and draw; {member} is missing")
    return module


# The sweeps of a figure by the labels of its rows; one sweep without a label if it has none.
type Sweeps = Mapping[str, SweepOverrides]
UNLABELLED = ""


def rows_of(experiment: str, config_dir: str | None = None) -> dict[str, SweepOverrides]:
    """Overrides of every row of ``experiments/figure/<experiment>.yaml`` by its label; ``UserError`` for others.

    Of a list of mappings every combination is a row.
    """
    rows = (_yaml(experiment, config_dir).get("figure") or {}).get("rows", {})
    if isinstance(rows, list):
        rows = {
            row_label([label for label, _ in chosen]): [text for _, texts in chosen for text in texts]
            for chosen in product(*(axis.items() for axis in rows))
        }
    for label, overrides in rows.items():
        listed = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
        require(listed, f"figure.rows.{label}", overrides, "a list of overrides")
    return {str(label): tuple(overrides) for label, overrides in rows.items()}


def cells_of(sweeps: Sweeps, study: Study) -> Sequence[Cell] | Mapping[str, Sequence[Cell]]:
    """The cells of a figure, by the labels of its rows if it has any."""
    cells = {label: study.cells(*sweep) for label, sweep in sweeps.items()}
    return cells.get(UNLABELLED, cells)


def drawing_of(path: Path) -> str:
    """The figure whose module draws the sweep of a YAML of the user's; empty if none is named."""
    values = yaml.safe_load(path.read_text()) or {}
    return str((values.get("figure") or {}).get("drawing") or "")


def _yaml(experiment: str, config_dir: str | None) -> dict[str, Any]:
    folders = [config_tree(), *([Path(config_dir)] if config_dir else [])]
    files = [file for folder in folders if (file := folder / "figure" / f"{experiment}.yaml").is_file()]
    require(bool(files), "EXPERIMENT", experiment, "the name of a YAML in figure/")
    values: dict[str, Any] = yaml.safe_load(files[0].read_text())
    return values


# Keys of Hydra, and sweeps of other figures.
NOT_OF_A_RUN = ("figure", "hydra")
# Groups of which a figure can tell several entries apart that differ inside.
TRACED = ("workload", "model")
HASH_DIGITS = 8
MAX_NAME = 60


def sweeps_of(experiment: str, config_dir: str | None = None, overrides: Sequence[str] = ()) -> Sweeps:
    """The sweeps of a figure narrowed or changed by overrides of the user's; others are added.

    Values of keys of ``NARROWED`` select among the figure's own; where one is not among them, they replace those.
    ``UserError`` for other keys whose values the figure compares, and for several values of other keys.
    """
    content = _yaml(experiment, config_dir) if overrides else {}
    rows = rows_of(experiment, config_dir)
    # A file without options of the drawing is of the package ``hydra.sweeper.params``.
    params = content["hydra"]["sweeper"]["params"] if "hydra" in content else content
    compared = {key: str(value) for key, value in params.items() if any(swept_keys([f"{key}={value}"]).values())}
    compared |= {key: "in its rows" for row in rows.values() for key in swept_keys(row)}
    aside = list[str]()
    for text in overrides:
        key = parse(text).key_or_group
        _check(key, text)
        values = _values(text, config_dir)
        in_rows = {each for row in rows.values() for each in row if parse(each).key_or_group == key}
        own = (in_rows, _values(f"{key}={params.get(key, '')}", config_dir))
        if key in NARROWED and any(values <= known for known in own):
            rows = {label: row for label, row in rows.items() if values & {*row} or not in_rows & {*row}}
            continue
        inside = [other for other in compared if other.startswith(f"{key}.")]
        for other in inside or ([key] if key in compared and (key not in NARROWED or in_rows) else []):
            stated = f"figure {experiment} already compares values of {other} ({compared[other]})"
            raise UserError(f"{key}: {stated}. Leave it out")
        aside += [f"~{other}" for other in params if other.startswith(f"{key}.")]
    # The figure's name comes last: MLflow has the figure's own runs under it.
    last = (*aside, f"figure={experiment}")
    given = swept_keys(overrides)
    return {
        label: (*(text for text, key in zip(overrides, given, strict=True) if key not in swept_keys(row)), *last, *row)
        for label, row in (rows or {UNLABELLED: ()}).items()
    }


def _values(text: str, config_dir: str | None) -> set[str]:
    """The override of every value of a list; of ``glob`` of every choice that there is."""
    override = parse(text)
    key = override.get_key_element()
    if override.is_sweep_override() and isinstance(override.value(), Glob):
        return {f"{key}={name}" for name in choices(key, config_dir)}
    return {f"{key}={value}" for value in override.sweep_string_iterator()} if override.is_discrete_sweep() else {text}


def file_name(figure: str, cells: Sequence[Cell], overrides: Sequence[str]) -> str:
    """Return the name of a figure's files: the figure, its workloads, and a hash of the overrides."""
    workloads = "-".join(dict.fromkeys(str(labels_of(cell.config)["workload"]) for cell in cells))
    digest = hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:HASH_DIGITS]
    return f"{figure}_{re.sub(r'[^\w.-]+', '-', workloads)[:MAX_NAME]}_{digest}"


def check_names(cells: Sequence[Cell]) -> None:
    """Raise ``UserError`` for different workloads, or models, of one name: a figure could not tell them apart."""
    for group in TRACED:
        seen: dict[str, object] = {}
        for cell in cells:
            name = str(labels_of(cell.config)[group])
            values = getattr(cell.config, group)
            if seen.setdefault(name, values) != values:
                raise UserError(f"{group}: two entries share the name {name}. Give each entry a unique name")


def _check(key: str, text: str) -> None:
    group = re.split(r"[./]", key)[0]
    if group in NOT_OF_A_RUN:
        raise UserError(f"{key}: is not a key of a run. Leave it out")
    if key not in NARROWED and group not in TRACED and parse(text).is_sweep_override():
        raise UserError(f"{key}: must be one value; only {listing(NARROWED)} take several in a figure")


# The last is the sidecar.
SUFFIXES = ("pdf", "png", "csv", "json")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure (``name`` is of its files), the sweeps of its cells, and the arguments that draw it again.

    ``title`` is that of another figure's sweep; empty: the module's first line.
    """

    name: str
    module: ModuleType
    sweeps: Sweeps
    command: Sequence[str]
    title: str = ""

    @property
    def output(self) -> Output:
        """The output that draws it."""
        runs = [*self.sweeps.values()] if self.module.RUNS else []
        files = [f"figures/{self.name}.{suffix}" for suffix in SUFFIXES]
        return Output(
            self.name,
            runs,
            lambda study: draw_figure(self, study),
            files,
            self._timelines,
            reads=[*self.sweeps.values()],
            module=self.module.__name__,
            details=self.command,
            further=posterior_sweeps if self.shows_draws else lambda _: (),
        )

    @property
    def shows_draws(self) -> bool:
        """Whether it shows posterior runs; those are of the sweep alone, not of the user's jobs."""
        return getattr(self.module, "DRAWS", False) and [*self.sweeps.values()] == [(f"figure={read_plan().sweep}",)]

    def _timelines(self, study: Study) -> list[list[Cell]]:
        if not getattr(self.module, "TIMELINES", False):
            return []
        return [group for sweep in self.sweeps.values() for group in by_strategy(study.cells(*sweep))]


def figure_output(name: str, config_dir: str | None = None) -> Output:
    """The figure of that name, of ours or of a folder of the user's."""
    module, experiment = module_of(name, config_dir)
    title = discover(config_dir)[name]
    return Drawing(name, module, sweeps_of(experiment, config_dir), ["figures", name], title).output


def draw_figure(drawing: Drawing, study: Study) -> str:
    """Draw and write ``figures/<name>.{pdf,png,csv,json}``; returns what is missing from it, if anything.

    A figure without data says so, and does not keep others from theirs.
    """
    problem = ""
    message = ""
    cells = list[Cell]()
    module = drawing.module
    try:
        cells = [cell for sweep in drawing.sweeps.values() for cell in study.cells(*sweep)]
        if module.RUNS:
            problem = "; ".join(filter(None, (study.problem(*sweep) for sweep in drawing.sweeps.values())))
        data = module.load(cells_of(drawing.sweeps, study), study.results)
        drawn = [posterior_runs(study)] if drawing.shows_draws else []
        with styled():
            picture = Picture(*module.draw(data, *drawn))
        files = files_of(picture)
        message = picture.message
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        problem = " ".join(str(error).split()) if isinstance(error, UserError) else explain(error)
        reason = problem
        files = render(lambda: empty_figure(reason))
    title = drawing.title or (module.__doc__ or "").partition("\n")[0]
    caption = f"{title} {message}".strip()
    files["json"] = sidecar(caption, command_line(drawing.command, study.config_dir), cells)
    for suffix, content in files.items():
        write_atomically(study.results.root / "figures" / f"{drawing.name}.{suffix}", content)
    return problem


def render(draw: Callable[[], tuple[Any, ...]]) -> dict[str, bytes]:
    """The files of what is drawn (``Picture``), by suffix; the same data gives the same bytes."""
    with styled():
        return files_of(Picture(*draw()))


def files_of(picture: Picture) -> dict[str, bytes]:
    """A picture as PDF and PNG, and its table as CSV."""
    with styled():
        pdf = BytesIO()
        png = BytesIO()
        picture.figure.savefig(png, format="png")
        picture.figure.set_layout_engine("none")  # keeps the layout just made
        picture.figure.savefig(pdf, format="pdf", metadata={"CreationDate": None})
    csv = picture.table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode()
    return {"pdf": pdf.getvalue(), "png": png.getvalue(), "csv": csv}


def sidecar(title: str, command: str, cells: Iterable[Cell]) -> bytes:
    """JSON of a figure of these cells: command, caption, values of every key (``setting``), seeds, ``cost_source``."""
    configs = [cell.config for cell in cells]
    setting = {
        "cluster": _distinct(config.cluster["name"] for config in configs),
        "harness": _distinct(config.harness["label"] for config in configs),
        **{
            name: _distinct(getattr(config, name) for config in configs) for name in ("global_batch", "microbatch_size")
        },
        **{f"layout.{name}": _distinct(c.layout.values[name] for c in configs) for name in ("tp", "cp", "pp", "dp")},
    }
    seeds = sorted({config.seed for config in configs})
    sources = {str(config.cluster["name"]): cost_source(config.cluster) for config in configs}
    return described(title, command, setting, seeds, sources)


def described(
    title: str, command: str, setting: Mapping[str, Sequence[Any]], seeds: Sequence[int], sources: Mapping[str, str]
) -> bytes:
    """The same of a figure that is not drawn of cells."""
    texts = {name: ["null" if value is None else str(value) for value in values] for name, values in setting.items()}
    words = ", ".join(f"{name} {' or '.join(each)}" for name, each in texts.items())
    costs = ", ".join(f"{source} ({cluster})" for cluster, source in sorted(sources.items()))
    parts = (
        title,
        words and f"Setting: {words}.",
        f"Seeds: {consecutive(seeds)}." if seeds else "",
        costs and f"Costs: {costs}{f'; {MODEL_ERROR}' if 'simulate' in setting.get('harness', ()) else ''}.",
    )
    content = {
        "command": command,
        "caption": " ".join(filter(None, parts)),
        "setting": {name: [*values] for name, values in setting.items()},
        "seeds": [*seeds],
        "cost_source": dict(sorted(sources.items())),
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
