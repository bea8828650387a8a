"""The page: the verdicts first, then what was found."""

from __future__ import annotations

from entrain_bench.lab.gpu_check.report import NOTES, QUESTIONS, page
from entrain_bench.lab.gpu_check.result import FAILED, PASSED, Finding, StepResult
from entrain_bench.lab.gpu_check.steps import STEPS

LOSSES = [
    {"strategy": "megatron", "last_loss": 6.123456789, "largest_difference": 1.23e-8, "verdict": PASSED},
    {"strategy": "dip", "verdict": FAILED, "reason": "rank 1: a | b"},
]
TIMES = [{"strategy": "dip", "measured_s": 2.0, "predicted_s": 1.8, "error": -0.1, "repetitions_s": "[2.0]"}]


def test_the_first_table_has_all_verdicts() -> None:
    results = [
        StepResult("correctness", "", Finding(FAILED, "1 of 2 equal", {"Losses": LOSSES}), 61.4),
        StepResult("fidelity", "", Finding(PASSED, "1 programs", {"Iterations": TIMES, "Empty": []}), 9.0),
        StepResult("environment", "", Finding(PASSED, "2 GPUs", {}, {"nvidia-smi topo -m": "GPU0 X", "none": ""}), 1.0),
    ]
    text = page("Check of 2 x H100", "make gpu-check", results, ["throughput"])
    lines = text.splitlines()
    assert lines[0] == "# Check of 2 x H100"
    assert lines[2:8] == [
        "| step | question | verdict | result | seconds |",
        "| --- | --- | --- | --- | ---: |",
        "| correctness | Does every strategy compute the losses of one device? | failed | 1 of 2 equal | 61 |",
        "| fidelity | How near are predictions with that profile? | passed | 1 programs | 9 |",
        "| environment | What is there? | passed | 2 GPUs | 1 |",
        "| throughput | How fast does the 1B model train? | not run |  |  |",
    ]
    assert "| megatron | 6.123457 | 1.2e-08 | passed |  |" in lines
    assert "| dip |  |  | failed | rank 1: a \\| b |" in lines
    assert "| dip | 2 | 1.8 | -10.0% |" in lines
    assert "```\nGPU0 X\n```" in text
    assert "Empty" not in text


def test_every_step_has_its_question() -> None:
    assert [*QUESTIONS] == [*STEPS]
    assert NOTES.keys() <= STEPS.keys()
