"""Where the files of a published model are: a folder, a file, or the cache of the Hugging Face hub."""

import json
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from entrain_bench.base.errors import UserError
from entrain_bench.config.hub.families import CONFIG, PROCESSOR, model_values
from entrain_bench.config.hub.fields import Fields
from entrain_bench.config.hub.token_rules import PUBLISHED

HUB = "hf:"
# Set to 1, missing files are downloaded.
DOWNLOAD = "ENTRAIN_BENCH_DOWNLOAD"
REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
# Newer processors are in a file of their own, next to what else there is to know.
NEWER_PROCESSOR = "processor_config.json"
NESTED = ("image_processor", "feature_extractor", "audio_processor")
MAX_BYTES = 2**24


def is_reference(value: object) -> bool:
    """Whether a value of ``model`` names a published model: ``hf:ORG/NAME``, or a path of a folder or a JSON file."""
    if not isinstance(value, str) or value.endswith((".yaml", ".yml")):
        return False
    return value.startswith(HUB) or "/" in value or value.endswith(".json")


def published_model(reference: str) -> dict[str, Any]:
    """A model as in a YAML, called like its reference; ``UserError`` for files or fields that do not fit."""
    try:
        config, processor = _published(reference)
        values = model_values(config, processor)
    except UserError as error:
        raise UserError(f"model={reference}: {error}") from error
    if not processor.values and config.get("model_type") in PUBLISHED:
        _say(f"model={reference}: has no {PROCESSOR}; image sizes are limited as in its family's published one")
    for module in values["modules"].values():
        module["source"] = f"Hugging Face {reference.removeprefix(HUB)} config.json"
    return {"name": reference, **values}


@cache
def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _published(reference: str) -> tuple[Fields, Fields]:
    files = {name: _json(path) for name in (CONFIG, PROCESSOR, NEWER_PROCESSOR) if (path := _file(reference, name))}
    if CONFIG not in files:
        raise UserError(_missing(reference))
    newer = files.get(NEWER_PROCESSOR, {})
    processor = {key: value for key, value in newer.items() if key not in NESTED} | files.get(PROCESSOR, {})
    for name in NESTED:
        if isinstance(newer.get(name), Mapping):
            processor |= newer[name]
    return Fields(_with_named_parts(files[CONFIG]), CONFIG), Fields(processor, PROCESSOR)


def _with_named_parts(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with those of other published models that it names in place of parts (Ultravox)."""
    for part in ("audio", "text"):
        name = config.get(f"{part}_model_id")
        held = config.get(f"{part}_config")
        if name and not (isinstance(held, Mapping) and held.get("model_type")):
            if not (path := _file(f"{HUB}{name}", CONFIG)):
                raise UserError(f"{part}_model_id={name}: {_missing(f'{HUB}{name}')}")
            config = config | {f"{part}_config": _json(path)}
    return config


def _file(reference: str, name: str) -> Path | None:
    place = Path(reference.removeprefix(HUB)).expanduser()
    if place.is_dir() or place.suffix == ".json" or not reference.startswith(HUB):
        beside = place / name if place.is_dir() else place if name == CONFIG else place.with_name(name)
        return beside if beside.is_file() else None
    if not (match := REPOSITORY.fullmatch(reference.removeprefix(HUB))):
        raise UserError("must be hf:ORG/NAME, a folder, or the path of a config.json")
    return _from_hub(match[1], match[2], name)


def _from_hub(repository: str, revision: str | None, name: str) -> Path | None:
    """A file in the hub's cache, or downloaded to it if the user allows that; None if there is none."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    cached = huggingface_hub.try_to_load_from_cache(repository, name, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    if os.environ.get(DOWNLOAD) != "1":
        return None
    try:
        return Path(huggingface_hub.hf_hub_download(repository, name, revision=revision))
    except EntryNotFoundError:
        return None
    # Errors of the network, of the hub and of a disk have no common base.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{name} cannot be downloaded ({reason})") from error


def _missing(reference: str) -> str:
    name = reference.removeprefix(HUB)
    if not reference.startswith(HUB) or Path(name).expanduser().is_dir():
        return f"there is no {CONFIG}; must be hf:ORG/NAME, a folder with {CONFIG}, or its path"
    repository = name.partition("@")[0]
    get = f"hf download {repository} {CONFIG} {PROCESSOR} {NEWER_PROCESSOR}"
    return f"is not in the Hugging Face cache; run `{get}`, or set {DOWNLOAD}=1"


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
