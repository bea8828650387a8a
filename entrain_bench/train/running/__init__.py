"""Training on a rank: build its stages, receive each iteration's program, run it, keep the state."""
