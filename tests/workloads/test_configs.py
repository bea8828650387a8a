"""Every workload YAML gives valid samples, the documented columns are the schema, the examples run as written."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.config.compose import compose as compose_run
from entrain_bench.config.targets import instantiate
from entrain_bench.config.tree import config_tree
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TileRules, TokenRules
from entrain_bench_workloads.columns import COLUMNS
from entrain_bench_workloads.trace import PACKAGED_TRACES, TraceWorkload
from support.datasets import image_bytes, write_finevision, write_tar

EXPERIMENTS = config_tree()
NAMES = sorted(path.stem for path in (EXPERIMENTS / "workload").glob("*.yaml"))
RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0)
# LLaVA-OneVision's, with Llama 3's context.
TILED = TokenRules(14, 1, 16, 1, 1.0, 50.0, 2, 30.0, 4.0, 8192, TileRules(384, 27, 27, 6, 9, 32))


def workload(name: str, *overrides: str) -> Any:
    with initialize_config_dir(str(EXPERIMENTS), version_base="1.3"):
        config = compose(overrides=[f"+workload={name}", *overrides])
    return instantiate(OmegaConf.to_container(config.workload, resolve=True), "workload", "source")


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("trace", "twin")])
def test_every_workload_gives_samples(name: str) -> None:
    made = workload(name)
    assert made.name == name
    source = made.source(RULES)
    shapes = source.batch(3, 64, seed=0)
    assert len(shapes) == 64
    assert shapes.llm_tokens.min() >= 1
    assert len(source.draw(10, np.random.default_rng(0))) == 10
    parts = [*getattr(made, "components", {}).values(), made]
    assert len(made.fingerprint()) == (64 if any(hasattr(each, "path") for each in parts) else 0)


def test_trace_without_a_path_is_refused() -> None:
    with pytest.raises(UserError, match=r"workload\.path: must be given"):
        compose_run("workload=trace")


def test_uniform_is_the_same_sample_again_and_again() -> None:
    shapes = workload("uniform").source(RULES).batch(5, 100, 0)
    assert np.all(shapes.text_tokens == 128)
    assert np.all(shapes.item_llm_tokens == 256)
    assert np.all(shapes.item_encoder_tokens == 1024)
    assert np.all(np.diff(shapes.item_offsets) == 1)


def test_packed_text_is_text_of_one_length() -> None:
    shapes = workload("packed_text", "workload.text=2048").source(RULES).batch(3, 50, 0)
    assert np.all(shapes.llm_tokens == 2048)
    assert shapes.num_items == 0


@pytest.mark.wide
@pytest.mark.parametrize(("tokens", "share", "images"), [(8192, 0.25, 8), (8192, 0.875, 28), (131072, 0.75, 384)])
def test_uniform_mix_fills_the_share_with_images(tokens: int, share: float, images: int) -> None:
    sizes = [f"workload.sequence_tokens={tokens}", f"workload.vision_share={share}"]
    shapes = workload("uniform_mix", *sizes).source(RULES).batch(2, 10, 0)
    assert np.all(shapes.llm_tokens == tokens)
    assert np.all(np.diff(shapes.item_offsets) == images)
    assert np.all(shapes.item_llm_tokens == 256)
    assert np.all(shapes.item_encoder_tokens == 1024)


@pytest.mark.wide
@pytest.mark.parametrize(
    "wrong",
    [
        *("vision_share=0.49", "vision_share=1.0", "sequence_tokens=0", "image_tokens=0"),
        *("encoder_tokens_per_llm_token=0", "encoder_tokens_per_llm_token=1e9"),
    ],
)
def test_uniform_mix_names_what_is_wrong(wrong: str) -> None:
    with pytest.raises(UserError, match=rf"^workload\.{wrong.partition('=')[0]}=.*: must be"):
        workload("uniform_mix", f"workload.{wrong}")


@pytest.mark.wide
def test_synthetic_defaults_follow_their_trace() -> None:
    made, trace = (workload(name).source(RULES) for name in ("synthetic", "opencqa_ocr"))
    drawn, real = made.batch(0, 8192, 0), trace.shapes
    for values, reference in ((drawn.text_tokens, real.text_tokens), (drawn.item_llm_tokens, real.item_llm_tokens)):
        assert np.allclose(np.quantile(values, [0.5, 0.9]), np.quantile(reference, [0.5, 0.9]), rtol=0.06)


@pytest.mark.wide
def test_dflops_mixture_has_its_proportions_and_its_components_tokens() -> None:
    source = workload("dflop_mixed").source(TILED)
    shapes = source.batch(0, 8192, 0)
    assert shapes.modalities == ("image", "video")
    assert np.all(shapes.item_encoder_tokens == 729)
    assert np.all(shapes.item_llm_tokens[shapes.item_modality == 1] == 14 * 15)
    video = np.zeros(len(shapes), np.bool_)
    video[shapes.item_sample[shapes.item_modality == 1]] = True
    assert video.mean() == pytest.approx(60 / 185, abs=0.02)
    # A sample comes whole from one component: no sample has both modalities, and none is without items.
    assert not np.any(video[shapes.item_sample[shapes.item_modality == 0]])
    assert np.diff(shapes.item_offsets).min() >= 2
    assert np.diff(shapes.item_offsets).max() == 37
    assert shapes.llm_tokens.max() <= 8192
    components = [workload(f"dflop_{name}").source(TILED).batch(0, 8192, 0) for name in ("multi", "single")]
    still = shapes.take(np.flatnonzero(~video))
    means = [np.diff(one.item_offsets).mean() for one in components]
    assert np.diff(still.item_offsets).mean() == pytest.approx((60 * means[0] + 65 * means[1]) / 125, rel=0.03)


def test_a_mixtures_stream_does_not_depend_on_batch_sizes() -> None:
    source = workload("dflop_mixed").source(RULES)
    whole = source.batch(0, 96, 3)
    parts = [source.batch(index, 32, 3) for index in range(3)]
    assert np.concatenate([part.llm_tokens for part in parts]).tolist() == whole.llm_tokens.tolist()
    assert not np.array_equal(source.batch(0, 96, 4).llm_tokens, whole.llm_tokens)


@pytest.mark.wide
@pytest.mark.parametrize(
    "override", ["workload.weights={single: 1, multi: 1}", "workload.weights.single=0", "workload.name=''"]
)
def test_a_wrong_mixture_is_refused(override: str) -> None:
    with pytest.raises(UserError, match=r"workload\.(weights|name)"):
        workload("dflop_mixed", f"{override}" if "{" not in override else "~workload.weights.video")


def test_packed_images_fill_sequences_with_up_to_48_of_them() -> None:
    # 728 x 728 pixels: 52 x 52 patches, 13 x 13 LLM tokens.
    rules = TokenRules(14, 4, 1, 2, 2.0, 50.0, 2, 30.0, 4.0)
    shapes = workload("images_packed").source(rules).batch(0, 500, 0)
    assert np.all(shapes.llm_tokens == 8192)
    assert set(shapes.item_encoder_tokens) == {2704}
    assert set(shapes.item_llm_tokens) == {169}
    counts = np.diff(shapes.item_offsets)
    assert counts.min() >= 1
    assert counts.max() <= 48
    assert counts.mean() == pytest.approx(19, abs=1)
    assert counts.std() == pytest.approx(7, abs=1)


ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "workloads.md").read_text()
JSONL = """
{"id": "q1", "prompt": "What is this?", "answer": "A cat.", "images": [{"width": 56, "height": 84}]}
{"id": "q2", "prompt": "Hello", "answer": "Hi", "images": []}
{"id": "q3", "prompt": "Same?", "answer": "No", "images": [{"width": 56, "height": 56}, {"width": 84, "height": 84}]}
"""


def sizes(shapes: SampleShapes) -> list[tuple[str, int, list[int]]]:
    """Name, text tokens and the items' LLM tokens of every sample."""
    rows = zip(shapes.item_offsets[:-1], shapes.item_offsets[1:], strict=True)
    items = [shapes.item_llm_tokens[low:high].tolist() for low, high in rows]
    return [(shapes.name_of(row), int(shapes.text_tokens[row]), each) for row, each in enumerate(items)]


