"""Hydra's own application over the configuration tree: its options, and its launchers and sweepers."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import OverrideType
from omegaconf import DictConfig, OmegaConf

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import HYDRA, IGNORED, Composer, check_hydra_key
from entrain_bench.config.given import with_plan
from entrain_bench.config.grammar import NoKeys, Request
from entrain_bench.config.line import MULTIRUN, OF_COMPLETION
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import GROUP_KEYS, PLAIN_KEYS, RunConfig
from entrain_bench.config.sources import SCHEME, SWEEPER, add_config_dir, compose_values, in_tree
from entrain_bench.config.targets import check_targets
from entrain_bench.config.tree import CONFIG_MODULE, CONFIG_NAME

# Options that compose no run.
OF_NO_RUN = ("--hydra-help", OF_COMPLETION)
# Sweeps, whose other keys are values of a run.
OF_SWEEPER = (SWEEPER, "hydra.sweeper")


def has_sweeper(overrides: Sequence[str]) -> bool:
    """Return whether overrides choose a sweeper, or change one: it decides which values of keys are tried."""
    return any(text.lstrip("+~").startswith(OF_SWEEPER) for text in overrides)


def run_hydra(request: Request[NoKeys]) -> int:
    """Let Hydra answer its options, or run a sweep; returns its exit code. ``UserError`` for wrong overrides."""
    overrides = with_plan(request.overrides)
    for text in overrides:
        check_hydra_key(parse(text))
    # Hydra cannot delete a key that every run has: it is the default's.
    deleted = {parse(text).key_or_group for text in overrides if parse(text).type is OverrideType.DEL} & PLAIN_KEYS
    texts = [text for text in overrides if parse(text).key_or_group not in deleted]
    texts = [text for text in texts if not text.lstrip("+~").startswith(IGNORED)]
    if not {*request.hydra} & {*OF_NO_RUN}:
        shared = [text for text in texts if not parse(text).is_sweep_override()]
        Composer(request.config_dir).run(shared if request.multirun else texts)
        compose_values(
            [text for text in texts if text.lstrip("+~").startswith(HYDRA)], request.config_dir, with_hydra=True
        )
    add_config_dir(request.config_dir)
    before = sys.argv
    # Hydra wants options before overrides.
    sys.argv = ["entrain-bench", *([MULTIRUN] if request.multirun else []), *request.hydra, *texts]
    try:
        with in_tree(request.config_dir):
            run_cell()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    finally:
        sys.argv = before
    return 0


@hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)
def run_cell(composed: DictConfig) -> float:
    """Execute one run of a sweep; returns its iteration time in seconds, infinity if it has none. Never raises."""
    from entrain_bench.commands.watch import Watch, say
    from entrain_bench.records.cells import Cell
    from entrain_bench.records.records import Results
    from entrain_bench.run.cells import run_cells

    job = HydraConfig.get()
    config_dir = ""
    for source in job.runtime.config_sources:
        # In a process of a launcher's, too.
        if source.provider == SCHEME and source.schema == "file":
            config_dir = source.path
            add_config_dir(config_dir)
    try:
        values = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(values, dict)
        check_targets({group: values[group] for group in GROUP_KEYS})
        config = RunConfig.from_values({str(key): value for key, value in values.items()})
        cell = replace(Cell.of(job.overrides.task, config, config_dir), timeline=job.job.num == 0)
        results = Results(Path(config.results_dir))
        for done in run_cells([cell], results, retry_failed=config.retries_failed):
            Watch(1)(done)
        record = results.read(cell.key)
        return float(record.metrics["iteration_time_s"]) if record and record.status == "ok" else math.inf
    except UserError as error:
        say(f"not recorded: {error}")
        return math.inf
