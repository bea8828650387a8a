"""Inputs that try to run code, write or connect elsewhere: command lines, plans, folders, records, traces."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from entrain_bench.records.records import Results
from entrain_bench.records.sealed import sealed

PORT = 9
SCHEMES = ("http", "https", "ftp", "s3", "hdfs", "gs")
URLS = ("file:///etc/passwd", *(f"{scheme}://127.0.0.1:{PORT}/x" for scheme in SCHEMES))
# Modules that no input may have imported: of the suite's environment, of Python, and in a folder on its path.
FOREIGN = ("antigravity", "evil_payload", "evil_strategy", "idlelib", "this", "turtle")
TARGETS = (
    "pandas.read_pickle",
    "os.system",
    "subprocess.Popen",
    "subprocess.run",
    "builtins.eval",
    "builtins.exec",
    "builtins.getattr",
    "builtins.open",
    "antigravity.geohash",
    "evil_payload.Payload",
    "evil_payload.nested.Payload",
    "functools.partial",
    "hydra.utils.call",
    "idlelib.pyshell.main",
    "importlib.import_module",
    "pathlib.Path.write_text",
    "pickle.loads",
    "shutil.rmtree",
    "this.s",
    "torch.load",
    "turtle.Turtle",
    "urllib.request.urlopen",
    "webbrowser.open",
    "yaml.unsafe_load",
    "entrain_bench.run.parallel.pickle.loads",
    "entrain_bench.base.files.subprocess.Popen",
    "entrain_bench.base.errors.sysconfig.os.system",
    "entrain_bench_workloads.trace.Path.touch",
    "evil_payload",
    ".evil_payload.Payload",
    "evil_payload:Payload",
    "__import__('evil_payload').Payload",
)
# A target in the place of T: command lines of one run, of a sweep, of other verbs.
LINES = (
    "+workload.text={_target_:T,filepath_or_buffer:'http://127.0.0.1:9/x.pkl'}",
    "+workload.text=[{_target_:T}]",
    "+workload.text={a:{b:{_target_:T,_args_:['echo']}}}",
    "workload._target_=T",
    "harness._target_=T",
    "+harness.extra={_target_:T}",
    "+model.more={_target_:T,command:touch}",
    "+cluster.device.more={_target_:T}",
    "strategy.planner._target_=T",
    "strategy.assigner={_target_:T}",
    "+strategy.scheduler.more={_target_:T,_partial_:true}",
    "++strategy.assigner._target_=T",
    "--multirun strategy.planner._target_=T seed=0,1",
    "--multirun hydra.launcher._target_=T seed=0,1",
    "--multirun hydra/launcher=joblib hydra.launcher._target_=T seed=0,1",
    "--multirun +hydra.sweeper._target_=T seed=0,1",
    "+hydra.callbacks.evil._target_=T",
    "recommend +workload.text={_target_:T}",
    "check strategy.planner._target_=T",
    "trace source._target_=T source.path=x.parquet",
    "trace scan._target_=T source.path=x.parquet",
    "trace limits._target_=T source.path=x.parquet",
    "trace source.path=x.parquet +source.more={_target_:T}",
)
# Without a target.
PLAIN_LINES = (
    "hydra.searchpath=['file://EVIL']",
    "hydra.searchpath=['pkg://evil_payload'] strategy=evil",
    "--multirun hydra.searchpath=['pkg://evil_payload'] seed=0,1",
    "hydra/job_logging=../../EVIL",
    "--multirun hydra/sweeper=basic hydra.sweeper._target_=T seed=0,1",
    "--multirun +hydra.sweeper.x={_target_:T} seed=0,1",
    "strategy=evil",
    "strategy=EVIL/strategy/evil",
    "strategy=../../../../../../../..EVIL/strategy/evil",
    "strategy/planner=EVIL/strategy/planner/evil",
    "model=EVIL/strategy/evil",
    "+strategy.planner={_target_:evil_strategy.Planner}",
    "+workload.text={_partial_:true}",
    "+workload.text={_convert_:all,_recursive_:false}",
    "--shell-completion install=T",
    "plan=EVIL",
    "plan=/dev/null",
)
WITH_URL = (
    "workload=trace workload.path='U'",
    "plan='U'",
    "cluster/device=profiled cluster.device.path='U'",
    "trace source.path='U' output=o.parquet",
    "trace source=manifest source.path='U' output=o.parquet",
    "trace source=webdataset source.path='U' output=o.parquet",
)
# A field of a plan and what it becomes, T a target, U a URL.
PLAN_FIELDS: tuple[tuple[str, Any], ...] = (
    ("options", ["strategy.assigner._target_=T"]),
    ("options", ["+strategy.assigner.more={_target_:T}"]),
    ("options", ["strategy.assigner={_target_:T}"]),
    ("options", ["strategy.assigner.defer={a:{_target_:T}}"]),
    ("options", ["strategy/assigner=EVIL/strategy/planner/evil"]),
    ("options", ["results_dir=OUTSIDE"]),
    ("options", ["harness=train"]),
    ("strategy", "megatron results_dir=OUTSIDE"),
    ("strategy", "EVIL/strategy/evil"),
    ("strategy", "${oc.env:HOME}"),
    ("strategy", "megatron,entrain"),
    ("job.model", "${oc.env:HOME}"),
    ("job.model", "tiny}"),
    ("job.workload", "U"),
    ("job.cluster", "../../EVIL"),
    ("job.cluster", {"_target_": "T"}),
    ("job.overrides", ["+workload.text={_target_:T,filepath_or_buffer:'U'}"]),
    ("job.overrides", ["++workload.text={_target_:T}"]),
    ("job.overrides", ["workload._target_=T"]),
    ("job.overrides", ["workload.name={_target_:T}"]),
    ("job.overrides", ["workload.name=[{_target_:T}]"]),
    ("job.overrides", ["~workload.name"]),
    ("job.overrides", ["workload.name=${oc.env:HOME}"]),
    ("job.overrides", ["workload.name='${oc.env:HOME,x}'"]),
    ("job.overrides", ["workload.name=${oc.decode:'[1]'}"]),
    ("job.overrides", ["workload.path='U'"]),
    ("job.overrides", ["workload@hydra.launcher=synthetic"]),
    ("job.overrides", ["results_dir=OUTSIDE"]),
    ("job.overrides", ["mlflow=true"]),
    ("job.overrides", ["mlflow_uri=http://127.0.0.1:9"]),
    ("job.overrides", ["retry=failed"]),
    ("job.overrides", ["harness._target_=T"]),
    ("job.overrides", ["harness=train"]),
    ("job.overrides", ["hydra.searchpath=['file://EVIL']"]),
    ("job.overrides", ["hydra.run.dir=OUTSIDE"]),
    ("job.overrides", ["figure=iteration_time"]),
    ("job.overrides", ["plan=EVIL"]),
    ("job.overrides", ["strategy.planner._target_=T"]),
    ("job.overrides", ["seed=choice(1,2)"]),
    ("job.overrides", ["model=glob(*)"]),
    ("job.overrides", ["workload.name=extend_list(1)"]),
    ("layout.modules.0.module", {"_target_": "T"}),
    ("expected", {"_target_": "T"}),
    ("_target_", "T"),
    ("results_dir", "OUTSIDE"),
    ("mlflow_uri", "U"),
)
TAGS = (
    "!!python/object/apply:os.system ['touch OUTSIDE/x']",
    "!!python/object/new:evil_payload.Payload []",
    "!!python/name:evil_payload.Payload",
    "!!python/module:evil_payload",
    "!!python/object:evil_payload.Payload {}",
    "!include EVIL",
    "&a [*a]",
)
# A key of a record and what it becomes.
RECORD_FIELDS: tuple[tuple[str, Any], ...] = (
    ("config_dir", "EVIL"),
    ("config_dir", "U"),
    ("overrides", ["+workload.text={_target_:T}", "results_dir=OUTSIDE"]),
    ("overrides", ["figure=EVIL/strategy/evil"]),
    ("overrides", ["strategy=evil", "results_dir=OUTSIDE"]),
    ("overrides", ["plan=EVIL", "mlflow_uri=http://127.0.0.1:9"]),
    ("overrides", ["hydra.searchpath=['pkg://evil_payload']"]),
    ("config.strategy.planner._target_", "T"),
    ("config.workload._target_", "T"),
    ("config.harness._target_", "T"),
    ("config.workload.path", "U"),
    ("labels.strategy", "!!python/name:evil_payload.Payload"),
    ("labels.workload", "U"),
    ("key", "../../OUTSIDE/x"),
)
# Rows of manifests.
MANIFESTS = (
    {"audio_filepath": "U", "text": "x", "duration": 1.0},
    {"image": "U", "conversations": [{"from": "human", "value": "<image>"}]},
    {"images": ["U", "U"], "text": "x"},
    {"video": "U", "text": "x"},
    {"image": {"path": "U", "bytes": None}, "text": "x"},
    {"image": "../../../../../../../../etc/passwd", "text": "x"},
    {"image": "|touch OUTSIDE/x", "text": "x"},
    {"text": "x", "_target_": "T"},
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where inputs are: files of theirs, a valid plan and record to change, what they try to reach."""

    folder: Path
    evil: Path
    outside: Path
    plan: str
    record: str