def test_the_documented_columns_are_the_schema() -> None:
    table = DOCUMENT.partition("<!-- columns -->\n")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]]
    found = {row[1].strip("`"): row[5] for row in rows}
    assert found == {name: column.allowed for name, column in COLUMNS.items()}


def test_packaged_traces_have_columns_of_the_schema_only() -> None:
    for path in PACKAGED_TRACES.glob("*.parquet"):
        assert {*pd.read_parquet(path).columns} <= {*COLUMNS}


@pytest.mark.wide
@pytest.mark.parametrize("page", ["README.md", "docs/workloads.md"])
def test_documented_commands_make_traces(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("shards").mkdir()
    picture = image_bytes(56, 84)
    write_finevision(Path("data/train-0.parquet"), [([picture], ["A caption"])])
    write_tar(Path("shards/a.tar"), [("0.txt", b"A caption"), ("0.jpg", picture)])
    commands = re.findall(r"^    entrain-bench (trace source.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        assert run_command([*shlex.split(command), "workers=1"]) == 0
        shapes = TraceWorkload(path="mine.parquet").source(RULES).shapes
        assert [(tokens, media) for _, tokens, media in sizes(shapes)] == [(3, [6])]


@pytest.mark.wide
def test_records_that_state_sizes_make_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("samples.jsonl").write_text(JSONL.strip())
    options = "source.text=[prompt,answer]"
    assert options in DOCUMENT
    assert (
        run_command(["trace", *options.split(), "source.path=samples.jsonl", "output=mine.parquet", "workers=1"]) == 0
    )
    shapes = TraceWorkload(path="mine.parquet").source(RULES).shapes
    assert sizes(shapes) == [("samples.jsonl:0", 5, [6]), ("samples.jsonl:1", 2, []), ("samples.jsonl:2", 2, [4, 9])]
