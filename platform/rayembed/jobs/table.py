"""Table of all jobs by their command names.

Each row names its job by an import string, so that the list of all jobs imports none of them.
`docs/own_job.md` adds one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rayembed.config.table import NamedTable, load

TRAIN = "train"
DATA = "data"
EVALUATE = "evaluate and register"
SERVE = "serve and operate"


@dataclass(frozen=True)
class Command:
    """Table entry for one job on the command line; calling it imports and runs the job."""

    group: str
    """Heading of the job in the list of all jobs."""
    about: str
    """Description of the job: its first line stands in the list of all jobs, all of it in its help.
    """
    job: str
    """Import string `module:name` of a `pipeline.job.Job`, or of a function with its arguments."""

    def __call__(self, argv: Sequence[str], *, prog: str | None = None) -> int:
        """Import and run the job, and return its exit code.

        Args:
            argv: the job's arguments.
            prog: the command as the usage line shows it; None: the script's name.
        """
        return int(load(self.job)(argv, about=self.about, prog=prog))

    @property
    def summary(self) -> str:
        """One-line description of the job, for the list of all jobs."""
        return self.about.partition("\n")[0]


JOBS = NamedTable(
    "rayembed.jobs",
    Command,
    "job",
    {
        "train": Command(
            TRAIN,
            "Train a recipe or your own pairs, evaluate the model and register it.\n\n"
            "The recipe says which architecture is trained; --pairs alone fine-tunes a bi-encoder "
            "on a file with a query and a positive a row.",
            "rayembed.pipeline.run.training_job:run_training_job",
        ),
        "adapt": Command(
            TRAIN,
            "Adapt a bi-encoder to documents without a label, score it and register it.\n\n"
            "Each document gives a pair by its structure (title and body, heading and section, "
            "sentence and rest), or a language model behind an endpoint writes its query. A "
            "teacher filters these and mines hard negatives, and its scores are distilled.",
            "rayembed.pipeline.run.training_job:run_corpus_adaptation",
        ),
        "prepare": Command(
            DATA,
            "Convert, clean and sample data sets: records in Parquet, a manifest, an audit.",
            "rayembed.pipeline.data.jobs:run_prepare_job",
        ),
        "mine": Command(
            DATA,
            "Mine hard negatives with a teacher model.",
            "rayembed.pipeline.data.jobs:run_mine_job",
        ),
        "cluster": Command(
            DATA,
            "Put similar pairs into batches: contextual clusters.",
            "rayembed.pipeline.data.jobs:run_cluster_job",
        ),
        "evaluate": Command(
            EVALUATE,
            "Score a model on benchmarks, with mteb's own tasks, scores and result files.",
            "rayembed.pipeline.evaluate.job:run_evaluation_job",
        ),
        "register": Command(
            EVALUATE,
            "Register a model with its scores in MLflow, promote it by gates, or roll back.",
            "rayembed.pipeline.register.job:run_register_job",
        ),
    },
)
"""All jobs by name; other packages add theirs by entry points."""
