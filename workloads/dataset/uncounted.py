"""Data that a scan does not count: fields by name, and marks in texts that differ from the media found."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from entrain_bench.base.errors import UserError

from .fields import KINDS, Chosen, RawSample

# Share of rows from which a scan fails: marks and media that differ, or names of media that nothing reads.
MAX_SHARE = 0.01
# Fields that keep their names; the others are summed.
_MAX_FIELDS = 256


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
    # By kind and name, rows and amount.
    left: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    unmatched: int = 0
    example: str = ""

    def add(self, name: str, row: Any, sample: RawSample) -> None:
        """Add a row, its name, and its sample."""
        self.rows += 1
        for key, value in row.items() if isinstance(row, Mapping) else ():
            if value not in (None, "", []) and (key in self.fields or len(self.fields) < _MAX_FIELDS):
                self.fields[key] = self.fields.get(key, 0) + 1
        self.chars += sum(map(len, sample.texts))
        self.media += len(sample.images) + (sample.audio is not None) + (sample.video is not None)
        for (kind, place), amount in sample.left.items():
            self._leave(kind, place, 1, amount)
        if sample.unmatched:
            self.unmatched += 1
            self.example = self.example or f"{name}: {sample.unmatched}"

    def _leave(self, kind: str, place: str, rows: int, amount: int) -> None:
        names = self.left.setdefault(kind, {})
        entry = names.setdefault(place if place in names or len(names) < _MAX_FIELDS else "others", [0, 0])
        entry[0] += rows
        entry[1] += amount

    def __add__(self, other: "Uncounted") -> "Uncounted":
        both = Uncounted(
            self.rows + other.rows,
            dict(Counter(self.fields) + Counter(other.fields)),
            self.chars + other.chars,
            self.media + other.media,
            unmatched=self.unmatched + other.unmatched,
            example=self.example or other.example,
        )
        for left in (self.left, other.left):
            for kind, names in left.items():
                for place, (rows, amount) in names.items():
                    both._leave(kind, place, rows, amount)
        return both

    def left_fields(self) -> Iterator[LeftField]:
        """Yield the fields that are not counted, those of media first, then texts by their characters."""
        for kind in sorted(self.left, key=lambda each: each == "text"):
            for name, (rows, amount) in sorted(self.left[kind].items(), key=lambda pair: (-pair[1][1], pair[0])):
                yield LeftField(kind, name, rows, amount)

    def refuse(self, where: str, chosen: Chosen, items: Mapping[str, int]) -> None:
        """Raise ``UserError`` for media that nothing reads, for unknown fields, and where marks and media differ.

        ``items`` are the media found of each kind; ``where`` starts the message.
        """
        many = max(1, self.rows)
        for left in self.left_fields():
            wanted = [left.kind] if left.kind in KINDS else [*KINDS] if left.kind == "bytes" else []
            open_kinds = [each for each in wanted if getattr(chosen, each) is not None]
            if open_kinds and not any(items[each] for each in wanted) and left.rows > MAX_SHARE * many:
                what, given = open_kinds[0], getattr(chosen, open_kinds[0])
                holds = "holds bytes" if left.kind == "bytes" else "names some"
                raise UserError(
                    f"source.{what}={given}: finds no {what}, but the field {left.name} {holds} "
                    f"({left.rows:,} of {many:,} rows). "
                    f"Set source.{what}={left.name}, or source.{what}=null to leave them out"
                )
        fields = (
            f"fields: {', '.join(self.fields) or 'none'}. Set source.text, source.images, source.audio or source.video"
        )
        missing = [name for name in chosen.names if name.partition(".")[0] not in self.fields]
        # Without any row, the reason of the first bad file says more.
        if self.rows and missing:
            raise UserError(f"{where}: has no field {missing[0]}; {fields}")
        if self.rows and not (self.chars or self.media):
            raise UserError(f"{where}: no field has a known name; {fields}")
        if self.unmatched > MAX_SHARE * many:
            unread = ", ".join(each.name for each in self.left_fields() if each.kind != "text")
            raise UserError(
                f"{where}: in {self.unmatched:,} of {many:,} rows marks such as <image> and media differ (first: "
                f"{self.example}{'; not read: ' if unread else ''}{unread}). Set source.images, source.audio or "
                "source.video to the field of the media, or source.marks=ignore"
            )
