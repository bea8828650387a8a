"""The result of a scan: counts of samples, left-out samples and uncounted fields, and errors of a random part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from entrain_bench.base.errors import UserError

from .conventions import KINDS, Chosen
from .fields import RawSample
from .source import BadSampleError

# Names of media by kind.
ITEMS = {"images": "images", "audio": "sounds", "video": "videos"}
# Left-out samples that are listed; all are counted.
MAX_LISTED = 20
# Share of rows from which a scan fails: marks and media that differ, or names of media that nothing reads.
MAX_SHARE = 0.01
_SUMS = ("text", "images", "seconds of audio", "seconds of video")
# Names that are counted one by one; the others are summed by kind.
_MAX_NAMES = 256


class LeftField(NamedTuple):
    """A field that is not counted: its rows, and characters of its texts or number of its media (``kind``)."""

    kind: str
    name: str
    rows: int
    amount: int


@dataclass(slots=True)
class ScanReport:
    """Counts of a scan or of a shard, which add up; ``samples`` are rows of the trace."""

    samples: int = 0
    shards: int = 0
    # Numbers of texts, images, sounds and videos; and characters, images and seconds.
    items: dict[str, int] = field(default_factory=lambda: {"texts": 0} | dict.fromkeys(ITEMS.values(), 0))
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0))
    # Left-out samples by reason, and of the first ones name and problem.
    counts: dict[str, int] = field(default_factory=dict)
    listed: list[list[str]] = field(default_factory=list)
    # Rows that hold a sample, also one that is left out: all, with a value in each field, and with other marks than
    # media; then media and characters that were found.
    rows: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    unmatched: int = 0
    example: str = ""
    media: int = 0
    chars: int = 0
    # Fields that are not counted, by kind and name with a space between them.
    left_rows: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    # Whether an earlier scan of the same data and settings was reused.
    again: bool = False
    # Endings of files next to those that are read, and how many.
    unread: dict[str, int] = field(default_factory=dict)
    # Shards of the data, and the largest errors of means at 95% confidence as shares, if some were drawn.
    all_shards: int = 0
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows that were read, with those that are left out."""
        return self.samples + sum(self.counts.values())

    def __add__(self, other: "ScanReport") -> "ScanReport":
        return ScanReport(*(_added(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)))

    def find(self, name: str, row: Any, sample: RawSample) -> None:
        """Count a row, its name, and its sample."""
        self.rows += 1
        if isinstance(row, dict):
            _count(self.seen, {key: 1 for key, value in row.items() if value not in (None, "", [])})
        self.chars += sum(map(len, sample.texts))
        self.media += sample.num_media
        for (kind, place), many in sample.left.items():
            _count(self.left, {f"{kind} {place}": many})
            _count(self.left_rows, {f"{kind} {place}": 1})
        if sample.marks not in (0, sample.num_media):
            self.unmatched += 1
            self.example = self.example or f"{name}: {sample.marks} marks, {sample.num_media} media"

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count rows of the trace."""
        self.samples += len(rows)
        chars = [row["text_chars"] for row in rows]
        images = sum(row["n_images"] for row in rows)
        seconds = [[row[f"{kind}_seconds"] for row in rows] for kind in ("audio", "video")]
        counts = [sum(many > 0 for many in chars), images, *(sum(map(len, lists)) for lists in seconds)]
        _count(self.items, dict(zip(self.items, counts, strict=True)))
        sums = [sum(chars), images, *(sum(map(sum, lists)) for lists in seconds)]
        _count(self.sums, dict(zip(_SUMS, sums, strict=True)))

    def leave_out(self, name: str, error: BadSampleError) -> None:
        """Count a left-out sample, and list the first ones in letters that a terminal shows unchanged."""
        _count(self.counts, {error.reason: 1})
        if len(self.listed) < MAX_LISTED:
            plain = ("".join(one if one.isprintable() else "?" for one in text[:160]) for text in (name, str(error)))
            self.listed.append([*plain])

    def left_fields(self) -> list[LeftField]:
        """Return the fields that are not counted, those of media first, then texts by their characters."""
        keys = ((key, key.partition(" ")) for key in self.left)
        found = [LeftField(kind, name, self.left_rows[key], self.left[key]) for key, (kind, _, name) in keys]
        return sorted(found, key=lambda each: (each.kind == "text", -each.amount, each.name))

    def refuse(self, where: str, chosen: Chosen) -> None:
        """Raise ``UserError`` for media that nothing reads, for unknown fields, and where marks and media differ."""
        few = MAX_SHARE * self.rows
        left_fields = self.left_fields()
        for left in left_fields:
            wanted = KINDS if left.kind == "bytes" else [kind for kind in KINDS if kind == left.kind]
            open_kinds = [kind for kind in wanted if getattr(chosen, kind) is not None]
            if open_kinds and left.rows > few and not any(self.items[ITEMS[kind]] for kind in wanted):
                what = open_kinds[0]
                raise UserError(
                    f"source.{what}={getattr(chosen, what)}: finds no {what}, but the field {left.name} "
                    f"{'holds bytes' if left.kind == 'bytes' else 'names some'} ({left.rows:,} of {self.rows:,} rows). "
                    f"Set source.{what}={left.name}, or source.{what}=null to leave them out"
                )
        # The longest text whose name a shell and ``source.text`` take without quotes.
        texts = (left.name for left in left_fields if left.kind == "text")
        text = next((f"={each} (the longest text)" for each in texts if each.replace(".", "_").isidentifier()), "")
        hint = f"fields: {', '.join(self.seen) or 'none'}. Set source.text{text}, source.images, source.audio or "
        missing = [f"has no field {each}" for each in chosen.names if each.partition(".")[0] not in self.seen]
        missing += [] if self.chars or self.media else ["no field has a known name"]
        # Without any row, the reason of the first bad file says more.
        if self.rows and missing:
            raise UserError(f"{where}: {missing[0]}; {hint}source.video")
        if self.unmatched > few:
            unread = ", ".join(left.name for left in left_fields if left.kind != "text")
            raise UserError(
                f"{where}: in {self.unmatched:,} of {self.rows:,} rows marks such as <image> and media differ (first: "
                f"{self.example}{'; not read: ' if unread else ''}{unread}). Set source.images, source.audio or "
                "source.video to the field of the media, or source.marks=ignore"
            )


def _count(counts: dict[str, Any], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        key = name if name in counts or len(counts) < _MAX_NAMES else f"{name.partition(' ')[0]} others"
        counts[key] = counts.get(key, 0) + value


def _added(one: Any, other: Any) -> Any:
    """Add numbers, and mappings of them by name; of lists the first entries stay, of texts the first."""
    if isinstance(one, dict):
        total = dict(one)
        _count(total, other)
        return total
    return one or other if isinstance(one, str) else one + other if isinstance(one, int) else (one + other)[:MAX_LISTED]


def sampling_errors(reports: Sequence[ScanReport], total: int) -> dict[str, float]:
    """Return how far means of a sample of ``total`` shards may be off, as shares, at 95% confidence.

    Shards differ more than rows do, so errors are those of a ratio over shards (Cochran, Sampling Techniques, 6.3),
    with Student's factor. No error is known of one shard.
    """
    from scipy.stats import t

    many = len(reports)
    counts = np.array([report.samples for report in reports], np.float64)
    errors = dict[str, float]()
    for name in reports[0].sums:
        values = np.array([report.sums.get(name, 0) for report in reports], np.float64)
        if many > 1 and values.sum() > 0:
            deviations = values - values.sum() / counts.sum() * counts
            variance = (1 - many / total) * many / (many - 1) * (deviations**2).sum()
            errors[name] = float(t.ppf(0.975, many - 1) * np.sqrt(variance) / values.sum())
    return errors
