"""The script that trains a published model by a plan, with torchrun."""

from pathlib import Path

from entrain_bench.answers.text import load_template
from entrain_bench.config.hub.files import HUB, REPOSITORY
from entrain_bench.program.plan_file import TrainingPlan
from entrain_bench.specs.cluster import ClusterSpec


def train_script(plan: TrainingPlan, path: Path, cluster: ClusterSpec, name: str) -> str:
    """Return the script that trains by the plan of a file; it is called ``name``."""
    place = plan.job.model.removeprefix(HUB)
    repository = REPOSITORY.fullmatch(place)
    model = repository[1] if repository and not Path(place).exists() else place
    nodes, gpus = cluster.num_nodes, cluster.gpus_per_node
    many = f"--nnodes {nodes} " if nodes > 1 else ""
    launch = f"torchrun {many}--nproc-per-node {gpus} {name}"
    return load_template("train.jinja").render(model=model, plan=str(path.absolute()), launch=launch)
