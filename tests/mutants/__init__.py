"""Whether the tests notice small mistakes in the core (make mutants)."""
