"""Files that prove themselves: JSON that holds the key it belongs to and the SHA-256 of all that it says.

The hash is no signature: it shows accidents and edits, not somebody who makes the hash anew. ``entrain-bench verify``
shows those, for it computes results again.
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
    """Return the values in the file of a key, without the hash.

    Raises:
        ValueError: for a file that is none, that was changed, or that is of another key.
    """
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
