"""The command line: every kind of bad input is one line, exit code 2, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.config.schema import GROUP_KEYS
from support.cli import run

BAD_INPUT = [
    ("strategy=entrian", "did you mean entrain?"),
    (
        "strategy=mine",
        "All: entrain-bench ls strategies. To add your own: --config-dir FOLDER, with FOLDER/strategy/mine.yaml",
    ),
    ("columns=[bubbles]", "columns=bubbles: unknown (did you mean bubble_ratio?)"),
    ("workload=chartqq", "chartqa"),
    (
        "model=gpt",
        "did you mean gpt_1b or gpt3_175b?). All: entrain-bench ls models. Published ones: model=hf:ORG/NAME",
    ),
    ("cluster=b200", "did you mean b200x8, gb200x72 or h200x8?). All: entrain-bench ls clusters"),
    ("harness=nope", "simulate"),
    ("strategy/planner=nope", "megatron"),
    ("sead=1", "sead=1: unknown key (did you mean seed=1?); choices: "),
    ("tp=4", "tp=4: unknown key (did you mean layout.tp=4?)"),
    (
        "workload=mine.parquet",
        "workload=mine.parquet: must be a name, not a path. For a file, use workload=trace",
    ),
    ("model=./mine.yaml", "use --config-dir FOLDER model=NAME, with NAME.yaml in FOLDER/model"),
    ("chartqa", "unknown verb chartqa. Did you mean workload=chartqa?"),
    ("--shell-completion nope", "--shell-completion/-sc: invalid choice: 'nope' (choose from"),
    ("--cfg jop", "--cfg/-c: invalid choice: 'jop' (choose from 'job', 'hydra', 'all')"),
    ("--info nothing", "--info/-i: invalid choice: 'nothing' (choose from 'all', 'config', "),
    ("--cfg job strategy=entrian", "did you mean entrain?"),
    ("--cfg job layout.tpp=1", "layout.tpp=1: unknown key (did you mean layout.tp=1?)"),
    ("strategy/plannr=dip", "strategy/plannr=dip: unknown key (did you mean strategy/planner=dip?)"),
    (
        "hydra.searchpath=[x]",
        "hydra.searchpath=[x]: is not supported. Of Hydra's keys",
    ),
    ("--multirun hydra/sweeper=nope", "hydra/sweeper=nope: unknown; choices: basic"),
    ("--multirun hydra/sweeper=basic seed=x,1 layout.tpp=2", "layout.tpp=2: unknown key"),
    ("--multirun microbatch_size=interval(1,4)", "has no list of values. Use a,b,c or range(8), or hydra/sweeper=NAME"),
    ("strategy.planner.foo=1", "profile_samples"),
    ("seed=abc", "could not be converted to Integer"),
    ("seed=-1", "0..2^32-1"),
    ("seed=0,1", "--multirun"),
    ("--multirun results_dir=/tmp/a,/tmp/b", "one folder"),
    *(
        (f"{group}={none}", f"{group}={none}: must be one of the choices")
        for group in (*GROUP_KEYS, "strategy/planner")
        for none in ("[]", "{}")
    ),
    ("iterations=1000001", "iterations=1000001: must be at least 1, at most 1000000"),
    ("layout.tp=3", "a divisor of the 4 ranks of a node"),
    ("layout.dp=3", "multiple of layout.dp=3"),
    ("global_batch=30", "multiple"),
    ("layout.pp=100", "the layers of model=tiny"),
    ("belief_error=1.5", "[0, 1)"),
    ("speed.gemm=1e-300", "speed.gemm=1e-300: must be a number that is 0 or from 1e-30 to 1e+30 in size"),
    ("cluster.device.kernel_launch_s=1e308", "launch_s=1e+308: must be a number that is 0 or from 1e-30 to 1e+30"),
    (f"model.modules.llm.num_heads={10**400}", "(401 characters): must be at least 1, at most 16777216"),
    (
        f"cluster.device.kernel_launch_s={10**400}",
        "(401 characters): must be a number that is 0 or from 1e-30 to 1e+30",
    ),
    ("model.tokens.text_chars_per_token=1e-20", "text_chars_per_token=1e-20: must be positive, from 9.3e-10 to 10737"),
    ("workload=uniform_mix workload.sequence_tokens=1e18", "must be from 1 to 1073741824"),
    ("constants=51", "constants=51: must be in 0..50"),
    (
        "recompute_granularity=selectiv",
        "recompute_granularity=selectiv: unknown (did you mean selective?); choices: full, selective",
    ),
    ("memory_fraction=0.00001", "GiB more than"),
    ("cluster.device.peak_bf16_flops=-1", "positive"),
    ("model.modules.llm.context_tokens=100", "takes at most 100"),
    ("workload=librispeech", "audio"),
    ("workload=trace", "workload.path"),
    ("workload=trace workload.path=/nonexistent.parquet", "/nonexistent.parquet"),
    ("strategy.planner._target_=entrain_bench_strategies.nope.Nope", "entrain_bench_strategies.nope.Nope"),
    ("--multirun hydra.launcher.n_jobs=4", "n_jobs=4: Key 'n_jobs' not in 'BasicLauncherConf'"),
    ("hydra.launcher.n_jobs=4", "is a setting of sweeps. Add --multirun"),
    ("--multirun hydra/launcher=joblibb", "did you mean joblib?"),
    (
        "--multirun hydra/launcher=joblib hydra.launcher.n_jobs=0",
        "number of processes=0: must be an integer of at least 1, or -1",
    ),
    ("results_dir=/dev/null/x", "writable"),
    ("+=x", "+=x: has no key"),
    ("+layout.pp=${oc.env:PATH}", "could not be converted to Integer"),
    ("--multirun strategy.label=glob(*)", "matches no choice of its group"),
    (f"strategy/scheduler={'x' * 300}", "at most 250 characters"),
    ("strategy/planner=[nan]", "choices of that group"),
    ("global_batch=64000000", "at most 1048576"),
    ("strategy.planner.profile_samples=1e9", "profiled samples=1000000000: must be at most 1048576"),
    ("strategy.planner.profile_samples=1.5", "must be an integer"),
    ("model.modules.llm.num_layers=8000000", "at least 1, at most 1000"),
    ("cluster.num_nodes=1000000", "at most 32768, 131072 ranks of 4 a node"),
    (
        "strategy=hetero_noncolocated model=qwen25vl_llama3_1b cluster.num_nodes=16384 global_batch=512 layout.dp=null "
        "layout.tp=null layout.cp=null",
        "Set layout.tp, layout.cp or layout.dp",
    ),
]


@pytest.mark.wide
@pytest.mark.parametrize(("overrides", "says"), BAD_INPUT, ids=[b[0] for b in BAD_INPUT])
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(
    overrides: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    assert run(results, *overrides.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.strip().splitlines()
    assert line.startswith("entrain-bench: ")
    assert says in line
    assert not results.exists()
