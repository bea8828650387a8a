"""Messages between ranks: activations and gradients of a program, programs, and small host data."""
