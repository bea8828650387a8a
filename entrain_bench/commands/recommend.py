"""``entrain-bench recommend [KEY=VALUE ...]``: how to train a job fastest, for three readers, with settings."""

from collections.abc import Iterable
from pathlib import Path

from entrain_bench.answers.console_table import make_console
from entrain_bench.answers.recommend.asking import Asked, Keys
from entrain_bench.answers.recommend.lines import answer_lines, summary_lines
from entrain_bench.answers.sentences import notices
from entrain_bench.answers.text import listing
from entrain_bench.answers.tracking.log import sweep_name
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.grammar import RUN_KEYS, Request, Verb
from entrain_bench.records.records import Results
from entrain_bench.run.parallel import num_processes
from entrain_bench.run.study import Output, Study

EXIT_NO_RESULT = 2
# The job of the README, and the line length of its answer, a block of code.
README_JOB = ("model=qwen25vl_7b", "workload=chartqa", "cluster=16xh100")
README_TABLE = "tables/recommendation.md"
INDENT = "    "
README_WIDTH = 100

VERB = Verb(
    Keys,
    RUN_KEYS,
    examples=[
        "model=hf:Qwen/Qwen2.5-VL-7B-Instruct data=mine.parquet cluster=8xh100",
        "model=qwen25vl_7b workload=chartqa cluster=16xh100 measured_s=24 layout.tp=4 layout.dp=4 microbatch_size=1",
    ],
)


def main(request: Request[Keys]) -> int:
    """Recommend, and write plans; returns 0, or 2 if no strategy has a result; ``UserError`` for bad input."""
    composer = Composer(request.config_dir)
    asked = Asked.of(composer, request.overrides, request.keys)
    results = Results(Path(asked.config.results_dir))
    results.prepare()
    width = make_console().width
    found = asked.answered(composer, results, num_processes(), say)
    composer.save()
    if found.answer:
        files = found.files()
        replies = found.replies(files, request.config_dir)
        lines = answer_lines(found.answer, replies, asked.omitted, width)
        _print(lines)
        paths = [path for one in replies.values() for path in (one.path, one.script) if path]
        paths.append(files.write(".txt", "\n".join([*lines, ""])))
        say(f"written: {listing([str(path) for path in paths])}")
    else:
        heading, *lines = found.reasons
        _print(lines)
        say(f"entrain-bench: {heading}")
    # These import plotting packages, which would take seconds before the first run.
    from entrain_bench.commands.publish import log_to_mlflow, write_tables

    write_tables(results)
    records = [record for key in found.runner.keys if (record := results.read(key))]
    for line in notices(records):
        say(line)
    if asked.config.mlflow:
        log_to_mlflow(results, records, sweep_name(["recommend", *request.overrides]), asked.config.mlflow_uri)
    return 0 if found.answer else EXIT_NO_RESULT


def recommendation_output() -> Output:
    """Return the document with the README's recommendation; its race shares runs of the main figure."""
    return Output("recommendation", [("figure=iteration_time", *README_JOB)], write_recommendation)


def write_recommendation(study: Study) -> str:
    """Write ``tables/recommendation.md``, the short answer for ``README_JOB``; returns why there is none, if so."""
    asked = Asked.of(study.composer, README_JOB, Keys())
    found = asked.answered(study.composer, study.results, num_processes(), say)
    if found.answer is None:
        return found.reasons[0]
    lines = [f"{INDENT}{line}".rstrip() for line in summary_lines(found.answer, README_WIDTH)]
    write_atomically(study.results.root / README_TABLE, "\n".join([*lines, ""]).encode())
    return ""


def _print(lines: Iterable[str]) -> None:
    console = make_console()
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
