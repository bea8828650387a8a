"""Where published models are found, and what is said of those that cannot be mapped: one line that names the field."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config.hub import files
from entrain_bench.config.hub.files import bundled_models, is_reference, published_model
from entrain_bench.specs.model import ModelSpec
from entrain_bench_workloads.tokens import audio_items, image_items

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
QWEN = {
    "model_type": "qwen2_5_vl",
    **{key: value for key, value in LLAMA.items() if key != "model_type"},
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vision_config": {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
    | {"fullatt_block_indexes": [1], "patch_size": 14, "spatial_merge_size": 2, "window_size": 112},
}
TEXT_OF_QWEN3 = {"model_type": "qwen3_vl_text", "num_key_value_heads": 2, "head_dim": 16}
QWEN_PROCESSOR = {"min_pixels": 3136, "max_pixels": 1003520, "patch_size": 14, "merge_size": 2}
INTERNVL_CHAT = {
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "use_thumbnail": True,
    "llm_config": {**LLAMA, "model_type": "internlm2", "num_key_value_heads": 2, "max_position_embeddings": 4096},
    "vision_config": {"model_type": "intern_vit_6b", "hidden_size": 32, "num_hidden_layers": 2, "patch_size": 14}
    | {"num_attention_heads": 2, "intermediate_size": 128, "num_channels": 3, "qkv_bias": False},
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 8} | {
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "max_position_embeddings": 4096,
}
SIZE_OF = r"{}: missing in config.json. A size has no default \({} of the class in transformers may be another"
WHISPER = {"model_type": "whisper", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2} | {
    "encoder_ffn_dim": 128,
    "num_mel_bins": 80,
}
ULTRAVOX = {"model_type": "ultravox", "hidden_size": 48, "stack_factor": 8, "projector_act": "swiglu"} | {
    "audio_config": WHISPER,
    "text_config": LLAMA,
}


def write(folder: Path, config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which is out of reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    reach(monkeypatch, "http://127.0.0.1:9")
    return tmp_path / "cache"


def reach(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    files._fetch.cache_clear()


@contextmanager
def hub(repository: str, contents: Mapping[str, Any], asked: list[str]) -> Iterator[str]:
    """The address of a hub with one model; ``asked`` gets every request."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            name = self.path.rpartition("/")[2]
            known = self.path.startswith(f"/{repository}/resolve/")
            body = json.dumps(contents[name]).encode() if known and name in contents else b""
            self.send_response(200 if body else 404)
            self.send_header("X-Repo-Commit", "1" * 40)
            self.send_header("ETag", sha256(body).hexdigest())
            self.send_header("Content-Length", str(len(body)))
            if not body:
                self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def cached(cache: Path, name: str, config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> None:
    """Lay files into the cache as huggingface_hub does."""
    place = cache / f"models--{name.replace('/', '--')}"
    write(place / "snapshots" / ("0" * 40), config, processor)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)


def test_references() -> None:
    for value in ("hf:Qwen/Qwen2-VL-7B", "/models/x/config.json", "./x", "config.json", "hf:./x"):
        assert is_reference(value)
    for value in ("qwen25vl_7b", "mine.yaml", "./mine.yaml", None, 3):
        assert not is_reference(value)


def test_a_folder_and_its_configuration_are_the_same_model(tmp_path: Path) -> None:
    folder = write(tmp_path, QWEN, QWEN_PROCESSOR)
    models = [published_model(name) for name in (folder, f"{folder}/config.json", f"hf:{folder}")]
    assert [model.pop("name") for model in models] == [folder, f"{folder}/config.json", f"hf:{folder}"]
    spec = ModelSpec.from_config({"name": "x", **models[0]})
    for model in models:
        for module in model["modules"].values():
            module.pop("source")
    assert models[0] == models[1] == models[2]
    assert [module.name for module in spec.modules] == ["vision", "llm"]
    # Fields of the language model are at the top.
    assert spec.llm.config.vocab_size == 1000
    assert spec.llm.config.tied_embeddings
    assert spec.tokens.max_image_tokens == 1280


def test_a_model_of_the_cache(cache: Path) -> None:
    cached(cache, "some/model", LLAMA)
    model = published_model("hf:some/model")
    assert model["name"] == "hf:some/model"
    assert ModelSpec.from_config(model).llm.config.hidden_size == 64


