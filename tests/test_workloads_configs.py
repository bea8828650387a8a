"""Every workload YAML composes, instantiates and gives valid samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from entrain_bench.errors import UserError
from entrain_bench.instantiate import instantiate
from entrain_bench.specs.tokens import TokenRules

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
NAMES = sorted(path.stem for path in (EXPERIMENTS / "workload").glob("*.yaml"))
RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0)


def workload(name: str, *overrides: str) -> Any:
    with initialize_config_dir(str(EXPERIMENTS), version_base="1.3"):
        config = compose(overrides=[f"+workload={name}", *overrides])
    return instantiate(OmegaConf.to_container(config.workload, resolve=True), "workload", "source")


def test_the_documented_workloads_exist() -> None:
    traces = "chartqa chartqa_qa coco librispeech mathvision nextqa opencqa_ocr sroie trace"
    assert set(NAMES) == {*traces.split(), "synthetic", "synthetic_av", "laion_packed", "uniform"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "trace"])
def test_every_workload_gives_samples(name: str) -> None:
    made = workload(name)
    assert made.name == name
    source = made.source(RULES)
    shapes = source.batch(3, 64, seed=0)
    assert len(shapes) == 64
    assert shapes.llm_tokens.min() >= 1
    assert len(source.draw(10, np.random.default_rng(0))) == 10
    assert len(made.fingerprint()) == (64 if "path" in type(made).__dataclass_fields__ else 0)


def test_trace_of_a_user(tmp_path: Path) -> None:
    pd.DataFrame({"text_chars": [10, 20]}).to_parquet(tmp_path / "mine.parquet")
    made = workload("trace", f"workload.path={tmp_path}/mine.parquet")
    assert made.name == "mine"
    assert sorted(made.source(RULES).batch(0, 2, 0).text_tokens.tolist()) == [3, 5]
    assert workload("trace", "workload.path=x.parquet", "workload.name=given").name == "given"


def test_trace_without_a_path_is_refused() -> None:
    with pytest.raises(UserError, match="path"):
        workload("trace")


def test_uniform_is_the_same_sample_again_and_again() -> None:
    shapes = workload("uniform").source(RULES).batch(5, 100, 0)
    assert np.all(shapes.text_tokens == 128)
    assert np.all(shapes.item_llm_tokens == 256)
    assert np.all(shapes.item_encoder_tokens == 1024)
    assert np.all(np.diff(shapes.item_offsets) == 1)


def test_synthetic_defaults_follow_their_trace() -> None:
    made, trace = (workload(name).source(RULES) for name in ("synthetic", "opencqa_ocr"))
    drawn, real = made.batch(0, 8192, 0), trace.shapes
    for values, reference in ((drawn.text_tokens, real.text_tokens), (drawn.item_llm_tokens, real.item_llm_tokens)):
        assert np.allclose(np.quantile(values, [0.5, 0.9]), np.quantile(reference, [0.5, 0.9]), rtol=0.06)


def test_synthetic_av_has_text_only_samples() -> None:
    shapes = workload("synthetic_av").source(RULES).batch(0, 8192, 0)
    assert np.mean(np.diff(shapes.item_offsets) == 0) == pytest.approx(0.28, abs=0.02)
    assert set(np.unique(shapes.item_modality)) == {0, 1}