def inputs(seed: int, many: int, place: Place) -> Iterator[tuple[str, list[str], bool]]:
    """Some inputs: a description, its command line, and whether it must be refused (exit code 2 and one line)."""
    random = Random(seed)
    makers: Sequence[Callable[[Random, Place, str], tuple[str, list[str], bool]]] = (
        *(_line,) * 8,
        *(_plan,) * 8,
        _tagged,
        _record,
        _record,
        _manifest,
        _parquet,
    )
    for index in range(many):
        yield makers[index % len(makers)](random, place, f"input{index}")


def _filled(value: Any, random: Random, place: Place) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, random, place) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, random, place) for each in value]
    if not isinstance(value, str):
        return value
    target = random.choice(TARGETS)
    text = value.replace("_target_:T", f"_target_:{target}").replace("_target_=T", f"_target_={target}")
    text = target if text == "T" else text
    text = random.choice(URLS) if text == "U" else text.replace("'U'", f"'{random.choice(URLS)}'")
    return text.replace("EVIL", str(place.evil)).replace("OUTSIDE", str(place.outside))


def _line(random: Random, place: Place, name: str) -> tuple[str, list[str], bool]:  # noqa: ARG001
    text = _filled(random.choice(random.choice([LINES, LINES, PLAIN_LINES, WITH_URL])), random, place)
    return text, text.split(" "), True


