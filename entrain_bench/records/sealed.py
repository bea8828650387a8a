"""JSON files with the key that they belong to and the SHA-256 of their content.

The hash shows accidents and edits; it is no signature. ``entrain-bench verify`` computes results again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SEAL = "sha256"


def sealed(key: str, values: Mapping[str, Any]) -> bytes:
    """The file of a key."""
    content = {**values, "key": key}
    return json.dumps({**content, SEAL: _hash_of(content)}, indent=1, sort_keys=True).encode()


def unsealed(content: bytes, key: str) -> dict[str, Any]:
    """The values in the file of a key; ``ValueError`` if it is none, was changed, or belongs to another key."""
    values = json.loads(content)
    if not isinstance(values, dict) or not isinstance(seal := values.pop(SEAL, None), str):
        raise ValueError("it has no hash of its content")
    if values.get("key") != key:
        raise ValueError(f"it belongs to key {values.get('key')}")
    if seal != _hash_of(values):
        raise ValueError("its content is not that of its hash")
    return values


def log_warning(path: Path, reason: str) -> None:
    """Warn of a file that is not believed."""
    logger.warning("%s: %s", path, reason)


def say_nothing(_: Path, __: str) -> None:
    """Do not warn."""


def _hash_of(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
