"""Stages of encoders and the LLM, built from megatron-core's parts, on packed sequences."""
