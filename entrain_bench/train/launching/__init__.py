"""Ranks started on this machine or by torchrun, and what they and the process that starts them leave each other."""
