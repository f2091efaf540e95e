"""Read texts and hard negatives of the rows in a run's batch plans."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayembed.assets.arrow_files import read_sealed
from rayembed.assets.storage import join
from rayembed.config.types import Role
from rayembed.data.engine.parts import remedy
from rayembed.data.plan.batch_plan import FILES, TRAINING, BatchPlan
from rayembed.data.words import normalised_hash

MOST_ROWS = 20_000
"""Rows of a plan whose texts are counted, drawn from evenly spaced steps."""

_MOST_SEARCHED = 2_000_000
"""Rows of a plan in which hard negatives are looked for."""


class TrainedText(NamedTuple):
    """A training text with its role and instruction."""

    text: str
    role: Role
    instruction: str


def trained_texts(plan: BatchPlan) -> dict[str, set[TrainedText]]:
    """Read the distinct texts of the plan's rows by data set; for large plans, only from evenly
    spaced steps.

    Raises:
        ArtifactError: a file of the plan is missing or broken.
    """
    steps = min(plan.num_steps, max(1, MOST_ROWS // plan.global_pairs))
    found: dict[str, set[TrainedText]] = {}
    for step in np.unique(np.linspace(0, plan.num_steps - 1, steps).astype(int)).tolist():
        for record in plan.read(step, columns=TRAINING):
            of_data = found.setdefault(record.dataset, set())
            of_data.add(TrainedText(record.query, "query", record.query_instruction))
            negatives = (one.text for one in record.negatives[: plan.num_negatives])
            for text in (record.positives[0], *negatives):
                of_data.add(TrainedText(text, "document", record.document_instruction))
    return found


def rows_with_negatives(plans: Iterable[str], texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Document → queries of the training rows in which it is a hard negative.

    Args:
        plans: folders of batch plans.
        texts: of documents by id; case and white space do not count.

    Raises:
        ArtifactError: a plan is missing or broken.
    """
    wanted: dict[int, list[str]] = {}
    for name, text in texts.items():
        wanted.setdefault(normalised_hash(text), []).append(name)
    found: dict[str, dict[str, None]] = {}
    for folder in dict.fromkeys(plans):
        for table in _files(BatchPlan.open(folder)):
            queries, negatives = table["query"], table["negatives"].combine_chunks()
            text = pc.list_flatten(negatives).field("text").dictionary_encode()
            ids = [wanted.get(normalised_hash(one.as_py()), []) for one in text.dictionary]
            hits = np.flatnonzero([bool(of_text) for of_text in ids])
            rows = pc.list_parent_indices(negatives)
            for place in np.flatnonzero(np.isin(text.indices.to_numpy(), hits)).tolist():
                query = queries[rows[place].as_py()].as_py()
                for name in ids[text.indices[place].as_py()]:
                    found.setdefault(name, {})[query] = None
    return {name: list(of_document) for name, of_document in found.items()}


def _files(plan: BatchPlan) -> Iterator[pa.Table]:
    """Yield the queries and trained hard negatives of each file, without the rows of held-out
    steps.
    """
    if not plan.num_negatives:
        return
    seen = 0
    for name in sorted(plan.manifest[FILES]):
        path = join(plan.folder, name)
        columns = ["step", "query", "negatives.list.element.text"]
        table = read_sealed(path, columns, remedy=remedy(path))
        table = table.filter(pc.less(table["step"], plan.num_steps))
        trained = pc.list_slice(table["negatives"], 0, plan.num_negatives)
        yield pa.table({"query": table["query"], "negatives": trained})
        seen += len(table)
        if seen >= _MOST_SEARCHED:
            return
