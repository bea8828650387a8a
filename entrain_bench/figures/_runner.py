"""Figures as files: loaded, drawn, written, with a caption and the command that draws them again in ``<name>.json``."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from types import ModuleType
from typing import Any

from entrain_bench.answers.commands import command_line
from entrain_bench.answers.documents.posterior import posterior_runs, posterior_sweeps, read_plan
from entrain_bench.answers.labels import cost_source
from entrain_bench.answers.text import consecutive
from entrain_bench.base.errors import TRACEBACK_VARIABLE, UserError, explain
from entrain_bench.base.files import write_atomically
from entrain_bench.figures._style import MODEL_ERROR, Picture, empty_figure, styled
from entrain_bench.figures._sweeps import Sweeps, cells_of, discover, module_of, sweeps_of
from entrain_bench.records.cells import Cell
from entrain_bench.run.study import Output, Study, by_strategy

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
