"""Measurements of ranks in an iteration: times, memory and losses, collected as a timeline and metrics."""
