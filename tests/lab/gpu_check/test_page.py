"""The page: the verdicts first, then what was found."""

from __future__ import annotations

from entrain_bench.lab.gpu_check.report import FAILED, PASSED, Finding, SectionResult, page
from entrain_bench.lab.gpu_check.sections import SECTIONS

LOSSES = [
    {"strategy": "megatron", "last_loss": 6.123456789, "largest_difference": 1.23e-8, "verdict": PASSED},
    {"strategy": "dip", "verdict": FAILED, "reason": "rank 1: a | b"},
]
TIMES = [{"strategy": "dip", "measured_s": 2.0, "predicted_s": 1.8, "iteration_error": -0.1, "repetitions_s": "[2.0]"}]


def test_the_first_table_has_all_verdicts() -> None:
    results = [
        SectionResult("correctness", "", Finding(FAILED, "1 of 2 equal", {"Losses": LOSSES}), 61.4),
        SectionResult("fidelity", "", Finding(PASSED, "1 programs", {"Iterations": TIMES, "Empty": []}), 9.0),
        SectionResult(
            "environment", "", Finding(PASSED, "2 GPUs", {}, {"nvidia-smi topo -m": "GPU0 X", "none": ""}), 1.0
        ),
    ]
    text = page("Check of 2 x H100", "make gpu-check", results, SECTIONS)
    lines = text.splitlines()
    assert lines[0] == "# Check of 2 x H100"
    assert lines[2:10] == [
        "| section | question | verdict | result | seconds |",
        "| --- | --- | --- | --- | ---: |",
        "| correctness | Does every strategy compute the losses of one device? | failed | 1 of 2 equal | 61 |",
        "| fidelity | How accurate are predictions with that profile? | passed | 1 programs | 9 |",
        "| environment | What is there? | passed | 2 GPUs | 1 |",
        "| tests | Do the tests that need a GPU pass? | not run |  |  |",
        "| profile | How fast are layers, optimizer and communication? | not run |  |  |",
        "| throughput | How fast does the 1B model train? | not run |  |  |",
    ]
    assert "| megatron | 6.123457 | 1.2e-08 | passed |  |" in lines
    assert "| dip |  |  | failed | rank 1: a \\| b |" in lines
    assert "| dip | 2 | 1.8 | -10.0% |" in lines
    assert "```\nGPU0 X\n```" in text
    assert "Empty" not in text
