"""Plugins of Hydra: where the configuration tree is, and choices of it that no YAML states in full."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.config.given import CLUSTER, MODEL, cluster_values
from entrain_bench.config.hub.files import is_reference, published_model
from entrain_bench.config.overrides import error_line
from entrain_bench.config.parts import PART, with_options
from entrain_bench.config.schema import GROUP_KEYS, register_schema
from entrain_bench.config.targets import trust
from entrain_bench.config.tree import CONFIG_MODULE, CONFIG_NAME, config_tree, folders

LAUNCHER = "hydra/launcher"
SWEEPER = "hydra/sweeper"
# Extras of this package that bring launchers and sweepers: submitit brings submitit_local and submitit_slurm.
EXTRAS = frozenset({"joblib", "optuna", "ray", "submitit"})
SCHEME = "entrain-bench"
# Groups with a list of their choices (``entrain-bench ls``): its name, and choices that need no YAML.
LISTS = {
    "strategy": ("strategies", ""),
    "workload": ("workloads", "Your data: workload=trace workload.path=FILE. "),
    "model": ("models", "Published ones: model=hf:ORG/NAME. "),
    "cluster": ("clusters", "Any number of GPUs: cluster=16xh100. "),
}
# Hydra's state is the process's: one thread composes at a time.
_COMPOSING = Lock()
# The trees while the suite uses Hydra; none otherwise, so that a user's own application of Hydra is left alone.
_folders: list[Path] = []


class MadeChoices(ConfigSource):
    """Parts of strategies with the options of their classes, models of the Hugging Face hub, clusters of any size."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of its paths."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a choice; ``UserError`` for a model that cannot be read, and for a cluster that cannot be made."""
        values = self._values(config_path)
        if values is None:
            raise ConfigLoadError(config_path)
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(values), {"package": None})

    def is_group(self, config_path: str) -> bool:  # noqa: ARG002
        """Return whether a path is a group: its groups are those of the YAML files."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Return whether it makes a choice."""
        return self._reference(config_path) != "" or self._values(config_path) is not None

    def available(self) -> bool:
        """Return whether its tree exists."""
        return Path(self.path).is_dir()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:  # noqa: ARG002
        """Return no choices, because the generated ones cannot be listed."""
        return []

    def _values(self, config_path: str) -> dict[str, Any] | None:
        if reference := self._reference(config_path):
            return published_model(reference)
        path = config_path.lstrip("/").removesuffix(".yaml")
        group, _, name = path.partition("/")
        if group == CLUSTER and "/" not in name:
            return cluster_values(name, Path(self.path))
        file = Path(self.path) / f"{path}.yaml"
        if PART.fullmatch(path) and file.is_file():
            values = yaml.safe_load(file.read_text()) or {}
            filled = with_options(path, values)
            return None if filled == values else filled
        return None

    def _reference(self, config_path: str) -> str:
        group, _, name = config_path.lstrip("/").partition("/")
        if group != MODEL or not is_reference(name):
            return ""
        # Parts of models are in groups of their own: model/tokens/qwen25vl.
        inner = name.partition("/")[0].strip(".")
        is_part = inner and any((tree / MODEL / inner).is_dir() for tree in (Path(self.path), config_tree()))
        return "" if is_part else name


class TreePath(SearchPathPlugin):
    """Puts the user's folder, and choices that are made, on the search path of the suite's compositions."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders in use."""
        for folder in reversed(_folders):
            search_path.prepend(SCHEME, f"{SCHEME}://{folder}")
        for folder in _folders[1:]:
            search_path.append(SCHEME, f"file://{folder}")


def add_config_dir(config_dir: str | None) -> None:
    """Make the Python files of a user's folder visible to imports and targets; ``UserError`` if there is none."""
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir={config_dir}: must be a folder")
        trust(folder)


@contextmanager
def in_tree(config_dir: str | None = None) -> Iterator[None]:
    """Inside, Hydra finds the suite's tree and the user's."""
    register_schema()
    for plugin in (MadeChoices, TreePath):
        Plugins.instance().register(plugin)
    before = [*_folders]
    _folders[:] = folders(config_dir)
    try:
        yield
    finally:
        _folders[:] = before


def compose_values(
    overrides: Sequence[str], config_dir: str | None, config_name: str = CONFIG_NAME, with_hydra: bool = False
) -> dict[str, Any]:
    """Return Hydra's composition with unresolved interpolations; ``UserError`` for overrides it cannot compose."""
    given = " ".join(overrides)
    try:
        with _COMPOSING, in_tree(config_dir), hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            config = hydra.compose(config_name, overrides=[*overrides], return_hydra_config=with_hydra)
        values: Any = OmegaConf.to_container(config, resolve=False)
    except MissingConfigException as error:
        raise _missing_choice(error, config_dir) from error
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{error.problem_mark or 'a YAML'}: not YAML: {error.problem}") from error
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(error_line(error, given)) from error
    return {str(key): value for key, value in values.items()}


def _missing_choice(error: MissingConfigException, config_dir: str | None) -> UserError:
    group, _, name = str(error.missing_cfg_file).partition("/")
    if group in GROUP_KEYS and (Path(name).suffix or name.startswith(("/", "."))):
        named = f"use --config-dir FOLDER {group}=NAME, with NAME.yaml in FOLDER/{group}"
        use = f"use workload=trace workload.path={name}" if group == "workload" else named
        return UserError(f"{group}={name}: must be a name, not a path. For a file, {use}")
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    extra = name.partition("_")[0]
    installed = {other.partition("_")[0] for other in error.options or ()}
    if group in (LAUNCHER, SWEEPER) and extra in EXTRAS - installed:
        return UserError(f"{group}={name}: not installed. Run pip install -e '.[{extra}]'")
    if not error.options:
        return UserError(error_line(error))
    if group not in LISTS:
        return unknown_choice(group, name, error.options)
    file = f"{config_dir or 'FOLDER'}/{group}/{name}.yaml"
    own = f"{file} does not exist" if config_dir else f"To add your own: --config-dir FOLDER, with {file}"
    listed, made = LISTS[group]
    return unknown_choice(group, name, error.options, f"All: entrain-bench ls {listed}. {made}{own}")