def test_files_of_a_named_model_are_fetched_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[str]()
    with hub("some/model", {"config.json": QWEN, "preprocessor_config.json": QWEN_PROCESSOR}, asked) as address:
        reach(monkeypatch, address)
        spec = ModelSpec.from_config(published_model("hf:some/model@v2"))
        assert (spec.llm.config.num_layers, spec.tokens.max_image_tokens) == (2, 1280)
        (line,) = capsys.readouterr().err.splitlines()
        names = "config.json, preprocessor_config.json, processor_config.json, video_preprocessor_config.json"
        assert line == f"fetching {names} of some/model from {address} (no weights)"
        gets = ["GET /some/model/resolve/v2/config.json", "GET /some/model/resolve/v2/preprocessor_config.json"]
        assert [one for one in asked if one.startswith("GET")] == gets
        asked.clear()
        published_model("hf:some/model@v2")
        assert (asked, capsys.readouterr().err) == ([], "")
        with pytest.raises(UserError, match=r"^model=hf:other/model: does not exist, or only for those who log in"):
            published_model("hf:other/model")
    assert (cache / "models--some--model" / "snapshots" / ("1" * 40) / "config.json").is_file()


@pytest.mark.usefixtures("cache")
def test_without_a_network_bundled_models_of_similar_names_are_named() -> None:
    with pytest.raises(UserError, match=r"cannot be fetched \(.*\)\. Use model=qwen25vl_7b ") as raised:
        published_model("hf:Qwen/Qwen2.5-VL-7B-Instruct-AWQ")
    assert str(raised.value).endswith(
        " (bundled), or model=FOLDER with its config.json. Models without a network: entrain-bench ls models"
    )


def test_a_hub_that_does_not_answer_is_not_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ANSWER_S", 0.2)
    cached(cache, "some/model", LLAMA)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reach(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        # Its own file is enough where the hub cannot say whether there are others.
        assert ModelSpec.from_config(published_model("hf:some/model")).llm.config.hidden_size == 64
        with pytest.raises(UserError, match="cannot be fetched"):
            published_model("hf:another/model")
        assert time.monotonic() - started < 5.0


def test_processors_in_a_newer_file(tmp_path: Path) -> None:
    folder = write(tmp_path, QWEN)
    newer = {"image_processor": {**QWEN_PROCESSOR, "max_pixels": 784 * 500}, "processor_class": "Qwen2_5_VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    assert ModelSpec.from_config(published_model(folder)).tokens.max_image_tokens == 500


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"min_pixels": 3136, "max_pixels": 784 * 500}, 500),
        ({"size": {"min_pixels": 3136, "max_pixels": 784 * 400}}, 400),
        ({"size": {"shortest_edge": 3136, "longest_edge": 784 * 300}}, 300),
        ({"size": {"shortest_edge": 3136, "longest_edge": 784 * 300}, "max_pixels": 784 * 200}, 200),
    ],
)
def test_limits_of_images_under_all_their_names(limits: Mapping[str, Any], tokens: int, tmp_path: Path) -> None:
    processor = {"patch_size": 14, "merge_size": 2, **limits}
    assert ModelSpec.from_config(published_model(write(tmp_path, QWEN, processor))).tokens.max_image_tokens == tokens


def test_parts_that_are_called_like_the_whole(tmp_path: Path) -> None:
    config = {
        "model_type": "idefics2",
        "text_config": {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 4096},
        "vision_config": {"model_type": "idefics2", "hidden_size": 64, "num_attention_heads": 4, "patch_size": 14}
        | {"num_hidden_layers": 12, "intermediate_size": 128},
        "perceiver_config": {"model_type": "idefics2", "resampler_depth": 2, "resampler_n_latents": 64}
        | {"resampler_head_dim": 96, "resampler_n_heads": 16, "num_key_value_heads": 4},
    }
    processor = {"size": {"shortest_edge": 378, "longest_edge": 980}, "do_image_splitting": True}
    spec = ModelSpec.from_config(published_model(write(tmp_path, config, processor)))
    assert spec.encoders[0].config.num_layers == 12
    tiles = image_items(np.array([1]), np.array([900.0]), np.array([450.0]), spec.tokens, 2**20)
    assert tiles.llm_tokens.sum() == 5 * 64 + 6


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    llm = ModelSpec.from_config(published_model(write(tmp_path, MIXTRAL))).llm
    expert = 3 * 64 * 128
    assert llm.parameters - llm.active_parameters == 2 * 6 * expert
    assert llm.config.ffn_hidden_size == 0
    # Two of eight experts and the router, beside attention and norms, in each of two layers; words and their head.
    attention = 64 * (64 + 2 * 32) + 64 * 64
    assert llm.active_parameters == 2 * (2 * expert + 64 * 8 + attention + 2 * 64) + 2 * 1000 * 64 + 64


