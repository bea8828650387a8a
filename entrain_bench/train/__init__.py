"""Training: programs executed on real ranks with torch.distributed and megatron-core."""
