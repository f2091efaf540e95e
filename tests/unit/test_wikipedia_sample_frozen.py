"""The files of the sample hold what the quickstarts were measured on, row for row.

The digests are of the records and of the tasks' data that rayembed made of the sample before it was
files. What the figures of README and docs rest on changes with any of them.
"""

import hashlib
import json

import pytest

from rayembed.assets.resolver import resolve
from rayembed.assets.storage import join
from rayembed.config.own_sets import ClassificationSet, RetrievalSet
from rayembed.recipes.catalogue import get_recipe

pytestmark = pytest.mark.assets

ROWS = {
    "description.jsonl": (8592, "797c532c64936a16"),
    "sentence.jsonl": (8448, "baf87dd5b9dd8388"),
    "sentence.jsonl?held_out_of=es,fr": (8390, "28054ea3a40b9e24"),
    "sentence.jsonl?language=fr&held_out_of=en,es": (6228, "da460bd4a40fbec5"),
    "sentence.jsonl?language=es&held_out_of=en,fr": (4157, "d3ca1ab16063e7ff"),
    "translation.jsonl?to=fr&held_out_of=es": (2166, "bc90553e33b0514a"),
    "translation.jsonl?to=es&held_out_of=fr": (1081, "eae6a8cd6cd3ab9a"),
    "description.jsonl?held_out_of=es,fr": (8532, "4942ada776461637"),
    "topics.jsonl": (8135, "da807153dea09ca3"),
}
"""File → its number of rows, and their digest."""

TASKS = {
    "nvembed-quickstart": {
        "WikiSentenceRetrieval": "1a56e096a69cbd36",
        "WikiDescriptionRetrieval": "8e475d39c4356f69",
        "WikiTopicClassification": "06efdbf615194164",
        "WikiTopicClustering": "4ea47676e037476e",
        "WikiTitleDescriptionPairClassification": "65c2712e0ed8d86a",
        "WikiRelatednessSTS": "2d3000866b877b49",
    },
    "causal2vec-quickstart": {
        "WikiSentenceRetrieval": "261e2994454426c7",
        "WikiDescriptionRetrieval": "7e5cd838399e26b5",
        "WikiTopicClassification": "e70594727e1e8d8b",
        "WikiTopicClustering": "38cedba3983455b1",
        "WikiTitleDescriptionPairClassification": "65c2712e0ed8d86a",
        "WikiRelatednessSTS": "567e654e7004bf4c",
    },
    "cde-quickstart": {
        "WikiSentenceRetrieval": "260fe390cd863282",
        "WikiDescriptionRetrieval": "6f6e326248a71d6d",
        "WikiTopicClassification": "e70594727e1e8d8b",
        "WikiTopicClustering": "38cedba3983455b1",
        "WikiTitleDescriptionPairClassification": "65c2712e0ed8d86a",
        "WikiRelatednessSTS": "567e654e7004bf4c",
    },
    "biencoder-quickstart": {
        "WikiSentenceRetrieval": "01e20af96ca95123",
        "WikiDescriptionRetrieval": "2decc19c56080ec9",
        "WikiTopicClassification": "fdd1de77068bf0f9",
        "WikiTopicClustering": "600403863bc7590a",
        "WikiTitleDescriptionPairClassification": "65c2712e0ed8d86a",
        "WikiRelatednessSTS": "816d8b32aac54deb",
    },
    "nomic-quickstart": {
        "WikiSentenceRetrieval": "261e2994454426c7",
        "WikiDescriptionRetrieval": "7e5cd838399e26b5",
        "WikiTopicClassification": "e70594727e1e8d8b",
        "WikiTopicClustering": "38cedba3983455b1",
        "WikiTitleDescriptionPairClassification": "65c2712e0ed8d86a",
        "WikiRelatednessSTS": "567e654e7004bf4c",
        "WikiCrossLingualRetrieval": "1710b9b9897716d0",
    },
}
"""Recipe → task → digest of its data."""


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]


def rows_of(reference: str) -> list[list[str]]:
    return [list(json.loads(line).values()) for line in resolve(reference).open(encoding="utf-8")]


def judged(reference: str) -> list:
    folder = resolve(reference)
    table = (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]
    cells = [line.split("\t") for line in table]
    grades = [[query, document, int(grade)] for query, document, grade in cells]
    return [*(rows_of(join(reference, f"{n}.jsonl")) for n in ("corpus", "queries")), grades]


def data_of(own) -> list:
    if isinstance(own, RetrievalSet):
        parts = [[code, judged(join(own.path, code))] for code in own.languages]
        return parts or judged(own.path)
    tables = [["test", rows_of(own.path)]]
    if isinstance(own, ClassificationSet):
        tables.append(["train", rows_of(own.train)])
    return tables


@pytest.mark.parametrize("file", ROWS)
def test_rows_for_training_are_those_of_the_quickstarts(file: str) -> None:
    rows = rows_of(f"sample://wikipedia/{file}")
    assert (len(rows), digest(rows)) == ROWS[file]


@pytest.mark.parametrize("recipe", TASKS)
def test_sets_of_the_scores_are_those_of_the_quickstarts(recipe: str) -> None:
    found = {own.name: digest(data_of(own)) for own in get_recipe(recipe).evaluation.own_sets}
    assert found == TASKS[recipe]
    # Control: another length is other data.
    own = get_recipe(recipe).evaluation.own_sets[0]
    shorter = own.model_copy(
        update={"path": "sample://wikipedia/WikiSentenceRetrieval?max_length=16"}
    )
    assert digest(data_of(shorter)) != TASKS[recipe][own.name]


def test_the_quickstarts_train_on_these_files() -> None:
    names = ("nvembed", "causal2vec", "cde", "biencoder", "nomic")
    runs = [get_recipe(f"{name}-quickstart") for name in names]
    paths = {dataset.source.path for run in runs for dataset in run.data.datasets}
    assert paths == {f"sample://wikipedia/{file}" for file in ROWS}
