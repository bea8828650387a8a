"""Where samples come from: shape traces and synthetic distributions, each a ``Workload`` of ``entrain_bench``."""
