"""Running cells: one experiment from start to end, many of them in worker processes, and what still has to run."""