def test_a_folder_without_a_processor_has_its_familys_limits_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**QWEN, "model_type": "qwen3_vl", "text_config": {**LLAMA, **TEXT_OF_QWEN3}}
    config["vision_config"] = {**QWEN["vision_config"], "deepstack_visual_indexes": [0], "patch_size": 16}
    folder = write(tmp_path, config)
    spec = ModelSpec.from_config(published_model(folder))
    # 65,536 to 16,777,216 pixels in squares of 32.
    assert (spec.tokens.min_image_tokens, spec.tokens.max_image_tokens) == (64, 16384)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"model={folder}: has no preprocessor_config.json; image sizes are limited as in its family")


def test_internvl_as_its_authors_publish_it(tmp_path: Path) -> None:
    spec = ModelSpec.from_config(published_model(write(tmp_path, INTERNVL_CHAT)))
    assert [module.name for module in spec.modules] == ["vision", "llm"]
    assert [gemm.k for gemm in spec.encoders[0].layers[-1].gemms] == [128, 64]
    tiles = image_items(np.array([1]), np.array([900.0]), np.array([450.0]), spec.tokens, 2**20)
    assert tiles.llm_tokens.sum() == 3 * 256 + 2


def test_phi4_as_its_authors_publish_it(tmp_path: Path) -> None:
    conformer = {"attention_dim": 1024, "attention_heads": 16, "num_blocks": 24, "linear_units": 1536}
    config = {
        **LLAMA,
        "model_type": "phi4mm",
        "hidden_size": 3072,
        "max_position_embeddings": 131072,
        "audio_processor": {
            "name": "cascades",
            "config": {
                **conformer,
                "input_size": 80,
                "time_reduction": 8,
                "nemo_conv_settings": {"conv_channels": 1024},
            },
        },
        "embd_layer": {"audio_embd_layer": {"downsample_rate": 1}, "image_embd_layer": {"crop_size": 448}},
    }
    spec = ModelSpec.from_config(published_model(write(tmp_path, config, {"dynamic_hd": 36})))
    ours = {module.name: module.parameters for module in spec.encoders}
    # As transformers counts its own format, less the pooling head that sees no image.
    assert ours == {"vision": pytest.approx(425.1e6, rel=1e-3), "audio": pytest.approx(466.0e6, rel=1e-3)}
    assert audio_items(np.array([30.0]), spec.tokens).llm_tokens.tolist() == [375]


