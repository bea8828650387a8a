"""Settings every test shares."""

import gc
import os
import signal
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings

from entrain_bench.config.targets import trust

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Compositions and what modules import, known to later runs of the tests as to a user's later commands.
os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parents[1] / ".pytest_cache" / "cache"))
# A busy machine decides nothing.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
# A shell's background jobs ignore Ctrl-C, and what they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Strategies of the tests' own (support/train).
trust(Path(__file__).parent)

# Thousands of modules and tests are made once and stay: nothing of them is looked for as garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, of the tests alone."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Training first: one worker gets all of it and starts one server of ranks, and none waits for it at the end.

    Then from the last to the first: what runs all strategies comes after training has, so that each is compiled once.
    ``PART=2/5`` leaves out the wide tests of the other four fifths.
    """
    part, parts = map(int, os.environ.get("PART", "0/1").split("/"))
    others = {item for item in items if item.get_closest_marker("wide") and crc32(item.nodeid.encode()) % parts != part}
    config.hook.pytest_deselected(items=[*others])
    items[:] = [item for item in items if item not in others]
    training = [item for item in items if "train" in item.path.parts]
    items[:] = training + [item for item in reversed(items) if "train" not in item.path.parts]
