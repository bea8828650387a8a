"""The columns of a shape trace and their allowed values; docs/workloads.md shows the same table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Bounds that no real sample reaches; they catch milliseconds given as seconds and corrupt files.
MAX_SECONDS = 86_400.0
MAX_PIXELS = 1e6
MAX_TEXT = float(2**31 - 1)


@dataclass(frozen=True, slots=True)
class TraceColumn:
    """One column of a trace.

    If ``whole``, values are whole numbers from ``low`` to ``high``; otherwise numbers above 0, at most ``high``. If
    ``high`` is 0, values have no bounds.
    """

    kind: str
    unit: str
    required: str
    meaning: str
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


EITHER = "this or the other text column"
COLUMNS: Mapping[str, TraceColumn] = {
    "sample_id": TraceColumn("integers or strings", "", "no", "unique name of the sample; default: its row number"),
    "text_tokens": TraceColumn("numbers", "tokens", EITHER, "length of the text; used if both columns exist", MAX_TEXT),
    "text_chars": TraceColumn(
        "numbers", "characters", EITHER, "text length, divided by `model.tokens.text_chars_per_token`", MAX_TEXT
    ),
    "image_widths": TraceColumn(
        "lists of numbers",
        "pixels",
        "with images",
        "width of each image of the sample, then the width of its video's frames if it has one",
        MAX_PIXELS,
        low=1,
    ),
    "image_heights": TraceColumn(
        "lists of numbers", "pixels", "with images", "heights in the same order", MAX_PIXELS, low=1
    ),
    "n_images": TraceColumn("numbers", "images", "no", "images without video; checked against the lists", MAX_TEXT),
    "audio_seconds": TraceColumn(
        "numbers", "seconds", "with audio", "length of the sample's audio", MAX_SECONDS, False
    ),
    "video_seconds": TraceColumn(
        "numbers", "seconds", "with video", "length of the sample's video", MAX_SECONDS, False
    ),
    "text_words": TraceColumn("any", "words", "no", "not read"),
}