def test_ultravox_and_models_that_it_names(cache: Path, tmp_path: Path) -> None:
    held = ModelSpec.from_config(published_model(write(tmp_path / "held", ULTRAVOX)))
    seconds = np.array([0.5, 3.21, 29.99])
    ours = audio_items(seconds, held.tokens)
    # As its processor: samples of 16 kHz, 320 of them a frame, 8 frames a token.
    frames = [round(second * 16000 / 320 + 1e-4) for second in seconds]
    assert ours.llm_tokens.tolist() == [-(-frame // 8) for frame in frames]
    assert [(gemm.k, gemm.n) for gemm in held.encoders[0].layers[-1].gemms] == [(256, 48), (24, 64)]
    cached(cache, "openai/ear", WHISPER)
    cached(cache, "meta/voice", LLAMA)
    names = {"audio_model_id": "openai/ear", "text_model_id": "meta/voice", "audio_config": {}, "text_config": None}
    named = ModelSpec.from_config(published_model(write(tmp_path / "named", {**ULTRAVOX, **names})))
    assert [module.parameters for module in named.modules] == [module.parameters for module in held.modules]


def without(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize(
    ("config", "processor", "line"),
    [
        ({"hidden_size": 64}, None, "model_type: missing in config.json"),
        ({**LLAMA, "model_type": "mamba"}, None, "model_type=mamba: unknown"),
        ({**LLAMA, "num_local_experts": 8}, None, "num_local_experts=8: model_type=llama has no experts here"),
        ({**MIXTRAL, "num_local_experts": None}, None, "num_local_experts: missing in config.json"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, None, "experts.top_k=9: must be at most count=8"),
        (without(LLAMA, "num_hidden_layers"), None, SIZE_OF.format("num_hidden_layers", 32)),
        (without(QWEN, "vocab_size"), QWEN_PROCESSOR, SIZE_OF.format("vocab_size", 152064)),
        (
            {**QWEN, "vision_config": without(QWEN["vision_config"], "depth")},
            QWEN_PROCESSOR,
            "vision_config." + SIZE_OF.format("depth", 32),
        ),
        ({**LLAMA, "hidden_size": 0}, None, "hidden_size=0: must be a whole number"),
        ({**LLAMA, "num_attention_heads": 5}, None, "head_dim: missing in config.json"),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, None, "layer_types=linear_attention"),
        ({**LLAMA, "model_type": "whisper"}, None, "model_type=whisper: unknown"),
        (QWEN, None, "patch_size: missing in preprocessor_config.json"),
        (QWEN, {**QWEN_PROCESSOR, "patch_size": 16}, "patch_size=16: must be 14"),
        ({**INTERNVL_CHAT, "use_thumbnail": False}, None, "use_thumbnail=False: must be true"),
        (
            {**INTERNVL_CHAT, "vision_config": {"model_type": "convnext", "patch_size": 4}},
            None,
            "vision_config.model_type=convnext: unknown",
        ),
        ({**INTERNVL_CHAT, "llm_config": {**LLAMA, "model_type": "rwkv"}}, None, "llm_config.model_type=rwkv"),
    ],
)
def test_one_line_names_what_cannot_be_mapped(
    config: Mapping[str, Any], processor: Mapping[str, Any] | None, line: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, config, processor)
    with pytest.raises(UserError, match=line) as raised:
        ModelSpec.from_config(published_model(folder))
    if "experts.top_k" in line:
        return
    assert str(raised.value).startswith(f"model={folder}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "\udcff".encode("utf-8", "surrogateescape").decode("latin1")])
def test_files_that_are_no_configurations(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        published_model(str(tmp_path))


def test_places_that_hold_nothing(tmp_path: Path) -> None:
    for reference in (str(tmp_path), f"{tmp_path}/config.json", f"hf:{tmp_path}"):
        with pytest.raises(UserError, match=r"there is no config\.json"):
            published_model(reference)
    with pytest.raises(UserError, match="must be hf:ORG/NAME"):
        published_model("hf:only-a-name")


# Parameters of the language model in billions, as the models' cards state them, of one model for each family.
STATED_B = {
    "Qwen/Qwen3-VL-235B-A22B-Instruct": 235.0,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 80.0,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "deepseek-ai/DeepSeek-V3": 671.0,
    "deepseek-ai/DeepSeek-V2-Lite": 15.7,
    "google/gemma-2-2b-it": 2.61,
    "microsoft/Phi-3-mini-4k-instruct": 3.82,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "moonshotai/Kimi-K2.5": 1026.0,
    "openai/gpt-oss-120b": 116.8,
    "zai-org/GLM-4.5-Air": 106.0,
}


def test_bundled_models_need_no_network_and_are_as_large_as_their_cards_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object) -> str:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(files, "_fetch", fetch)
    assert len(bundled_models()) >= 40
    for name in bundled_models():
        spec = ModelSpec.from_config(published_model(f"hf:{name}"))
        if name in STATED_B:
            assert spec.llm.parameters / 1e9 == pytest.approx(STATED_B[name], rel=0.02), name
    with pytest.raises(AssertionError, match="asked the hub"):
        published_model("hf:Qwen/Qwen3-30B-A3B@main")