def _changed(text: str, path: str, value: Any) -> Any:
    values = node = yaml.safe_load(text)
    *parents, last = path.split(".")
    for key in parents:
        node = node[int(key)] if key.isdigit() else node[key]
    node[last] = value
    return values


def _plan(random: Random, place: Place, name: str) -> tuple[str, list[str], bool]:
    field, value = random.choice(PLAN_FIELDS)
    file, value = place.folder / f"{name}.yaml", _filled(value, random, place)
    file.write_text(yaml.safe_dump(_changed(place.plan, field, value)))
    return f"plan {field}={value}", [f"plan={file}"], True


def _tagged(random: Random, place: Place, name: str) -> tuple[str, list[str], bool]:
    """A plan with a tag that a careless reader obeys."""
    tag, file = _filled(random.choice(TAGS), random, place), place.folder / f"{name}.yaml"
    file.write_text(place.plan.replace("version: 1", f"version: 1\nmore: {tag}"))
    return f"plan with {tag}", [f"plan={file}"], True


def _record(random: Random, place: Place, name: str) -> tuple[str, list[str], bool]:
    """A record that somebody changed who knows how it is sealed."""
    field, value = random.choice(RECORD_FIELDS)
    value = _filled(value, random, place)
    values = _changed(place.record, field, value)
    del values["sha256"]
    key = json.loads(place.record)["key"]
    file = Results(place.folder / name).record_path(key)
    file.parent.mkdir(parents=True)
    file.write_bytes(sealed(key, values))
    verb = random.choice([["report"], ["verify", "sample=1"]])
    return f"{verb[0]} {field}={value}", [*verb, f"results_dir={place.folder / name}"], False


def _manifest(random: Random, place: Place, name: str) -> tuple[str, list[str], bool]:
    row, file = _filled(random.choice(MANIFESTS), random, place), place.folder / f"{name}.jsonl"
    file.write_text(json.dumps(row) + "\n")
    output = f"output={place.folder / name}.parquet"
    return f"manifest {row}", ["trace", "source=manifest", f"source.path={file}", "workers=1", output], False


def _parquet(random: Random, place: Place, name: str) -> tuple[str, list[str], bool]:
    """A trace whose metadata name a type that old readers unpickle."""
    payload = b"cevil_payload\nPayload\n."
    extension = random.choice([b"arrow.py_extension_type", b"evil_payload.Payload"])
    metadata = {b"ARROW:extension:name": extension, b"ARROW:extension:metadata": payload}
    field = pa.field("text_tokens", pa.int64(), metadata=metadata)
    schema = pa.schema([field], metadata={b"pandas": b'{"_target_": "evil_payload.Payload"}'})
    file = place.folder / f"{name}.parquet"
    pq.write_table(pa.table([pa.array([50] * 40)], schema=schema), file)
    return f"trace {extension!r}", ["workload=trace", f"workload.path={file}"], False


def main(folder: Path, seed: int, many: int) -> None:
    """Do what every input asks for, and print those that were not refused as they must be."""
    from entrain_bench.cli import run_command
    from support.sweeps import PLAN, make_folder

    place = Place(folder, folder.parent / "evil", folder.parent / "outside", "", "")
    make_folder(folder)
    plan = (folder / PLAN).read_text()
    usual = ["model=tiny", "cluster=tiny", "iterations=1", "global_batch=8", "microbatch_size=2", "layout.dp=1"]
    ends = ["mlflow=false", f"results_dir={folder / 'results'}"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert run_command([*usual, "layout.tp=1", *ends]) == 0
    (record,) = (folder / "results" / "runs").rglob("*.json")
    place = Place(place.folder, place.evil, place.outside, plan, record.read_text())
    for what, line, refused in inputs(seed, many, place):
        verb = line[0] if line[0] in ("check", "recommend", "report", "trace", "verify") else ""
        more = [] if verb in ("check", "report", "trace", "verify") or line[0].startswith("plan") else usual
        words = [*line, *(text for text in more if text.partition("=")[0] not in {w.partition("=")[0] for w in line})]
        words += [] if verb in ("check", "report", "trace", "verify") else ends
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_command(words)
        said = err.getvalue()
        bad = "internal error" in said or "Traceback" in said or code not in (0, 1, 2)
        if bad or (refused and (code != 2 or len(said.splitlines()) != 1)):
            print(f"{what}: exit code {code}: {said}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
