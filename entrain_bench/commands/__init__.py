"""The verbs of the command: one module each, with ``VERB`` and ``main(request)``, which returns the exit code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """The line of a verb on the screen of ``--help``, which imports no verb.

    Attributes:
        arguments: those of a command line.
        purpose: what the verb does.
    """

    arguments: str
    purpose: str


SUMMARIES = {
    "check": Summary("strategy=NAME [KEY=VALUE ...]", "run the conformance tests on one strategy"),
    "claims": Summary("[NAME ...] [KEY=VALUE ...]", "judge published claims, or show one with its commands"),
    "figures": Summary("[NAME ...] [KEY=VALUE ...]", "execute missing runs, draw figures, write pages"),
    "ledger": Summary("[KEY=VALUE ...]", "predict published training runs, or your own, and print the errors"),
    "profile": Summary("model=NAME [KEY=VALUE ...]", "measure layer and communication times of this device"),
    "recommend": Summary("[KEY=VALUE ...]", "recommend a strategy for a job: plan, time, reasons, robustness"),
    "reference": Summary("[KEY=VALUE ...]", "update the committed results, and list every change"),
    "report": Summary("[KEY=VALUE ...]", "write a report on a folder of runs: which strategy to use, and why"),
    "trace": Summary("source=NAME [KEY=VALUE ...]", "scan a dataset and write a shape trace"),
    "ui": Summary("[KEY=VALUE ...]", "show the runs of a folder in MLflow on 127.0.0.1"),
    "verify": Summary("[KEY=VALUE ...]", "recompute the committed results, or verify a folder of results"),
}
