"""Whether a claim's setting has what its published cells state: GPUs, models, data, degrees and other keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from entrain_bench.answers.documents.definition import override_key
from entrain_bench.answers.documents.published import PublishedCell, cell_fields, our_names
from entrain_bench.answers.documents.sides import ClaimSetting
from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices

# The cluster of a run without further overrides.
DEFAULT_CLUSTER = "a40x64"
# Keys of a cell's setting by the configuration key that states them.
SETTINGS = {
    "global_batch": "global_batch",
    "microbatch_size": "microbatch_size",
    "seq_len": "workload.sequence_tokens",
    "vision_share": "workload.vision_share",
    "encoder_stages": "strategy.planner.encoder_stages",
    "enc_tp": "strategy.planner.encoder_tp",
}
# Prefixes of the degrees in a cell's setting: of the system, and of its baseline.
SYSTEM = ("", "llm_", "shared_")
BASELINE = ("base_llm_", "base_shared_")


def num_gpus(overrides: Sequence[str]) -> int:
    """GPUs of the cluster that overrides choose."""
    values = _values(overrides)
    cluster = _cluster(values.get("cluster", DEFAULT_CLUSTER))
    return int(cluster["gpus_per_node"]) * int(values.get("cluster.num_nodes", cluster["num_nodes"]))


def device_memory_bytes(overrides: Sequence[str]) -> float:
    """Memory of a device of the cluster that overrides choose, as its YAML states it; they may change it."""
    return float(_cluster(_values(overrides).get("cluster", DEFAULT_CLUSTER))["device"]["memory_bytes"])


@cache
def _cluster(name: str) -> Mapping[str, Any]:
    if name not in choices("cluster"):
        raise unknown_choice("cluster", name, choices("cluster"))
    return compose(f"cluster={name}").cluster


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
    differences = dict(_differences([*cells, *per], setting, config_dir))
    lines = [text for key, text in differences.items() if key not in differs]
    return lines + [f"differs.{key}: the setting has what the cells state" for key in differs if key not in differences]


def _differences(
    cells: Sequence[PublishedCell], setting: ClaimSetting, config_dir: str | None
) -> Iterator[tuple[str, str]]:
    sides = [_values(sweep) for sweep in setting.sweeps]
    known = [sweep for sweep in setting.sweeps if _values(sweep).get("cluster", DEFAULT_CLUSTER) in choices("cluster")]
    numbers = sorted({num_gpus(sweep) for sweep in known})
    allowed = [limits for cell in cells for limits in _gpus(cell.gpus)]
    if allowed and not all(any(low <= number <= high for low, high in allowed) for number in numbers):
        texts = ", ".join(dict.fromkeys(cell.gpus for cell in cells if cell.gpus))
        yield "gpus", f"cluster: {', '.join(map(str, numbers))} GPUs, the cells say {texts}"
    names = our_names(config_dir)
    for key, group, chosen in (("model", "models", "model"), ("data", "data", "workload")):
        theirs = sorted({getattr(cell, key) for cell in cells} - {""})
        lacking = [text for text in theirs if text not in names[group]]
        ours = {name for side in sides if chosen in side for name in side[chosen].split(",")}
        if lacking:
            yield key, f"{key}: {', '.join(lacking)} has no name of ours (names.yaml)"
        elif theirs and not ours <= {name for text in theirs for name in names[group][text]}:
            yield key, f"{chosen}={','.join(sorted(ours))}: the cells say {', '.join(theirs)}"
    if len(setting.situations) > 1:
        return
    first = cells[0]
    plain = {key: str(value) for key, value in cell_fields(first, config_dir).items() if key in first.setting}
    for index, values in enumerate(sides):
        for key, text in _stated(plain, of=index == 0):
            if key in values and not _same(values[key], text):
                yield key, f"{key}={values[key]}: {first.id} states {text}"


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {override_key(text): text.partition("=")[2] for text in overrides}


def _gpus(text: str) -> list[tuple[int, float]]:
    """Numbers of GPUs that a cell allows, as ranges; none if it states none."""
    numbers = [int(number) for number in re.findall(r"\d+", text.replace(",", ""))]
    if not numbers:
        return []
    if "up to" in text:
        return [(1, numbers[0])]
    if "over" in text:
        return [(numbers[0], float("inf"))]
    return [(numbers[0], numbers[-1])] if " to " in text else [(number, number) for number in numbers]


def _stated(plain: Mapping[str, str], of: bool) -> Iterator[tuple[str, str]]:
    """Configuration keys that a cell's setting states of one side, with their values."""
    if of:
        yield from ((ours, plain[theirs]) for theirs, ours in SETTINGS.items() if theirs in plain)
    has_base = any(key.startswith("base_") for key in plain)
    prefixes = SYSTEM if of else BASELINE if has_base else ("",)
    for degree in ("tp", "cp", "pp", "dp"):
        yield from ((f"layout.{degree}", plain[key]) for prefix in prefixes if (key := f"{prefix}{degree}") in plain)


def _same(ours: str, theirs: str) -> bool:
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return ours in (theirs, "null")
