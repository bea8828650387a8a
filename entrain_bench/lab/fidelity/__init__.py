"""How far predictions are from training on this machine: the same programs on gloo ranks and on the simulated clock."""
