"""Hydra's command line, with every mistake reported in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from entrain_bench.base.errors import UserError, unknown_choice, unknown_key
from entrain_bench.config.parts import read_parts
from entrain_bench.config.schema import GROUP_KEYS, ConfigSchema
from entrain_bench.config.targets import trust
from entrain_bench.config.tree import CONFIG_MODULE

CONFIG_NAME = "config"
LAUNCHER = "hydra/launcher"
# Extras of this package that bring launchers: submitit brings submitit_local and submitit_slurm.
LAUNCHER_EXTRAS = frozenset({"joblib", "ray", "submitit"})
RAY_KEYS = ("num_cpus", "address")
_COMPOSING = Lock()


def add_config_dir(config_dir: str | None) -> list[str]:
    """Make a folder of the user's visible: its YAMLs to Hydra, its Python files to imports and targets.

    Returns:
        The override that Hydra's compose needs for it.
    """
    if config_dir is None:
        return []
    folder = Path(config_dir).resolve()
    if not folder.is_dir():
        raise UserError(f"--config-dir={config_dir}: must be a folder")
    trust(folder)
    quoted = str(folder).replace("'", "\\'")
    return [f"hydra.searchpath=['file://{quoted}']"]


@contextmanager
def in_tree() -> Iterator[None]:
    """Inside, Hydra composes of the configuration tree, for one thread at a time: its state is the process's."""
    read_parts()
    with _COMPOSING, initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        yield


@contextmanager
def one_line_errors(
    overrides: Sequence[str],
    config_name: str = CONFIG_NAME,
    keys: Iterable[str] = tuple(ConfigSchema.__dataclass_fields__),
) -> Iterator[None]:
    """Turn Hydra's errors about the overrides of a configuration into a ``UserError`` of one line.

    Args:
        overrides: as given.
        config_name: what they change.
        keys: its top-level keys.
    """
    try:
        yield
    except UserError:
        raise
    except MissingConfigException as error:
        _refuse_path(str(error.missing_cfg_file))
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        extra = name.partition("_")[0]
        installed = {other.partition("_")[0] for other in error.options or ()}
        if group == LAUNCHER and extra in LAUNCHER_EXTRAS - installed:
            raise UserError(f"{group}={name}: not installed. Run pip install -e '.[{extra}]'") from error
        if error.options:
            raise unknown_choice(group or "config", name, error.options) from error
        raise UserError(first_line(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(error, overrides, config_name, keys) from error
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{error.problem_mark or 'a YAML'}: not YAML: {error.problem}") from error
    except ValueError as error:
        raise UserError(f"{' '.join(overrides)}: {first_line(error)}") from error


def _translate(error: Exception, overrides: Sequence[str], config_name: str, keys: Iterable[str]) -> UserError:
    """Hydra's and OmegaConf's messages as one line that names the key."""
    text = f"{error}\n{error.__cause__ or ''}"
    if found := re.search(r"(?:Could not override|Error merging override) '?([^'\n]+?)'?\.?(?:\n|$)", text):
        key, _, value = found.group(1).partition("=")
        if "not in struct" in text or "Key '" in text:
            return _unknown_key(key, overrides, config_name, keys)
        lines = [
            line.strip() for line in text.splitlines() if not re.search("full_key|object_type|Error merging", line)
        ]
        reason = next(filter(None, lines), "does not fit the configuration")
        return UserError(f"{key}={value}: {reason}" if value else f"{key}: {reason}")
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return UserError(f"{found.group(1)}: several values make a sweep. Add --multirun")
    return UserError(first_line(error))


def _refuse_path(missing: str) -> None:
    """Raise ``UserError`` if a group and its missing choice, with a slash between them, name a file."""
    group, _, path = missing.partition("/")
    if group in GROUP_KEYS and (Path(path).suffix or path.startswith(("/", "."))):
        named = f"use --config-dir FOLDER {group}=NAME, with NAME.yaml in FOLDER/{group}"
        use = f"use workload=trace workload.path={path}" if group == "workload" else named
        raise UserError(f"{group}={path}: must be a name, not a path. For a file, {use}")


def _unknown_key(key: str, overrides: Sequence[str], config_name: str, keys: Iterable[str]) -> UserError:
    """The error for a key that does not exist, with its siblings as choices."""
    parent = key.rpartition(".")[0]
    if parent == LAUNCHER.replace("/", "."):
        return _unknown_to_launcher(key, overrides)
    siblings = [*keys]
    if parent:
        try:
            # Choices of groups and the search path; other values may be unknown as well.
            rest = [text for text in overrides if "." not in text.partition("=")[0] or text.startswith("hydra.")]
            with in_tree():
                node = OmegaConf.select(compose(config_name, overrides=rest), parent)
            siblings = [f"{parent}.{k!s}" for k in node if k != "_target_"] if isinstance(node, DictConfig) else []
        except (HydraException, OmegaConfBaseException):
            siblings = []
    return unknown_key(_given(key, overrides), siblings)


def _given(key: str, overrides: Sequence[str]) -> str:
    """The override of a key, as typed."""
    return next((text for text in overrides if text.lstrip("+").startswith(f"{key}=")), key)


def _unknown_to_launcher(key: str, overrides: Sequence[str]) -> UserError:
    """The error for a key that the launcher does not have: most likely the launcher itself was forgotten."""
    chosen = next((text for text in overrides if text.startswith(f"{LAUNCHER}=")), f"{LAUNCHER}=basic")
    other = "ray" if key.rpartition(".")[2] in RAY_KEYS else "joblib"
    return UserError(
        f"{_given(key, overrides)}: {chosen} has no such key. Add a launcher that has it, such as {LAUNCHER}={other}"
    )


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something."""
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {error.message.splitlines()[0]}"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
