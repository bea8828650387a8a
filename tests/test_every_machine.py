"""The same results on every machine: vector units, compilers, threads and hash seeds that this one can do without.

Every cell here has come out different on some machine before its decisions were made exact, or stands for a strategy
of which none had.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.outcomes import outcome_of

ROOT = Path(__file__).parents[1]
TRACE_1B = ("workload=coco", "model=qwen25vl_llama3_1b", "iterations=1")
SMALL_AV = (
    "workload=synthetic_av",
    "model=tiny_av",
    "cluster=a40x16",
    "global_batch=64",
    "layout.tp=1",
    "iterations=2",
)
FREE = ("layout.tp=null", "layout.dp=null")
CELLS = (
    ("strategy=disttrain", *TRACE_1B, *FREE),
    ("strategy=disttrain", "workload=coco", "model=qwen25vl_llama3_3b", "iterations=1"),
    ("strategy=entrain", "strategy.planner.encoder_stages=2", *TRACE_1B),
    # Short of memory: recomputes by chunk.
    ("strategy=dip", "workload=mathvision", "iterations=1"),
    # Its assigner learns.
    ("strategy=dflop", *TRACE_1B, "iterations=3"),
    ("strategy=megatron", *TRACE_1B, *FREE),
    ("strategy=hetero_colocated", *TRACE_1B),
    ("strategy=hetero_noncolocated", *TRACE_1B),
    ("strategy=optimus", *TRACE_1B),
    # Sharded weights, items and samples dealt out and placed by node.
    ("strategy=orchmllm", *TRACE_1B, "layout.dp=null"),
    # Samples drawn, estimates wrong in both ways, and actions that nobody can foresee.
    ("strategy=entrain", "belief_error=0.2", "belief_bias=0.2", "action_noise=0.1", "speed.memory=0.7", *SMALL_AV),
)
DISPATCHED = tuple(np._core._multiarray_umath.__cpu_dispatch__)  # type: ignore[attr-defined]
AVX512 = tuple(name for name in DISPATCHED if "AVX512" in name or name == "X86_V4")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
NO_AVX2 = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(DISPATCHED),
    "OPENBLAS_CORETYPE": "Nehalem",
    # What the library of the C language may use by itself, too.
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-AVX2_Usable,-FMA,-FMA_Usable,-AVX",
}
NO_AVX512 = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(AVX512),
    "OPENBLAS_CORETYPE": "Haswell",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL",
}
OTHER_ORDER = {
    "OMP_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "2",
    "NUMBA_NUM_THREADS": "2",
    "PYTHONHASHSEED": "12345",
}
# What is compiled for it is kept for the next run of the tests, apart from what is compiled for this machine.
GENERIC = {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(ROOT / ".pytest_cache" / "generic")}
# Each machine differs in several ways, any of which shows.
MACHINES = [
    pytest.param(NO_AVX2 | OTHER_ORDER, id="neither AVX2 nor FMA, two threads, another hash seed"),
    # Compiles every loop anew.
    pytest.param(NO_AVX2 | GENERIC, marks=pytest.mark.slow, id="any x86-64, for numba too"),
    pytest.param(NO_AVX512 | OTHER_ORDER, marks=pytest.mark.slow, id="no AVX512, two threads, another hash seed"),
]
# What numba may be told; anything else, as fastmath or parallel, may change the order or the kind of operations.
OPTIONS = {"cache", "nogil", "forceinline", "_nrt"}


def outcomes(changed: dict[str, str]) -> list[dict[str, object]]:
    """Outcomes of the cells in a process of its own, under other settings of the environment."""
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.outcomes"],
        input=json.dumps(CELLS),
        env=os.environ | ONE_THREAD | {"PYTHONPATH": paths} | changed,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def here() -> list[dict[str, object]]:
    return [outcome_of(overrides) for overrides in CELLS]


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names the vector units of x86-64")
@pytest.mark.parametrize("machine", MACHINES)
def test_results_are_the_same_to_the_last_bit_whatever_the_processor_can_do(
    machine: dict[str, str], here: list[dict[str, object]]
) -> None:
    for cell, one, other in zip(CELLS, here, outcomes(machine), strict=True):
        assert one == other, " ".join(cell)


@pytest.mark.wide
def test_compiled_loops_are_told_nothing_that_changes_their_operations() -> None:
    files = [file for folder in ("entrain_bench", "strategies", "workloads") for file in (ROOT / folder).rglob("*.py")]
    calls = [
        node
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("njit", "jit")
    ]
    assert len(calls) > 10
    assert {keyword.arg for call in calls for keyword in call.keywords} <= OPTIONS
