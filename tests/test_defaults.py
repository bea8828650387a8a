"""What stands in a YAML and as the default of the class it names is the same, wherever both say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import hydra.utils
import pytest
import yaml

from entrain_bench.config.tree import config_tree


def nodes(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        if "_target_" in value:
            yield value
        for part in value.values():
            yield from nodes(part)
    elif isinstance(value, list):
        for part in value:
            yield from nodes(part)


TREE = config_tree()
TEXTS = {path.relative_to(TREE).as_posix(): path.read_text() for path in sorted(TREE.rglob("*.yaml"))}
NODES = {name: [*nodes(yaml.safe_load(text))] for name, text in TEXTS.items() if "_target_" in text}
# What tells the choices of one class apart is meant to differ from its default.
TRACES = ("chartqa", "chartqa_qa", "coco", "librispeech", "mathvision", "nextqa", "opencqa_ocr", "sroie")
SYNTHETIC = ("synthetic", "synthetic_av", "uniform")
FIELDS = {"audio", "images", "seconds", "text", "video"}
MEANT = {
    # A trace of the user's takes the name of its file; ours have names of their own.
    **{f"workload/{name}.yaml": {"name"} for name in TRACES},
    # The class alone makes text only and no correlation: these say what else a sample has.
    **{f"workload/{name}.yaml": {"modalities"} for name in SYNTHETIC},
    # The stand-in for SynthChartNet is another trace with smaller images.
    "workload/synthchartnet_like.yaml": {"name", "max_image_tokens"},
    # The stand-in for LLaVA-150k is another trace with other texts.
    "workload/llava_150k_like.yaml": {"name", "text"},
    # The same of pixels, which are images or video.
    "workload/dflop_multi.yaml": {"images"},
    "workload/dflop_single.yaml": {"images"},
    "workload/dflop_video.yaml": {"video"},
    # The class alone reads no field; these find the usual ones.
    **{f"source/{name}.yaml": FIELDS for name in ("parquet", "manifest")},
    "source/llava.yaml": FIELDS,
    # FlexSP's weights are sharded, and its solver chooses the number of microbatches.
    "strategy/planner/flexsp.yaml": {"sharded", "rounds"},
    # DEP, of the same module, encodes more at a time: it keeps no pass.
    "strategy/assigner/mdp.yaml": {"pass_tokens"},
    "workload/synthetic.yaml": {"modalities", "rank_correlation"},
    "workload/synthetic_av.yaml": {"modalities", "rank_correlation"},
}


def defaults_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Default of every field that has one, of the class that a node names."""
    cls, found = hydra.utils.get_object(node["_target_"]), {}
    for field in fields(cls) if is_dataclass(cls) else ():
        if field.default is not MISSING:
            found[field.name] = field.default
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    return found


def agree(value: Any, default: Any) -> bool:
    """Whether a YAML's value is the default; a node of its own is compared by itself, so its class suffices."""
    if isinstance(value, dict) and "_target_" in value:
        return type(default) is hydra.utils.get_class(value["_target_"])
    if isinstance(value, bool) or isinstance(default, bool):
        return value is default
    return bool((tuple(value) if isinstance(value, list) else value) == default)


@pytest.mark.parametrize("name", NODES)
def test_a_yaml_gives_the_defaults_of_its_class(name: str) -> None:
    stated = [
        (key, node[key], default) for node in NODES[name] for key, default in defaults_of(node).items() if key in node
    ]
    assert {key for key, value, default in stated if not agree(value, default)} == MEANT.get(name, set())


def test_there_is_something_to_compare() -> None:
    assert sum(key in node for found in NODES.values() for node in found for key in defaults_of(node)) >= 58
