"""The figures: modules, and sweeps that a module draws; of the suite, and in a folder of the user's."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import entrain_bench.figures as package
from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.config.comments import first_sentence
from entrain_bench.config.targets import import_file
from entrain_bench.config.tree import config_tree
from entrain_bench.figures._rows import drawing_of

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
    # What it defines can be pickled only if it is found there.
    sys.modules[name] = module
    for member in ("EXPERIMENT", "RUNS", "load", "draw"):
        if not hasattr(module, member):
            raise UserError(f"{path}: must define EXPERIMENT, RUNS, load and draw; {member} is missing")
    return module
