"""What the command can do: a module each, with ``main(arguments)`` that returns the exit code."""
