"""Files that prove themselves: nothing that was changed, and nothing of another key, is believed."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import pytest

from entrain_bench.records.metrics import check_numbers, check_results
from entrain_bench.records.sealed import sealed, unsealed

KEY = "0123456789abcdef"
VALUES: dict[str, Any] = {
    "metrics": {"iteration_time_s": 2.5, "mfu": 1e-300},
    "iterations": [{"loss": float("inf")}],
    "names": ["\N{GREEK SMALL LETTER MU}", None, True, 0.1 + 0.2],
}


def test_what_was_sealed_is_read_as_it_was() -> None:
    assert unsealed(sealed(KEY, VALUES), KEY) == {**VALUES, "key": KEY}
    # A tuple is a list, and how lines are broken does not count.
    assert unsealed(json.dumps(json.loads(sealed(KEY, {"a": (1, 2)}))).encode(), KEY) == {"a": [1, 2], "key": KEY}


def test_a_file_of_another_key_is_not_believed() -> None:
    with pytest.raises(ValueError, match="it belongs to key 0123456789abcdef"):
        unsealed(sealed(KEY, VALUES), "f" * 16)
    renamed = sealed(KEY, VALUES).replace(KEY.encode(), b"f" * 16)
    with pytest.raises(ValueError, match="its content is not that of its hash"):
        unsealed(renamed, "f" * 16)


def test_no_flipped_bit_passes() -> None:
    content, chance = sealed(KEY, VALUES), random.Random(0)
    for _ in range(500):
        place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        changed = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
        found = None
        with suppress(ValueError):
            found = unsealed(changed, KEY)
        # White space may become other white space.
        assert found in (None, {**VALUES, "key": KEY})


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b'{"key": "0123456789abcdef", "sha256": 1}', b"\xff"])
def test_what_is_no_such_file_is_not_believed(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unsealed(content, KEY)


@pytest.mark.parametrize("value", [-5, float("nan"), float("inf"), "fast", None, True, [1.0]])
def test_what_no_metric_can_be(value: object) -> None:
    with pytest.raises(ValueError, match="planning_time_s="):
        check_numbers({"iteration_time_s": 1.0, "planning_time_s": value})


def test_what_some_metrics_can_be_and_a_result_cannot() -> None:
    check_numbers({"gap_to_lower_bound": -0.2, "loss": float("nan"), "grad_norm": float("inf"), "mfu": -1e-17})
    for metrics in ({}, {"iteration_time_s": 0.0}):
        with pytest.raises(ValueError, match=r"iteration_time_s=.* must be above 0"):
            check_results(metrics, [])
    with pytest.raises(ValueError, match="mfu=None"):
        check_results({"iteration_time_s": 1.0}, [{"mfu": None}])
