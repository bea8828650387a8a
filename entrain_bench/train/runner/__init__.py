"""Any Hugging Face model under any strategy's program, by torch.distributed."""
