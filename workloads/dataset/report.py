"""The result of a scan: counts of samples, left-out samples and uncounted fields, and errors of a random part."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from entrain_bench.base.errors import UserError

from .conventions import KINDS, Chosen
from .fields import RawSample

# Names of media by kind.
ITEMS = {"images": "images", "audio": "sounds", "video": "videos"}
# Left-out samples that are listed; all are counted.
MAX_LISTED = 20
# Share of rows from which a scan fails: marks and media that differ, or names of media that nothing reads.
MAX_SHARE = 0.01
# Fields that keep their names; the others are summed by kind.
_MAX_FIELDS = 256


def _add(counts: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add numbers and mappings of them by name; of lists the first entries stay, of texts the first."""
    for name, value in more.items():
        key = name if name in counts or len(counts) < _MAX_FIELDS else f"{name.partition(' ')[0]} others"
        known = counts.get(key)
        if isinstance(known, dict):
            _add(known, value)
        elif isinstance(known, list):
            counts[key] = [*known, *value][:MAX_LISTED]
        elif isinstance(known, str):
            counts[key] = known or value
        else:
            counts[key] = value if known is None else known + value


@dataclass(frozen=True, slots=True)
class LeftField:
    """A field that is not counted: its rows, and characters of its texts or number of its media (``kind``)."""

    kind: str
    name: str
    rows: int
    amount: int


@dataclass(slots=True)
class Uncounted:
    """Counts of rows: all, those with a value in each field, and those whose marks differ from their media."""

    rows: int = 0
    fields: dict[str, int] = field(default_factory=dict)
    # Characters of texts that are counted, and media found.
    chars: int = 0
    media: int = 0
    # Rows and amounts by kind and name with a space between them.
    left: dict[str, dict[str, int]] = field(default_factory=dict)
    unmatched: int = 0
    example: str = ""

    def add(self, name: str, row: Any, sample: RawSample) -> None:
        """Add a row, its name, and its sample."""
        self.rows += 1
        if isinstance(row, dict):
            _add(self.fields, {key: 1 for key, value in row.items() if value not in (None, "", [])})
        self.chars += sum(map(len, sample.texts))
        self.media += sample.num_media
        for (kind, place), amount in sample.left.items():
            _add(self.left, {f"{kind} {place}": {"rows": 1, "amount": amount}})
        if sample.marks not in (0, sample.num_media):
            self.unmatched += 1
            self.example = self.example or f"{name}: {sample.marks} marks, {sample.num_media} media"

    def left_fields(self) -> list[LeftField]:
        """Return the fields that are not counted, those of media first, then texts by their characters."""
        found = [LeftField(*key.split(" ", 1), **counts) for key, counts in self.left.items()]  # type: ignore[arg-type]
        return sorted(found, key=lambda each: (each.kind == "text", -each.amount, each.name))

    def refuse(self, where: str, chosen: Chosen, found: Mapping[str, int]) -> None:
        """Raise ``UserError`` for media that nothing reads, for unknown fields, and where marks and media differ.

        ``found`` has the number of media of each kind; ``where`` starts the message.
        """
        many = max(1, self.rows)
        left_fields = self.left_fields()
        for left in left_fields:
            wanted = [left.kind] if left.kind in KINDS else [*KINDS] if left.kind == "bytes" else []
            open_kinds = [each for each in wanted if getattr(chosen, each) is not None]
            if open_kinds and not any(found[each] for each in wanted) and left.rows > MAX_SHARE * many:
                what, given = open_kinds[0], getattr(chosen, open_kinds[0])
                holds = "holds bytes" if left.kind == "bytes" else "names some"
                raise UserError(
                    f"source.{what}={given}: finds no {what}, but the field {left.name} {holds} "
                    f"({left.rows:,} of {many:,} rows). "
                    f"Set source.{what}={left.name}, or source.{what}=null to leave them out"
                )
        # Names that a shell and ``source.text`` take without quotes; the first has most characters.
        texts = [
            left.name for left in left_fields if left.kind == "text" and left.name.replace(".", "_").isidentifier()
        ]
        text = f"source.text={texts[0]} (the longest text)" if texts else "source.text"
        fields = f"fields: {', '.join(self.fields) or 'none'}. Set {text}, source.images, source.audio or source.video"
        missing = [name for name in chosen.names if name.partition(".")[0] not in self.fields]
        # Without any row, the reason of the first bad file says more.
        if self.rows and missing:
            raise UserError(f"{where}: has no field {missing[0]}; {fields}")
        if self.rows and not (self.chars or self.media):
            raise UserError(f"{where}: no field has a known name; {fields}")
        if self.unmatched > MAX_SHARE * many:
            unread = ", ".join(left.name for left in left_fields if left.kind != "text")
            raise UserError(
                f"{where}: in {self.unmatched:,} of {many:,} rows marks such as <image> and media differ (first: "
                f"{self.example}{'; not read: ' if unread else ''}{unread}). Set source.images, source.audio or "
                "source.video to the field of the media, or source.marks=ignore"
            )


@dataclass(frozen=True, slots=True)
class ScanReport:
    """The result of a scan or of a shard: rows of the trace, and numbers of texts, images, sounds and videos."""

    samples: int = 0
    items: Mapping[str, int] = field(default_factory=lambda: {"texts": 0} | dict.fromkeys(ITEMS.values(), 0))
    # Characters, images and seconds.
    sums: Mapping[str, float] = field(default_factory=dict)
    # Left-out samples by reason, and of the first ones name and problem.
    counts: Mapping[str, int] = field(default_factory=dict)
    listed: Sequence[Sequence[str]] = field(default_factory=list)
    shards: int = 0
    uncounted: Uncounted = field(default_factory=Uncounted)
    # Whether an earlier scan of the same data and settings was reused.
    again: bool = False
    # Endings of files next to those that are read, and how many.
    unread: Mapping[str, int] = field(default_factory=dict)
    # Shards of the data, and the largest errors of means at 95% confidence as shares, if some were drawn.
    all_shards: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows that were read, with those that are left out."""
        return self.samples + sum(self.counts.values())

    def __add__(self, other: "ScanReport") -> "ScanReport":
        values = asdict(self)
        _add(values, asdict(other))
        return ScanReport.of(values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "ScanReport":
        """Return the report of its plain values."""
        return cls(**{**values, "uncounted": Uncounted(**values["uncounted"])})

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]], **others: Any) -> "ScanReport":
        """Return the report of a shard's rows of the trace."""
        seconds = {kind: [row[f"{kind}_seconds"] for row in rows] for kind in ("audio", "video")}
        num_images = sum(row["n_images"] for row in rows)
        items = {"texts": sum(row["text_chars"] > 0 for row in rows), "images": num_images}
        items |= {ITEMS[kind]: sum(map(len, values)) for kind, values in seconds.items()}
        sums = {"text": sum(row["text_chars"] for row in rows), "images": num_images}
        sums |= {f"seconds of {kind}": sum(map(sum, values)) for kind, values in seconds.items()}
        return cls(len(rows), items, sums, shards=1, **others)


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
        values = np.array([report.sums[name] for report in reports], np.float64)
        if many > 1 and values.sum() > 0:
            deviations = values - values.sum() / counts.sum() * counts
            variance = (1 - many / total) * many / (many - 1) * (deviations**2).sum()
            errors[name] = float(t.ppf(0.975, many - 1) * np.sqrt(variance) / values.sum())
    return errors
