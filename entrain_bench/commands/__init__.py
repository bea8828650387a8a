"""The verbs of the command: one module each, with ``main(arguments)`` that returns the exit code."""
