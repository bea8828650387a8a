"""Pixels and waves to the inputs of encoders, as the processors of published models make them; without torch."""
