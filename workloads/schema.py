"""The columns of a shape trace and their allowed values; docs/workloads.md says what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Bounds that no real sample reaches; they catch milliseconds given as seconds and corrupt files.
MAX_SECONDS = 86_400.0
MAX_PIXELS = 1e6
MAX_TEXT = float(2**31 - 1)


@dataclass(frozen=True, slots=True)
class TraceColumn:
    """The values of a column: whole numbers from ``low`` to ``high``, or any above 0 up to ``high``; 0: no bounds."""

    high: float = 0.0
    whole: bool = True
    low: int = 0

    @property
    def allowed(self) -> str:
        """The allowed values in words; empty without bounds."""
        if not self.high:
            return ""
        if self.whole:
            return f"a whole number from {self.low} to {self.high:.0f}"
        return f"a number above 0, at most {self.high:g}"


COLUMNS: Mapping[str, TraceColumn] = {
    "sample_id": TraceColumn(),
    "text_tokens": TraceColumn(MAX_TEXT),
    "text_chars": TraceColumn(MAX_TEXT),
    "image_widths": TraceColumn(MAX_PIXELS, low=1),
    "image_heights": TraceColumn(MAX_PIXELS, low=1),
    "n_images": TraceColumn(MAX_TEXT),
    "audio_seconds": TraceColumn(MAX_SECONDS, whole=False),
    "video_seconds": TraceColumn(MAX_SECONDS, whole=False),
    "text_words": TraceColumn(),
}
