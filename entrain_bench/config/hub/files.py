"""Where the files of a published model are: a folder, a file, or the Hugging Face hub and its cache."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from entrain_bench.base.errors import UserError
from entrain_bench.config.hub.families import CONFIG, PROCESSOR, model_values
from entrain_bench.config.hub.fields import Fields
from entrain_bench.config.hub.token_rules import PUBLISHED
from entrain_bench.config.tree import choices, config_tree

HUB = "hf:"
BUNDLED = "hub.jsonl"
REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
# Newer processors are in a file of their own, next to the older one.
NEWER_PROCESSOR = "processor_config.json"
VIDEO_PROCESSOR = "video_preprocessor_config.json"
TOKENIZER = "tokenizer.json"
FILES = (CONFIG, PROCESSOR, NEWER_PROCESSOR, VIDEO_PROCESSOR)
NESTED = ("image_processor", "feature_extractor", "audio_processor")
MAX_BYTES = 2**24
# Seconds until the hub counts as out of reach, name lookup included.
ANSWER_S = 2.5
MAX_SIMILAR = 3


def is_reference(value: object) -> bool:
    """Whether a value of ``model`` names a published model: ``hf:ORG/NAME``, or a path of a folder or a JSON file."""
    if not isinstance(value, str) or value.endswith((".yaml", ".yml")):
        return False
    return value.startswith(HUB) or "/" in value or value.endswith(".json")


def published_model(reference: str) -> dict[str, Any]:
    """A model as in a YAML, called like its reference; ``UserError`` for files or fields that do not fit."""
    try:
        config, processor = _published(reference)
        values = _values(reference, config, processor)
    except UserError as error:
        raise UserError(f"model={reference}: {error}") from error
    if _has_family_sizes(config, processor):
        _say(f"model={reference}: has no {PROCESSOR}; image sizes are limited as in its family's published one")
    return values


def _values(reference: str, config: Fields, processor: Fields) -> dict[str, Any]:
    values = model_values(config, processor)
    for module in values["modules"].values():
        module["source"] = f"Hugging Face {reference.removeprefix(HUB)} config.json"
    return {"name": reference, **values}


def _has_family_sizes(config: Fields, processor: Fields) -> bool:
    return not processor.values and config.get("model_type") in PUBLISHED


def tokenizer_file(reference: str) -> Path | None:
    """Return the tokenizer of a published model if it is in the model's folder or the hub's cache; fetch nothing."""
    from huggingface_hub import try_to_load_from_cache

    place = Path(reference.removeprefix(HUB)).expanduser()
    if place.is_dir() or not reference.startswith(HUB):
        path = place / TOKENIZER if place.is_dir() else place.with_name(TOKENIZER)
        return path if path.is_file() else None
    if not (match := REPOSITORY.fullmatch(reference.removeprefix(HUB))):
        return None
    cached = try_to_load_from_cache(match[1], TOKENIZER, revision=match[2])
    return Path(cached) if isinstance(cached, str) else None


@cache
def _say(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Fields of a published model that its mapping reads, their source, and the month in which they were read."""

    name: str
    source: str
    read: str
    config: Mapping[str, Any]
    processor: Mapping[str, Any]

    @property
    def fields(self) -> tuple[Fields, Fields]:
        """Those of its configuration, and of its processor."""
        return Fields(self.config, CONFIG), Fields(self.processor, PROCESSOR)

    @property
    def values(self) -> dict[str, Any]:
        """The model as in a YAML."""
        return _values(f"{HUB}{self.name}", *self.fields)

    @property
    def has_family_sizes(self) -> bool:
        """Whether its image sizes are limited as in its family, because its own processor is not known."""
        return _has_family_sizes(*self.fields)


@cache
def bundled_models() -> Mapping[str, BundledModel]:
    """Return models of the hub that need no network, by name."""
    lines = (config_tree() / BUNDLED).read_text().splitlines()
    models = (BundledModel(**json.loads(line)) for line in lines)
    return {model.name: model for model in models}


def _published(reference: str) -> tuple[Fields, Fields]:
    bundled = bundled_models().get(reference.removeprefix(HUB)) if reference.startswith(HUB) else None
    if bundled and not _is_cached(bundled.name):
        _say(f"model={reference}: sizes of {bundled.read} from {bundled.source}; hf:NAME@REVISION reads the hub")
        return bundled.fields
    files = {name: _json(path) for name, path in _files(reference, FILES).items()}
    newer = files.get(NEWER_PROCESSOR, {})
    processor = {key: value for key, value in newer.items() if key not in NESTED} | files.get(PROCESSOR, {})
    for name in NESTED:
        if isinstance(newer.get(name), Mapping):
            processor |= newer[name]
    if VIDEO_PROCESSOR in files:
        processor["video_processor"] = files[VIDEO_PROCESSOR]
    return Fields(_with_named_parts(files[CONFIG]), CONFIG), Fields(processor, PROCESSOR)


