"""Find, load, draw and write figures of the suite and of your folder; ``<name>.json`` has caption and command."""

import ast
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import entrain_bench.figures as package
from entrain_bench.answers.commands import command_line
from entrain_bench.answers.documents.posterior import posterior_runs, posterior_sweeps, read_plan
from entrain_bench.answers.labels import MODEL_ERROR, cost_source
from entrain_bench.answers.text import consecutive
from entrain_bench.base.errors import TRACEBACK_VARIABLE, UserError, explain, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.config.comments import first_sentence
from entrain_bench.config.figures import FOLDER, UNLABELLED, Sweeps, drawing_of, sweeps_of
from entrain_bench.config.targets import import_file
from entrain_bench.config.tree import config_tree
from entrain_bench.figures._style import Picture, empty_figure, styled
from entrain_bench.records.cells import Cell
from entrain_bench.run.study import Output, Study, by_strategy

# Folder of the user's modules, and of sweeps that name a module as their ``figure.drawing``.
MODULES = "figures"


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
        sweeps = (path for path in (tree / FOLDER).glob("*.yaml") if drawing_of(path))
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
    # Pickle looks there for the module's definitions.
    sys.modules[name] = module
    for member in ("EXPERIMENT", "RUNS", "load", "draw"):
        if not hasattr(module, member):
            raise UserError(f"{path}: must define EXPERIMENT, RUNS, load and draw; {member} is missing")
    return module


def cells_of(sweeps: Sweeps, study: Study) -> Sequence[Cell] | Mapping[str, Sequence[Cell]]:
    """The cells of a figure, by the labels of its rows if it has any."""
    cells = {label: study.cells(*sweep) for label, sweep in sweeps.items()}
    return cells.get(UNLABELLED, cells)


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
    """Draw and write ``figures/<name>.{pdf,png,csv,json}``; returns missing runs, if any.

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
    """The files of a figure (``Picture``), by suffix; the same data gives the same bytes."""
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
    values = {name: [getattr(config, name) for config in configs] for name in ("global_batch", "microbatch_size")}
    values |= {f"layout.{name}": [each.layout.values[name] for each in configs] for name in ("tp", "cp", "pp", "dp")}
    named = {"cluster": [one.cluster["name"] for one in configs], "harness": [one.harness["label"] for one in configs]}
    setting = {name: [*dict.fromkeys(several)] for name, several in (named | values).items()}
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
        costs and f"Costs: {costs}.",
        MODEL_ERROR.sentence if costs and "simulate" in setting.get("harness", ()) else "",
    )
    content = {
        "command": command,
        "caption": " ".join(filter(None, parts)),
        "setting": {name: [*values] for name, values in setting.items()},
        "seeds": [*seeds],
        "cost_source": dict(sorted(sources.items())),
    }
    return (json.dumps(content, indent=1) + "\n").encode()
