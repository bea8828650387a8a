"""Files of draws for tests."""

from __future__ import annotations

import csv
import io

from entrain_bench.config.constants import COLUMNS, Draws


def draws_text(draws: Draws) -> str:
    """Draws as the text of a file that ``read_draws`` reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for device, of_device in sorted(draws.items()):
        for draw, speed in sorted(of_device.items()):
            writer.writerow([device, draw, *(f"{getattr(speed, name):.4g}" for name in COLUMNS[2:])])
    return text.getvalue()
