"""Data that a scan does not count: fields by name, and marks in texts that differ from the media found."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from entrain_bench.base.errors import UserError

from .conventions import KINDS, Chosen
from .fields import RawSample

# Share of rows from which a scan fails: marks and media that differ, or names of media that nothing reads.
MAX_SHARE = 0.01
# Fields that keep their names; the others are summed by kind.
_MAX_FIELDS = 256


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Add counts by name."""
    for name, many in more.items():
        key = name if name in counts or len(counts) < _MAX_FIELDS else f"{name.partition(' ')[0]} others"
        counts[key] = counts.get(key, 0) + many


def _is_plain(name: str) -> bool:
    return name.replace(".", "_").isidentifier()


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
    # By kind and name with a space between them.
    left_rows: dict[str, int] = field(default_factory=dict)
    left_amounts: dict[str, int] = field(default_factory=dict)
    unmatched: int = 0
    example: str = ""

    def add(self, name: str, row: Any, sample: RawSample) -> None:
        """Add a row, its name, and its sample."""
        self.rows += 1
        if isinstance(row, Mapping):
            _add(self.fields, {key: 1 for key, value in row.items() if value not in (None, "", [])})
        self.chars += sum(map(len, sample.texts))
        self.media += sample.num_media
        amounts = {f"{kind} {place}": amount for (kind, place), amount in sample.left.items()}
        _add(self.left_amounts, amounts)
        _add(self.left_rows, dict.fromkeys(amounts, 1))
        if sample.marks not in (0, sample.num_media):
            self.unmatched += 1
            self.example = self.example or f"{name}: {sample.marks} marks, {sample.num_media} media"

    def __add__(self, other: "Uncounted") -> "Uncounted":
        both = deepcopy(self)
        for name in ("rows", "chars", "media", "unmatched"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        for name in ("fields", "left_rows", "left_amounts"):
            _add(getattr(both, name), getattr(other, name))
        both.example = self.example or other.example
        return both

    def left_fields(self) -> Iterator[LeftField]:
        """Yield the fields that are not counted, those of media first, then texts by their characters."""
        found = [
            LeftField(*key.split(" ", 1), rows, self.left_amounts[key])  # type: ignore[call-arg, arg-type]
            for key, rows in self.left_rows.items()
        ]
        yield from sorted(found, key=lambda each: (each.kind == "text", -each.amount, each.name))

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
        # Names that a shell and ``source.text`` take without quotes; the first has most characters.
        texts = [each.name for each in self.left_fields() if each.kind == "text" and _is_plain(each.name)]
        text = f"source.text={texts[0]} (the longest text)" if texts else "source.text"
        fields = f"fields: {', '.join(self.fields) or 'none'}. Set {text}, source.images, source.audio or source.video"
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
