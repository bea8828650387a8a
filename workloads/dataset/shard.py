"""One shard scanned, in a process that may die of what it reads."""

from __future__ import annotations

import errno
import faulthandler
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically

from ..budget import BUDGET
from .interface import BadRecord, BadSampleError, Reason, Shard
from .measure import measure
from .parts import Part

if TYPE_CHECKING:
    from .scan import Scan

_NUMBER = struct.Struct("<q")
# Nothing of the shard has been read.
NOWHERE = -1
# What a network or a machine says in passing: another time the same file may be read.
_PASSING = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}
    | {errno.ECONNRESET, errno.ECONNREFUSED, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
)


@dataclass(frozen=True, slots=True)
class Job:
    """A shard to be scanned to a part; ``skip``: samples that processes died of, by their number, and how."""

    scan: Scan
    shard: Shard
    part: Path
    skip: Mapping[int, str] = field(default_factory=dict)

    @property
    def journal(self) -> Path:
        """The file that says how far the shard has been read, should the process die."""
        return self.part.with_suffix(".journal")


@dataclass(frozen=True, slots=True)
class Scanned:
    """Samples in a shard's part, those left out, and, if there is no part, why."""

    samples: int = 0
    bad: int = 0
    failure: str = ""


def scan_shard(job: Job) -> Scanned:
    """Read a shard and write its part, in which stands what is wrong with samples, or with the file from some on."""
    part = Part(job.scan.tokenizer)
    try:
        _read(job, part)
        write_atomically(job.part, part.finish())
    except UserError as error:
        return Scanned(failure=str(error))
    except OSError as error:
        return Scanned(failure=f"{job.shard.label}: {error}")
    return Scanned(part.num_samples, part.bad.counts.total())


def _read(job: Job, part: Part) -> None:
    seen = 0
    label = job.shard.label
    limits = job.scan.limits
    try:
        with BUDGET.held(), _journal(job.journal) as journal, _watch(job.scan.timeout_s) as beat:
            for number, record in enumerate(job.scan.source.samples(job.shard, limits), job.shard.first):
                _NUMBER.pack_into(journal, 0, number)
                seen += 1
                beat()
                try:
                    if number in job.skip:
                        raise BadSampleError(Reason.CRASH, job.skip[number])
                    if isinstance(record, BadRecord):
                        raise record.error
                    part.add(f"{label}:{number}", measure(record, limits))
                except BadSampleError as error:
                    part.bad.add(f"{label}:{number}", record.key, error)
    except BadSampleError as error:
        part.bad.add(label, f"after {seen} records", error)
    # Whatever the libraries that read files raise on bytes that nobody wrote.
    except Exception as error:
        passing = isinstance(error, OSError) and error.errno in _PASSING
        if passing or isinstance(error, UserError | ConnectionError | TimeoutError):
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        part.bad.add(label, f"after {seen} records", BadSampleError(Reason.FILE, what))


def died_at(journal: Path) -> int:
    """The number of the sample that a process was at when it died; ``NOWHERE`` if it was at none."""
    try:
        (number,) = _NUMBER.unpack(journal.read_bytes())
    except (OSError, struct.error):
        return NOWHERE
    return int(number)


@contextmanager
def _journal(path: Path) -> Iterator[mmap.mmap]:
    """Memory that outlives this process."""
    path.write_bytes(_NUMBER.pack(NOWHERE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), _NUMBER.size) as memory:
        yield memory
    path.unlink(missing_ok=True)


@contextmanager
def _watch(timeout_s: float) -> Iterator[Callable[[], None]]:
    """Ends this process when a sample takes too long, also within a library that is stuck.

    Yields what is to be called when another sample begins. It does not always set the clock, which takes longer than
    most samples do.
    """
    set_at = -timeout_s
    with Path(os.devnull).open("w") as nowhere:

        def beat() -> None:
            nonlocal set_at
            if (now := monotonic()) - set_at > timeout_s / 8:
                faulthandler.dump_traceback_later(timeout_s, file=nowhere, exit=True)
                set_at = now

        try:
            beat()
            yield beat
        finally:
            faulthandler.cancel_dump_traceback_later()
