"""What a device takes for the layers of a model, for communication and for optimizer steps: measured, for a profile."""
