"""From the command line and YAML to checked values and objects."""
