"""Whether a claim's setting has what its published cells state: GPUs, models, data, degrees and other keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from entrain_bench.answers.documents.definition import override_key
from entrain_bench.answers.documents.published import PublishedCell, cell_fields, our_names
from entrain_bench.answers.documents.sides import ClaimSetting
from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices

# The cluster of a run without further overrides.
DEFAULT_CLUSTER = "a40x64"
# Keys of a cell's setting by the configuration key that states them. A degree has a prefix: whose it is.
SETTINGS = {
    "global_batch": "global_batch",
    "microbatch_size": "microbatch_size",
    "seq_len": "workload.sequence_tokens",
    "vision_share": "workload.vision_share",
    "encoder_stages": "strategy.planner.encoder_stages",
    "enc_tp": "strategy.planner.encoder_tp",
}
DEGREES = {f"layout.{degree}": degree for degree in ("tp", "cp", "pp", "dp")}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """GPUs of a cluster, and the memory of one in bytes, as its YAML states them."""

    num_gpus: int
    memory_bytes: float


def cluster_facts(overrides: Sequence[str]) -> ClusterFacts:
    """The cluster that overrides choose. A changed device memory does not count: it is of no published device."""
    values = _values(overrides)
    name = values.get("cluster", DEFAULT_CLUSTER)
    if name not in choices("cluster"):
        raise unknown_choice("cluster", name, choices("cluster"))
    gpus_per_node, num_nodes, memory = _cluster(name)
    return ClusterFacts(gpus_per_node * int(values.get("cluster.num_nodes", num_nodes)), memory)


@cache
def _cluster(name: str) -> tuple[int, int, float]:
    cluster = compose(f"cluster={name}").cluster
    return int(cluster["gpus_per_node"]), int(cluster["num_nodes"]), float(cluster["device"]["memory_bytes"])


def mismatches(
    cells: Sequence[PublishedCell],
    per: Sequence[PublishedCell],
    setting: ClaimSetting,
    differs: Mapping[str, str],
    config_dir: str | None = None,
) -> list[str]:
    """Return a line for each statement of the cells that a claim's published setting contradicts; none without cells.

    Args:
        cells: the cells of the claim.
        per: the cells that their numbers are divided by.
        setting: as published.
        differs: what the setting cannot have, with the reason. It is a mismatch to name what does not differ.
        config_dir: the user's folder that the claim is in, if any.
    """
    if not cells:
        return []
    found = dict(_differences([*cells, *per], setting, config_dir))
    lines = [text for key, text in found.items() if key not in differs]
    return lines + [f"differs.{key}: the setting has what the cells state" for key in differs if key not in found]


def _differences(
    cells: Sequence[PublishedCell], setting: ClaimSetting, config_dir: str | None
) -> Iterator[tuple[str, str]]:
    sides = [_values(sweep) for sweep in setting.sweeps]
    known = [sweep for sweep in setting.sweeps if _values(sweep).get("cluster", DEFAULT_CLUSTER) in choices("cluster")]
    gpus = {cluster_facts(sweep).num_gpus for sweep in known}
    stated = [limits for cell in cells for limits in _gpus(cell.gpus)]
    if stated and not all(any(low <= number <= high for low, high in stated) for number in gpus):
        texts = ", ".join(dict.fromkeys(cell.gpus for cell in cells if cell.gpus))
        yield "gpus", f"cluster: {', '.join(map(str, sorted(gpus)))} GPUs, the cells say {texts}"
    names = our_names(config_dir)
    yield from _names("model", "model", names["models"], {cell.model for cell in cells} - {""}, sides)
    yield from _names("data", "workload", names["data"], {cell.data for cell in cells} - {""}, sides)
    if len(setting.situations) > 1:
        return
    first = cells[0]
    plain = {key: str(value) for key, value in cell_fields(first, config_dir).items()}
    for index, overrides in enumerate(sides):
        for key, text in _settings(first, plain, of=index == 0):
            if key in overrides and not _same(overrides[key], text):
                yield key, f"{key}={overrides[key]}: {first.id} states {text}"


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {override_key(text): text.partition("=")[2] for text in overrides}


def _gpus(text: str) -> list[tuple[int, float]]:
    """Numbers of GPUs that a cell allows, as ranges; none if it states none."""
    numbers = [int(number) for number in _NUMBER.findall(text.replace(",", ""))]
    if not numbers:
        return []
    if "up to" in text:
        return [(1, numbers[0])]
    if "over" in text:
        return [(numbers[0], float("inf"))]
    return [(numbers[0], numbers[-1])] if " to " in text else [(number, number) for number in numbers]


def _names(
    key: str,
    chosen: str,
    names: Mapping[str, Sequence[str]],
    theirs: set[str],
    sides: Sequence[Mapping[str, str]],
) -> Iterator[tuple[str, str]]:
    """Models or data of the published runs that are not those of the cells."""
    allowed = {name for text in theirs for name in names.get(text, ())}
    ours = {name for side in sides if chosen in side for name in side[chosen].split(",")}
    if lacking := [text for text in theirs if text not in names]:
        yield key, f"{key}: {', '.join(sorted(lacking))} has no name of ours (names.yaml)"
    elif allowed and not ours <= allowed:
        yield key, f"{chosen}={','.join(sorted(ours))}: the cells say {', '.join(sorted(theirs))}"


def _settings(cell: PublishedCell, plain: Mapping[str, str], of: bool) -> Iterator[tuple[str, str]]:
    """Configuration keys that a cell states of one side, with their values."""
    yield from ((ours, plain[theirs]) for theirs, ours in SETTINGS.items() if theirs in cell.setting and of)
    has_base = any(key.startswith("base_") for key in cell.setting)
    prefixes = ("", "llm_", "shared_") if of else ("base_llm_", "base_shared_") if has_base else ("",)
    for key, degree in DEGREES.items():
        for prefix in prefixes:
            if f"{prefix}{degree}" in cell.setting:
                yield key, plain[f"{prefix}{degree}"]


def _same(ours: str, theirs: str) -> bool:
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return ours == theirs or ours == "null"