def _with_named_parts(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with those of other published models that it names in place of parts (Ultravox)."""
    for part in ("audio", "text"):
        name = config.get(f"{part}_model_id")
        held = config.get(f"{part}_config")
        if name and not (isinstance(held, Mapping) and held.get("model_type")):
            try:
                config = config | {f"{part}_config": _json(_files(f"{HUB}{name}", (CONFIG,))[CONFIG])}
            except UserError as error:
                raise UserError(f"{part}_model_id={name}: {error}") from error
    return config


def _files(reference: str, names: Sequence[str]) -> dict[str, Path]:
    """Those of a model's files that exist, by name, ``config.json`` among them; ``UserError`` without it."""
    place = Path(reference.removeprefix(HUB)).expanduser()
    if place.is_dir() or place.suffix == ".json" or not reference.startswith(HUB):
        paths = {name: place / name if place.is_dir() else place.with_name(name) for name in names}
        if place.is_file():
            paths[CONFIG] = place
        found = {name: path for name, path in paths.items() if path.is_file()}
        if CONFIG not in found:
            raise UserError(f"there is no {CONFIG}; must be hf:ORG/NAME, a folder with {CONFIG}, or its path")
        return found
    if not (match := REPOSITORY.fullmatch(reference.removeprefix(HUB))):
        raise UserError("must be hf:ORG/NAME, a folder, or the path of a config.json")
    return _from_hub(match[1], match[2], names)


def _is_cached(repository: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, CONFIG), str)


def _from_hub(repository: str, revision: str | None, names: Sequence[str]) -> dict[str, Path]:
    """Files of the hub's cache; those that it lacks are fetched to it, unless they are known not to exist."""
    from huggingface_hub import try_to_load_from_cache

    cached = {name: try_to_load_from_cache(repository, name, revision=revision) for name in names}
    found = {name: Path(path) for name, path in cached.items() if isinstance(path, str)}
    missing = tuple(name for name, path in cached.items() if path is None)
    refusal = _fetch(repository, revision, missing) if missing else ""
    if refusal and CONFIG not in found:
        raise UserError(f"{refusal}. {_instead(repository)}")
    fetched = {name: try_to_load_from_cache(repository, name, revision=revision) for name in missing}
    found |= {name: Path(path) for name, path in fetched.items() if isinstance(path, str)}
    if CONFIG not in found:
        raise UserError(f"the hub has no {CONFIG} of it. {_instead(repository)}")
    return found


@cache
def _fetch(repository: str, revision: str | None, names: Sequence[str]) -> str:
    """Download files to the hub's cache, once in a process; returns the obstacle, empty if there was none."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    what = f"{', '.join(names)} of {repository} from {constants.ENDPOINT} (no weights)"
    print(f"fetching {what}", file=sys.stderr, flush=True)
    has_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        _require_answer(repository, revision, names[0])
        for name in names:
            try:
                hf_hub_download(repository, name, revision=revision)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                # Not every model has each of them.
                continue
    except RepositoryNotFoundError:
        return "does not exist, or only for those who log in with `hf auth login` and accept its terms"
    # Errors of the network, of the hub and of a disk have no common base.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return f"is not in the cache of the Hugging Face hub, and cannot be fetched ({reason})"
    finally:
        if has_bars:
            enable_progress_bars()
    return ""


def _require_answer(repository: str, revision: str | None, name: str) -> None:
    """Raise the error if the hub has no answer within ``ANSWER_S``; ``hf_hub_download`` would try for over a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    url = hf_hub_url(repository, name, revision=revision)
    raised = list[Exception]()

    def ask() -> None:
        try:
            get_hf_file_metadata(url, timeout=ANSWER_S)
        except EntryNotFoundError:
            pass
        except Exception as error:
            raised.append(error)

    # The timeout of a request holds for each address of a host, and not for the lookup of its name.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    if asking.is_alive():
        raise TimeoutError(f"no answer within {ANSWER_S:g} s")
    if raised:
        raise raised[0]


def _instead(repository: str) -> str:
    """Return replacements for a model that cannot be fetched: bundled models of similar names, or a folder."""
    plain = {re.sub(r"\W|_", "", name).lower(): name for name in choices("model")}
    similar = get_close_matches(re.sub(r"\W|_", "", repository.partition("/")[2]).lower(), plain, MAX_SIMILAR)
    bundled = f"model={' or '.join(plain[name] for name in similar)} (bundled), or " if similar else ""
    return f"Use {bundled}model=FOLDER with its {CONFIG}. Models without a network: entrain-bench ls models"


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        values = json.loads(text) if len(text) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name} cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path.name} must hold a mapping in at most {MAX_BYTES} bytes")
    return values
