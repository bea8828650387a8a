"""Compiled loops are those of the code as it is."""

import os
import subprocess
import sys
from pathlib import Path

STEP = """
from entrain_bench.base.compiled import njit

@njit()
def step(value):
    return value + {added}
"""
LOOP = """
from entrain_bench.base.compiled import njit
from mine.step import step

@njit()
def loop(count):
    value = 0
    for _ in range(count):
        value = step(value)
    return value
"""


def test_a_loop_is_compiled_anew_when_a_function_of_another_file_changes_that_it_calls(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "loop.py").write_text(LOOP)

    def looped(added: int) -> int:
        (package / "step.py").write_text(STEP.format(added=added))
        call = [sys.executable, "-c", "from mine.loop import loop; print(loop(3))"]
        # Python tells its own compiled files apart by whole seconds.
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        return int(subprocess.run(call, env=environment, stdout=subprocess.PIPE, check=True).stdout)

    assert [looped(1), looped(2)] == [3, 6]
