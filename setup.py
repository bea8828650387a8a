"""The packages of a wheel: the top-level folders, under names that are nobody else's."""

from setuptools import find_packages, setup

FOLDERS = {
    "entrain_bench": "entrain_bench",
    "entrain_bench_strategies": "strategies",
    "entrain_bench_workloads": "workloads",
    "entrain_bench_experiments": "experiments",
}

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
    ],
    package_data={
        "entrain_bench.answers": ["templates/*"],
        "entrain_bench_experiments": ["**/*.yaml", "*.csv", "*.jsonl", "cluster/*.csv", "published/*", "ledger/*"],
        "entrain_bench_workloads": ["traces/*", "dataset/*.yaml"],
    },
)
