"""Measurement of a device profile: times of layers, communication and optimizer steps."""
