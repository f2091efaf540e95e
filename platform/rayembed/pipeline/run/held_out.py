"""Make evaluation sets from the held-out parts of a run's data sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.config.held_out import held_out_set
from rayembed.config.own_sets import Scores
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, open_artifact
from rayembed.data.held_out.part import GRADED, SET, check_set
from rayembed.data.plan.audit import folders_of
from rayembed.data.plan.batch_plan import BatchPlan

FEW_QUERIES = 50
"""Number of queries (of NanoBEIR's tasks) below which one query moves a score by over 0.02."""


@dataclass(frozen=True)
class HeldOutSet:
    """Evaluation set from a data set's held-out part: a retrieval task, or graded pairs."""

    name: str
    """Name of the task in tables."""
    path: str
    """Folder in BEIR's layout, or file of graded pairs, in storage."""
    instruction: str
    queries: int = 0
    documents: int = 0
    pairs: int = 0
    """Number of graded pairs; 0 for a retrieval set."""

    @property
    def summary(self) -> str:
        """Describe the numbers of texts in the set."""
        if self.pairs:
            return (
                f"{self.name}: {self.pairs:,} graded pairs, of whose texts no training row has any"
            )
        few = ""
        if self.queries < FEW_QUERIES:
            few = f", each {1 / self.queries:.3f} of a score: small differences say little"
        return (
            f"{self.name}: {self.queries:,} queries over {self.documents:,} documents that no "
            f"training row has{few}"
        )


def held_out_set_of(dataset: DatasetConfig, records: DatasetArtifact) -> HeldOutSet | None:
    """Return the evaluation set of a data set's held-out rows; None if nothing is held out.

    Raises:
        ArtifactError: its files are not what was written.
    """
    folder = records.held_out_folder
    if folder is None:
        return None
    check_set(open_artifact(folder))
    told = records.manifest["held_out"]
    graded = "pairs" in told
    numbers = {n: int(told[n]) for n in ("queries", "documents", "pairs") if n in told}
    path = join(folder, GRADED if graded else SET)
    return HeldOutSet(held_out_set(dataset.name), path, dataset.query_instruction, **numbers)


def held_out_sets(run: Run, plans: Mapping[str, str]) -> list[HeldOutSet]:
    """Return the evaluation sets of all data sets of the run with held-out rows.

    Args:
        plans: stage name → folder of its batch plan.

    Raises:
        ArtifactError: a folder that a plan was made of is not there any more.
    """
    if not run.held_out_datasets:
        return []
    chains = {
        n: found for p in plans.values() for n, found in folders_of(BatchPlan.open(p)).items()
    }
    found = (held_out_set_of(d, chains[d.name][-1]) for d in run.held_out_datasets)
    return [one for one in found if one is not None]


def with_sets(run: Run, sets: Sequence[HeldOutSet]) -> Run:
    """Add the held-out sets to the run's evaluation."""
    own = [
        {
            "kind": "sts" if s.pairs else "retrieval",
            "name": s.name,
            "path": s.path,
            "instruction": s.instruction or None,
        }
        for s in sets
    ]
    evaluation, further = run.evaluation, parse(Scores, {"own_sets": own}).own_sets
    scored = evaluation.model_copy(update={"own_sets": (*evaluation.own_sets, *further)})
    return run.model_copy(update={"evaluation": scored})
