"""What ranks see of an iteration: times, memory and losses, brought together as a timeline and metrics."""
