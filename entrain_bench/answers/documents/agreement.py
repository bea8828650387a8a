"""Whether a claim says of its published cells what they say: GPUs, models, data, degrees, place and number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from entrain_bench.answers.documents.claim import Claim, value_of
from entrain_bench.answers.documents.definition import override_key
from entrain_bench.answers.documents.published import PublishedCell, cell_fields, our_names
from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices

# What a run without further overrides has.
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
# How a text says that something is open, and by what word it names each part of a cell.
OPEN = re.compile(r"not (?:been )?(?:stated|known|given|named)|unknown")
NAMES = {
    "gpus": r"\bGPUs\b",
    "model": r"\bmodels?\b(?! size)",
    "data": r"\bdata\b",
    "global_batch": r"\bglobal batch\b",
    "microbatch_size": r"\bmicrobatch size\b",
    "tp": r"\bdegrees\b|\blayouts?\b",
    "llm_tp": r"\bdegrees\b|\blayouts?\b",
}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """GPUs of a cluster, and the memory of one in bytes, as its YAML states them."""

    num_gpus: int
    memory_bytes: float


def cluster_facts(overrides: Sequence[str]) -> ClusterFacts:
    """The cluster that overrides choose. A changed device memory does not count: it is of no published device."""
    values = {override_key(text): text.partition("=")[2] for text in overrides}
    name = _chosen(overrides)
    if name not in choices("cluster"):
        raise unknown_choice("cluster", name, choices("cluster"))
    gpus_per_node, num_nodes, memory = _cluster(name)
    return ClusterFacts(gpus_per_node * int(values.get("cluster.num_nodes", num_nodes)), memory)


def _chosen(overrides: Sequence[str]) -> str:
    """The cluster that overrides choose; one of a user's folder is not among ``choices``."""
    names = [text.partition("=")[2] for text in overrides if override_key(text) == "cluster"]
    return names[-1] if names else DEFAULT_CLUSTER


@cache
def _cluster(name: str) -> tuple[int, int, float]:
    cluster = compose(f"cluster={name}").cluster
    return int(cluster["gpus_per_node"]), int(cluster["num_nodes"]), float(cluster["device"]["memory_bytes"])


def mismatches(claim: Claim) -> list[str]:
    """Return a line for each statement of a claim that its cells contradict; none for a claim without cells.

    A claim may name in ``differs`` what the published setting cannot have. It is a mismatch, too, to name what does not
    differ.
    """
    if not claim.cells:
        return []
    found = dict(_differences(claim))
    lines = [text for key, text in found.items() if key not in claim.differs]
    lines += [f"differs.{key}: the setting has what the cells state" for key in claim.differs if key not in found]
    return [*lines, *_wrongly_open(claim)]


def _differences(claim: Claim) -> Iterator[tuple[str, str]]:
    cells = [*claim.cells, *claim.per]
    if claim.value:
        value, unit = value_of(claim.cells, claim.per, claim.judged_by, bool(claim.published.to))
        if (claim.value, claim.unit) != (value, unit):
            yield "value", f"value={[*claim.value]} {claim.unit}: the cells say {[*value]} {unit}"
    for cell in cells:
        if not any(cell.where.startswith(place.strip()) or cell.where in place for place in claim.where.split(";")):
            yield "where", f"where={claim.where}: {cell.id} is in {cell.where}"
    sides = claim.published.sweeps
    gpus = {cluster_facts(side).num_gpus for side in sides if _chosen(side) in choices("cluster")}
    stated = [limits for cell in cells for limits in _gpus(cell.gpus)]
    if stated and not all(any(low <= number <= high for low, high in stated) for number in gpus):
        texts = ", ".join(dict.fromkeys(cell.gpus for cell in cells if cell.gpus))
        yield "gpus", f"cluster: {', '.join(map(str, sorted(gpus)))} GPUs, the cells say {texts}"
    for key, group, texts in (("model", "models", "model"), ("data", "data", "data")):
        yield from _names(
            key, our_names(claim.config_dir)[group], {getattr(cell, texts) for cell in cells} - {""}, sides
        )
    first = claim.cells[0]
    plain = {key: str(value) for key, value in cell_fields(first, claim.config_dir).items()}
    if not claim.published.is_of_two:
        for index, side in enumerate(sides):
            overrides = {override_key(text): text.partition("=")[2] for text in side}
            for key, text in _settings(first, plain, of=index == 0):
                if key in overrides and not _same(overrides[key], text):
                    yield key, f"{key}={overrides[key]}: {first.id} states {text}"


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
    key: str, names: Mapping[str, tuple[str, ...]], theirs: Iterable[str], sides: Sequence[Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Models or data of the published runs that are not those of the cells."""
    allowed = {name for text in theirs for name in names.get(text, ())}
    lacking = [text for text in theirs if text not in names]
    chosen = "workload" if key == "data" else key
    ours = {
        name
        for side in sides
        for text in side
        if override_key(text) == chosen
        for name in text.partition("=")[2].split(",")
    }
    if lacking:
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


def _wrongly_open(claim: Claim) -> Iterator[str]:
    """Yield sentences that call a setting open though a cell states it."""
    stated = claim.paper_setting
    for cell in (*claim.cells, *claim.per):
        stated = stated.replace(cell.words, "")
    for text in (stated, claim.published.words):
        for sentence in re.split(r"(?<=[.;])\s", text):
            if not OPEN.search(sentence):
                continue
            for key, pattern in NAMES.items():
                known = [cell.id for cell in claim.cells if getattr(cell, key, "") or key in cell.setting]
                if known and re.search(pattern, sentence, re.IGNORECASE):
                    yield f"{sentence!r}: {known[0]} states {key.replace('_', ' ')}"
