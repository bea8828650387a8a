"""The script that trains a published model by a plan, with torchrun."""

from pathlib import Path

from entrain_bench.answers.text import load_template
from entrain_bench.config.hub.files import HUB, REPOSITORY
from entrain_bench.program.plan_file import TrainingPlan
from entrain_bench.specs.cluster import ClusterSpec


def train_script(plan: TrainingPlan, path: Path, cluster: ClusterSpec) -> str:
    """Return the script that trains by the plan of a file."""
    place = plan.job.model.removeprefix(HUB)
    repository = REPOSITORY.fullmatch(place)
    model = repository[1] if repository and not Path(place).exists() else place
    return load_template("train.jinja").render(model=model, plan=str(path.absolute()), launch=launch_line(cluster))


def launch_line(cluster: ClusterSpec) -> str:
    """Return the command that starts a rank on every GPU, without the script; on each node, if there are several."""
    many = f"--nnodes {cluster.num_nodes} " if cluster.num_nodes > 1 else ""
    return f"torchrun {many}--nproc-per-node {cluster.gpus_per_node}"
