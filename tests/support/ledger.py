"""A row of the ledger for tests."""

# A run that states everything.
STATED = {
    "model": "LLaMA-1 13B",
    "hidden": "5120",
    "layers": "40",
    "heads": "40",
    "kv_heads": "40",
    "ffn": "13824",
    "vocab": "128000",
    "seq_len": "2048",
    "gpus": "64",
    "gpu_type": "A100-SXM-80GB",
    "tp": "2",
    "pp": "4",
    "dp": "8",
    "cp": "1",
    "vpp": "1",
    "microbatch_size": "2",
    "global_batch": "128",
    "sequence_parallel": "True",
    "recompute": "full",
    "dtype": "bf16",
    "zero_stage": "1",
    "step_time_s": "3.5",
    "outcome": "ok",
}
