"""The key ``constants``: draws of the posterior of a device's constants, factors as in ``Speed``, from a CSV file."""

import csv
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path

from entrain_bench.base.errors import UserError
from entrain_bench.config.schema import RunConfig
from entrain_bench.config.tree import config_tree
from entrain_bench.specs.cluster import Speed

FILE = "posterior.csv"
COLUMNS = ("device", "draw", *(each.name for each in fields(Speed)))
DIGITS = 4
Draws = Mapping[str, Mapping[int, Speed]]


def speed_of(config: RunConfig) -> Speed:
    """All factors on the constants of a run's cluster: ``speed`` times its draw; ``UserError`` if there is none."""
    if not config.constants:
        return config.speed
    device = config.cluster["device"]
    name = str(device.get("name")) if isinstance(device, Mapping) and "path" not in device else "a profiled device"
    draws = read_draws(config_tree() / FILE)
    if config.constants not in draws.get(name, {}):
        allowed = f"0 for {name}; {FILE} has draws of {', '.join(sorted(draws)) or 'no device'}"
        if name in draws:
            allowed = f"0, or a draw of {name} in {FILE} (1 to {max(draws[name])})"
        raise UserError(f"constants={config.constants}: must be {allowed}")
    return config.speed.times(draws[name][config.constants])


@cache
def read_draws(path: Path) -> Draws:
    """The draws of a file by device and number; none if there is no file. ``UserError`` names the wrong line."""
    draws: dict[str, dict[int, Speed]] = {}
    line = 1
    try:
        reader = csv.DictReader(path.read_text().splitlines() if path.exists() else ())
        for row in reader:
            line = reader.line_num
            speed = Speed(**{name: float(row[name]) for name in COLUMNS[2:]})
            draws.setdefault(row["device"], {})[int(row["draw"])] = speed
    except KeyError as error:
        raise UserError(f"{path.name}:1: has no column {error.args[0]}") from error
    except (OSError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path.name}:{line}: {error}") from error
    return draws


def draws_text(draws: Draws) -> str:
    """Draws as the text of a file that ``read_draws`` reads, factors rounded so that all machines write the same."""
    rows = [COLUMNS]
    for device, of_device in sorted(draws.items()):
        for draw, speed in sorted(of_device.items()):
            rows.append((device, str(draw), *(f"{getattr(speed, name):.{DIGITS}g}" for name in COLUMNS[2:])))
    return "".join(",".join(row) + "\n" for row in rows)
