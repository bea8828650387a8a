"""Host times: what every replica's host does for itself counts once."""

from __future__ import annotations

from time import sleep

import pytest

from entrain_bench.base.hosttime import HostTime, each_replica_alone, stopwatch


def test_work_of_each_replica_counts_once_for_a_cluster() -> None:
    with stopwatch() as time:
        sleep(0.02)
        with each_replica_alone(4):
            sleep(0.04)
        with each_replica_alone(1):
            sleep(0.01)
    assert time.total_s >= 0.07
    assert 0.03 <= time.spread_s <= 0.75 * time.total_s
    with each_replica_alone(4):
        sleep(0.01)
    assert time.spread_s <= 0.75 * time.total_s


def test_a_cluster_waits_for_what_does_not_fit_into_an_iteration() -> None:
    assert HostTime(3.0, 1.5).exposed_s(1.0) == pytest.approx(0.5)
    assert HostTime(3.0, 2.5).exposed_s(1.0) == 0
