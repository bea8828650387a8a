"""Times and peaks that papers print of their own systems, predicted through the commands of their claims.

They are shown and never fitted to: constants must not lean towards a system.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from entrain_bench.answers.documents.claim import Claim, Kind, cited
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.fidelity.programs import first_program
from entrain_bench.lab.ledger.entries import OK, Entry
from entrain_bench.lab.ledger.predict import GIB, Change, Prediction, iteration_s
from entrain_bench.lab.ledger.rows import LedgerRow, row_of
from entrain_bench.program import Program
from entrain_bench.specs.cluster import ClusterSpec

SOURCE = "papers"
SECONDS = "iteration_time_s"
PEAK = "peak_memory_bytes"
# What a printed unit is, in seconds or bytes.
UNITS = {"s": 1.0, "ms": 1e-3, "GB": 1e9}


@dataclass(frozen=True, slots=True)
class PaperCase:
    """The first program of a claim's first seed, and what it runs on."""

    truth: CostTruth
    program: Program
    budget_bytes: float

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster of the case."""
        return self.truth.cluster

    def predict(self, change: Change | None = None) -> Prediction:
        """The prediction, on the cluster as it is or changed."""
        truth = replace(self.truth, cluster=change(self.cluster)) if change else self.truth
        peak = float(truth.memory.peak_bytes(self.program).max())
        return Prediction(iteration_s(truth, self.program), peak / GIB, peak <= self.budget_bytes)


def of_papers(claims: Sequence[Claim], composer: Composer) -> Iterator[Entry]:
    """Every claim of an absolute iteration time or peak of one run as an entry; ``row`` counts these claims from 1."""
    known: dict[tuple[str, ...], PaperCase] = {}
    chosen = [claim for claim in claims if _is_of_one_run(claim)]
    for number, claim in enumerate(chosen, 1):
        (sweep,) = claim.published.sweeps
        row = _row(claim, number)
        try:
            if sweep not in known:
                known[sweep] = _case(sweep, composer)
        except UserError as error:
            yield Entry(row, reason=str(error))
        else:
            yield Entry(row, (known[sweep],))


def _is_of_one_run(claim: Claim) -> bool:
    metric = claim.published.measure.metric
    measured = metric in (SECONDS, PEAK) and claim.unit in UNITS and claim.kind == Kind.LEVEL
    return measured and len(claim.value) == 1 and len(claim.published.sweeps) == 1 and bool(claim.cells)


def _row(claim: Claim, number: int) -> LedgerRow:
    cell = claim.cells[0]
    (value,) = claim.value
    measured = value * UNITS[claim.unit]
    named = {"step_time_s": f"{measured:.6g}"}
    if claim.published.measure.metric == PEAK:
        named = {"peak_memory_gib": f"{measured / GIB:.6g}"}
    texts = {
        "release": cited(claim.paper),
        "model": cell.model,
        "gpu_type": cell.gpu_type,
        "software": cell.system,
        "where": f"{cell.place}; experiments/published/{cell.source}.csv, {cell.id}",
        "how": cell.how,
        "note": cell.note,
        "outcome": OK,
    }
    return row_of(SOURCE, number, texts | named)


def _case(sweep: tuple[str, ...], composer: Composer) -> PaperCase:
    setting, program = first_program(composer.run(composer.sweep(sweep).cells[0]))
    return PaperCase(setting.truth, program, setting.job.memory_budget_bytes)
