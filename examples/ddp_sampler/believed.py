"""How uneven ranks are believed to be under each strategy, before anything is trained: slowest over mean.

python examples/ddp_sampler/believed.py
"""

import numpy as np

from entrain_bench import BalancedBatchSampler

TRACES = ("chartqa_test_by_image", "opencqa_ocr", "coco_captions_val2017_by_image", "mathvision")
STRATEGIES = ("megatron", "disttrain", "entrain", "dflop")


def imbalance(trace: str, strategy: str) -> float:
    """Mean over an epoch's iterations."""
    sampler = BalancedBatchSampler(
        f"{trace}.parquet",
        strategy=strategy,
        model="qwen25vl_llama3_1b",
        cluster="h100x64",
        rank=0,
        world_size=8,
        global_batch=256,
        microbatch_size=4,
        overrides=["workload.max_image_tokens=1280"],
    )
    ranks_s = np.array([sampler.believed_s(iteration) for iteration in range(sampler.num_iterations)])
    return float(np.mean(ranks_s.max(axis=1) / ranks_s.mean(axis=1)))


if __name__ == "__main__":
    print(f"| trace | {' | '.join(STRATEGIES)} |\n|---{'|---' * len(STRATEGIES)}|")
    for trace in TRACES:
        print(f"| {trace} | {' | '.join(f'{imbalance(trace, strategy):.3f}' for strategy in STRATEGIES)} |", flush=True)
