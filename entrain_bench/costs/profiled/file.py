"""Device profile file: versioned JSON, written atomically; reading checks every value."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.costs.profiled.timed_points import DeviceProfile
from entrain_bench.specs.parse import check_mapping, parse

FORMAT = "entrain-bench profile"
VERSION = 2
AGAIN = "To make one, run entrain-bench profile"
POINTS = ("stages", "steps", "collectives")


def to_bytes(profile: DeviceProfile) -> bytes:
    """Return the content of a profile's file, one line per point."""
    values = asdict(profile)
    lists = {name: ",\n  ".join(json.dumps(point) for point in values.pop(name)) for name in POINTS}
    head = json.dumps({"format": FORMAT, "version": VERSION, **values}, indent=1)[:-2]
    points = "".join(f',\n "{name}": [\n  {lines}\n ]' for name, lines in lists.items())
    return f"{head}{points}\n}}\n".encode()


def write_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a profile; ``UserError`` if the file cannot be written."""
    try:
        write_atomically(path, to_bytes(profile))
    except OSError as error:
        raise UserError(f"output={path}: cannot be written ({error.strerror})") from error


def read_profile(path: Path, where: str) -> DeviceProfile:
    """Read a profile, finished or not; errors begin with ``where``.

    ``UserError`` if the file cannot be read, is truncated, has another version, or holds impossible values.
    """
    content = read_bytes(path, where)
    try:
        values = check_mapping(json.loads(content), where)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where}: is not a device profile, or is truncated ({error}). {AGAIN}") from error
    if values.get("format") != FORMAT:
        raise UserError(f"{where}: is not a device profile. {AGAIN}")
    if values.get("version") != VERSION:
        raise UserError(f"{where}: version={values.get('version')}: must be {VERSION}. {AGAIN}")
    profile = parse(DeviceProfile, {key: values[key] for key in values if key not in ("format", "version")}, where)
    for name in profile.constants.__dataclass_fields__.keys() - {"sources"}:
        if not isinstance(profile.constants.sources.get(name), str):
            raise UserError(f"{where}: constants.sources.{name}: missing. State the source of the constant")
    for name, module in profile.subject.modules.items():
        check_mapping(module, f"{where}: subject.modules.{name}")
    return profile


def digest(path: Path, where: str) -> str:
    """Return the SHA-256 of a profile's file; ``UserError`` if the file cannot be read."""
    return hashlib.sha256(read_bytes(path, where)).hexdigest()


def read_bytes(path: Path, where: str) -> bytes:
    """Return the bytes of a file; ``UserError`` if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror}). {AGAIN}") from error
