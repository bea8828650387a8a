"""What of gradients' and weights' buckets hides: worked by hand, and against an event loop in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.costs.buckets import bucket_parameters, gather_lead_s, gather_stall_s, sync_lag_s


@dataclass(frozen=True)
class Stage:
    """One pass over a stage: seconds and parameters of each layer, parameters and seconds of each bucket."""

    layer_s: Sequence[float]
    layer_parameters: Sequence[float]
    parameters: Sequence[float]
    bucket_s: Sequence[float]

    def arguments(self) -> tuple[np.ndarray, ...]:
        return np.array([self.layer_s]), *map(np.array, (self.layer_parameters, self.parameters, self.bucket_s))


# Two layers of 20 and 40 parameters, which a backward passes in 4 s (last layer) and 3 s, in buckets of 25, 25 and 10:
# the first holds 25 of the last layer, the second its other 15 and 10 of the first layer, the third the other 10.
BY_HAND = Stage([3.0, 4.0], [20.0, 40.0], [25.0, 25.0, 10.0], [2.0, 5.0, 1.0])


def test_the_lag_of_two_layers_and_three_buckets_by_hand() -> None:
    # Ready at 2.5, 4 + 1.5 and 7. The first is through at 4.5; the second runs 5.5-10.5, the third after it to 11.5.
    assert sync_lag_s(*BY_HAND.arguments()).tolist() == [11.5 - 7.0]


def test_the_stall_of_two_layers_and_three_buckets_by_hand() -> None:
    # A forward needs bucket 3 at 0, bucket 2 at 1.5 (half of the first layer), bucket 1 at 3 + 15 / 40 of 4 = 4.5 s
    # of its own time. Bucket 3 keeps it waiting for 1 s; bucket 2 takes 5, of which 1.5 are hidden; bucket 1 takes 2 of
    # the 3 s that go by.
    assert gather_stall_s(*BY_HAND.arguments()).tolist() == [1.0 + 3.5]


def test_the_lead_of_two_layers_and_three_buckets_by_hand() -> None:
    # Gathered at 1, 6 and 8, needed 0, 1.5 and 4.5 after the forward's start.
    assert gather_lead_s(*BY_HAND.arguments()).tolist() == [4.5]


@pytest.mark.parametrize(
    ("parameters", "copies", "overlapped", "expected"),
    [
        (0.0, 4, True, []),
        (0.0, 4, False, []),
        (30e6, 4, True, [30e6]),
        (80e6, 4, True, [40e6, 40e6]),
        (100e6, 4, True, [40e6, 40e6, 20e6]),
        (100e6, 64, True, [64e6, 36e6]),
        (100e6, 4, False, [100e6]),
    ],
)
def test_buckets_by_hand(parameters: float, copies: int, overlapped: bool, expected: list[float]) -> None:
    assert bucket_parameters(parameters, copies, overlapped).tolist() == expected


# The event loop: tiny steps of a pass from one bucket's edge or layer's edge to the next.


@dataclass(frozen=True)
class Events:
    """When a pass over a stage, once it runs for itself, comes to the edge of each bucket, in the pass's order."""

    first_s: list[float]
    last_s: list[float]

    @classmethod
    def of(cls, layer_s: Sequence[float], layer_parameters: Sequence[float], parameters: Sequence[float]) -> Events:
        clock, bucket, left = 0.0, 0, parameters[0]
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for seconds, held in zip(layer_s, layer_parameters, strict=True):
            begin, done = clock, 0.0
            while done < held:
                first.setdefault(bucket, begin + seconds * done / held)
                part = min(left, held - done)
                done, left = done + part, left - part
                last[bucket] = begin + seconds * done / held
                if left == 0 and bucket + 1 < len(parameters):
                    bucket, left = bucket + 1, parameters[bucket + 1]
            clock = begin + seconds
        return cls([first[k] for k in range(len(parameters))], [last[k] for k in range(len(parameters))])


seconds = st.integers(0, 40).map(float)


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    layers = draw(st.lists(st.tuples(seconds, st.integers(1, 40).map(float)), min_size=1, max_size=5))
    total = int(sum(held for _, held in layers))
    size = draw(st.integers(1, total))
    parameters = [float(size)] * (total // size) + [float(total % size)] * (total % size > 0)
    bucket_s = draw(st.lists(seconds, min_size=len(parameters), max_size=len(parameters)))
    return Stage([each for each, _ in layers], [held for _, held in layers], parameters, bucket_s)


@given(stages())
def test_the_lag_equals_an_event_loop(stage: Stage) -> None:
    events = Events.of(stage.layer_s[::-1], stage.layer_parameters[::-1], stage.parameters)
    through = 0.0
    for ready, took in zip(events.last_s, stage.bucket_s, strict=True):
        through = max(through, ready) + took
    assert sync_lag_s(*stage.arguments())[0] == pytest.approx(through - sum(stage.layer_s), rel=1e-9, abs=1e-9)


def forward_end_s(stage: Stage, begin: float, launched_at_0: bool) -> float:
    """End of a forward that begins at some time and waits inside for each bucket of weights."""
    parameters, bucket_s = stage.parameters[::-1], stage.bucket_s[::-1]
    events = Events.of(stage.layer_s, stage.layer_parameters, parameters)
    waited, gathered = 0.0, 0.0
    launched = 0.0 if launched_at_0 else begin
    for first, took in zip(events.first_s, bucket_s, strict=True):
        gathered = (max(gathered, launched) if launched_at_0 else launched) + took
        waited += max(0.0, gathered - (begin + first + waited))
        # Without alignment the next gather is launched when this one has been waited for.
        launched = 0.0 if launched_at_0 else begin + first + waited
    return begin + sum(stage.layer_s) + waited


@given(stages(), seconds)
def test_the_stall_equals_an_event_loop(stage: Stage, begin: float) -> None:
    end = forward_end_s(stage, begin, launched_at_0=False)
    stall = gather_stall_s(*stage.arguments())[0]
    assert end == pytest.approx(begin + stall + sum(stage.layer_s), rel=1e-9, abs=1e-9)


@given(stages())
def test_the_lead_is_the_earliest_start_that_never_waits_and_waiting_inside_ends_no_earlier(stage: Stage) -> None:
    lead, own = gather_lead_s(*stage.arguments())[0], sum(stage.layer_s)
    assert forward_end_s(stage, lead, launched_at_0=True) == pytest.approx(lead + own, rel=1e-9, abs=1e-9)
    # Nothing is lost by waiting at the start: whoever begins at once ends at the same time.
    assert forward_end_s(stage, 0.0, launched_at_0=True) == pytest.approx(lead + own, rel=1e-9, abs=1e-9)
