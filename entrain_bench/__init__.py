"""One suite for load-balancing strategies of multimodal-LLM training: plan, schedule, simulate, measure, compare."""
