"""The verbs of the command: one module each, with ``VERB`` and ``main(request)``, which returns the exit code."""

# Arguments and help of every verb: the lines of ``--help``, which imports no verb.
SUMMARIES = {
    "check": ("strategy=NAME [KEY=VALUE ...]", "run the conformance tests on one strategy"),
    "check-terms": ("[KEY=VALUE ...]", "try a reviewer's doubts: random options, budget, network, noise"),
    "claims": ("[NAME ...] [KEY=VALUE ...]", "judge published claims, or show one with its commands"),
    "figures": ("[NAME ...] [KEY=VALUE ...]", "execute missing runs, draw figures, write pages"),
    "ledger": ("[KEY=VALUE ...]", "predict published training runs, or your own, and print the errors"),
    "ls": ("models|clusters|workloads|strategies|support", "print the choices of a group, or supported combinations"),
    "plot": ("[KIND] [KEY=VALUE ...]", "draw the runs of a folder: dots, heatmap or lines of a metric"),
    "profile": ("model=NAME [KEY=VALUE ...]", "measure layer and communication times of this device"),
    "recommend": ("[KEY=VALUE ...]", "recommend a strategy for a job: plan, time, reasons, robustness"),
    "reference": ("[KEY=VALUE ...]", "update the committed results, and list every change"),
    "report": ("[KEY=VALUE ...]", "write a report on a folder of runs: which strategy to use, and why"),
    "trace": ("source.path=FILES [KEY=VALUE ...]", "scan a dataset and write a shape trace"),
    "ui": ("[KEY=VALUE ...]", "show the runs of a folder in MLflow on 127.0.0.1"),
    "verify": ("[KEY=VALUE ...]", "recompute the committed results, or verify a folder of results"),
}
