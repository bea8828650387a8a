"""The settings in which a claim is measured, and the one rule that makes a fair setting of a published one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from entrain_bench.answers.documents.definition import merge_overrides, override_key
from entrain_bench.base.errors import require

SIDES = ("common", "of", "to")
# Overrides that take the place of a setting's, of all runs or of those of one side.
type Change = Mapping[str, tuple[str, ...]]
STRATEGY = "strategy"
# What a fair setting leaves to the tuner, for every strategy.
FREE = (
    *("tuning=equal", "layout.tp=null", "layout.cp=null", "layout.pp=null", "layout.dp=null"),
    *("layout.recompute=null", "microbatch_size=null"),
)
# Keys of a strategy, its layout and its tuning; and of a device that is not the published one.
TUNED = ("layout.", "microbatch_size", "strategy.", "strategy/", "tuning", "cluster.device.")
# What of the job may differ between two sides.
OF_SIDES = ("cluster",)
BASELINE = "megatron"
FAIR_WORDS = (
    "One rule for all claims: the same job for both sides; degrees, microbatch size and recomputation are free and "
    "tuned in the same way; where systems are compared, the tuned Megatron baseline is one of them."
)


@dataclass(frozen=True, slots=True)
class ClaimSide:
    """Overrides of the runs behind a number.

    Attributes:
        words: what the setting is, and what of it was chosen here.
        common: of all runs.
        of: of the runs in the numerator.
        to: of the runs they are compared with; empty to take the metric itself.
        at, against: of two situations; the result is the ratio under ``at`` over the ratio under ``against``,
            or the metric itself under both where ``to`` is empty.
        against_of, against_to: the sides of the second situation, if they are not those of the first.
        measure: what it measures otherwise than the claim, such as the whole iteration.
    """

    words: str
    common: tuple[str, ...]
    of: tuple[str, ...]
    to: tuple[str, ...] = ()
    at: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    against_of: tuple[str, ...] = ()
    against_to: tuple[str, ...] = ()
    measure: Mapping[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> list[list[tuple[str, ...]]]:
        """The sweeps to run: for every situation the numerator, and the denominator if there is one."""
        situations = [(self.at, self.of, self.to)]
        if self.is_of_two:
            situations.append((self.against, self.against_of or self.of, self.against_to or self.to))
        return [[(*self.common, *at, *side) for side in sides if side] for at, *sides in situations]

    @property
    def is_of_two(self) -> bool:
        """Whether two situations are compared."""
        return bool(self.against or self.against_of or self.against_to)

    @property
    def sweeps(self) -> list[tuple[str, ...]]:
        """The same, one after another."""
        return [side for pair in self.pairs for side in pair]

    def changed(self, change: Change) -> ClaimSide:
        """The setting with overrides of the same keys replaced, and others added.

        What one side alone changes of ``common``, the other side keeps.

        Raises:
            UserError: for a key that tells the two situations apart.
        """
        everywhere, of, to = ({override_key(text) for text in change.get(side, ())} for side in SIDES)
        for text in (*self.at, *self.against):
            changed = override_key(text) in everywhere | of | to
            require(not changed, "change", override_key(text), "a key other than those of at and against")
        shared = _without(self.common, everywhere)
        split = tuple(text for text in shared if override_key(text) in of | to)

        def side(own: tuple[str, ...], name: str, keys: set[str]) -> tuple[str, ...]:
            return (*_without((*split, *own), everywhere | keys), *change.get(name, ())) if own else ()

        return replace(
            self,
            common=(*_without(shared, of | to), *change.get("common", ())),
            of=side(self.of, "of", of),
            to=side(self.to, "to", to),
            against_of=side(self.against_of, "of", of),
            against_to=side(self.against_to, "to", to),
        )


def published_side(side: ClaimSide) -> ClaimSide:
    """The setting, each system tuned as it was published if strategies can be told to."""
    return replace(side, common=("tuning=own", *side.common))


def fair_side(published: ClaimSide, stated: Mapping[str, Sequence[str]], words: str = "") -> ClaimSide:
    """The published job, tuned in the same way for both sides.

    What belongs to a strategy or its layout is left out of the published setting. If both sides are one strategy, the
    parts that tell them apart stay. ``stated`` changes the job and names the baseline.

    Args:
        published: the published setting.
        stated: overrides of the fair setting by side.
        words: what it is besides the rule.

    Raises:
        UserError: for a fair setting that the rule does not allow (``check_fair``).
    """
    sides = {name: [text for text in getattr(published, name) if is_job(text)] for name in ("common", "at", "against")}
    shared = [text for text in published.common if override_key(text) == STRATEGY or _is_part(text)]
    full = {name: merge_overrides(shared, [*getattr(published, name)]) for name in ("of", "to")}
    for name, texts in full.items():
        kept = [text for text in texts if _of_side(override_key(text))]
        sides[name] = merge_overrides(kept, [*stated.get(name, ())])
    if _strategies(sides["of"]) == _strategies(sides["to"]):
        for name, texts in full.items():
            sides[name] = merge_overrides([*sides[name], *filter(_is_part, texts)], [*stated.get(name, ())])
    for name in ("common", "at", "against"):
        sides[name] = merge_overrides(sides[name], [*stated.get(name, ())])
    common = (*FREE, *sides["common"])
    of, to, at, against = (tuple(sides[name]) for name in ("of", "to", "at", "against"))
    side = ClaimSide(" ".join((words, FAIR_WORDS)).strip(), common, of, to, at, against)
    check_fair(side)
    return side


def check_fair(side: ClaimSide) -> None:
    """Refuse a setting that is not fair.

    Raises:
        UserError: if anything is fixed that the rule leaves free, if the sides differ in more than the strategy and the
            size of the cluster, or if the tuned baseline is missing.
    """
    for text in FREE:
        require(text in side.common, "fair.common", override_key(text), f"{text}: the rule of all fair settings")
    stated = [text for text in side.common if text not in FREE]
    for text in (*stated, *side.at, *side.against):
        require(is_job(text), "fair.common", text, "of the job; strategies are tuned by one rule")
    alone = _strategies(side.of) == _strategies(side.to)
    for text in (*side.of, *side.to):
        allowed = _of_side(override_key(text)) or (alone and _is_part(text))
        require(allowed, "fair", text, "a strategy, a part of one compared with itself, or the cluster's size")
    compared = alone or BASELINE in {*_strategies(side.of), *_strategies(side.to)}
    require(bool(side.to) and compared, "fair.to", [*side.to], f"given, with strategy={BASELINE} on one side")


def is_job(override: str) -> bool:
    """Whether an override is of the training job, not of a strategy, its layout or its tuning."""
    return override_key(override) != STRATEGY and not override_key(override).startswith(TUNED)


def _of_side(key: str) -> bool:
    job = key == STRATEGY or key.split(".")[0] in OF_SIDES
    return job and not key.startswith(TUNED)


def _is_part(override: str) -> bool:
    return override_key(override).startswith((f"{STRATEGY}.", f"{STRATEGY}/"))


def _strategies(overrides: Iterable[str]) -> tuple[str, ...]:
    names = [text.partition("=")[2] for text in overrides if override_key(text) == STRATEGY]
    return tuple(names[-1].split(",")) if names else ()


def _without(overrides: Sequence[str], keys: set[str]) -> tuple[str, ...]:
    return tuple(text for text in overrides if override_key(text) not in keys)
