"""Where samples come from: shape traces and synthetic distributions, each a ``entrain_bench.workload.Workload``."""
