"""Running cells: one experiment from start to end, many in worker processes, and the search for missing runs."""
