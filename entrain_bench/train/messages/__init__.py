"""What ranks send each other: activations and gradients that a program demands, programs, and small host data."""
