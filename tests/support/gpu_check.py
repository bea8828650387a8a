"""A machine for tests of the check on GPUs."""

from __future__ import annotations

from entrain_bench.lab.measuring import Machine


def machine(nvidia_smi: str = "", variables: dict[str, str] | None = None) -> Machine:
    host = {"processor": "one of a kind", "cores": "2", "load average": "0.5"}
    return Machine([], host, variables or {}, nvidia_smi)
