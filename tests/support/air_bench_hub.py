"""Made-up AIR-Bench data sets in the layout of the real repositories, and a model for them.

A repository holds JSON Lines, `<version>/<data set>/corpus.jsonl`, `<split>_queries.jsonl` and, in
the repository of labels, `dev_qrels.jsonl`; its card maps versions and splits to these files.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from mteb.models import ModelMeta

from rayembed.evaluation.model_spec import model_meta
from rayembed_extras.air_bench.catalogue import AirBenchDataset

NUM_DOCUMENTS = 30
NUM_QUERIES = 4


def made_up_documents(dataset: AirBenchDataset) -> dict[str, str]:
    return {f"doc-{n}": f"{dataset.label} says {n}" for n in range(NUM_DOCUMENTS)}


def made_up_queries(dataset: AirBenchDataset, split: str) -> dict[str, str]:
    """Query n of dev asks for document n, of test for document n + 10; ids are alike in both."""
    first = {"dev": 0, "test": 10}[split]
    return {f"q-{n}": f"what is {first + n}" for n in range(NUM_QUERIES)}


def made_up_labels() -> dict[str, dict[str, int]]:
    """Of dev: the document that is asked for and one more; one that was judged irrelevant."""
    return {
        f"q-{n}": {f"doc-{n}": 1, f"doc-{n + 4}": 1, f"doc-{n + 1}": 0} for n in range(NUM_QUERIES)
    }


def air_bench_repositories(
    datasets: Iterable[AirBenchDataset],
) -> dict[str, dict[str, bytes]]:
    """Files of all repositories that the data sets need, with their splits alone."""
    cards: dict[str, dict[str, list[dict[str, str]]]] = {}
    found: dict[str, dict[str, bytes]] = {}

    def put(repository: str, version: str, split: str, path: str, rows: list[Any]) -> None:
        found.setdefault(repository, {})[path] = jsonl(rows)
        files = cards.setdefault(repository, {}).setdefault(version, [])
        files.append({"split": split, "path": path})

    for dataset in datasets:
        folder, version = f"{dataset.version}/{dataset.name}", dataset.version
        documents = texts(made_up_documents(dataset))
        place = dataset.repository
        put(place, version, dataset.corpus_split, f"{folder}/corpus.jsonl", documents)
        for split in dataset.splits:
            queries = texts(made_up_queries(dataset, split))
            path = f"{folder}/{split}_queries.jsonl"
            put(place, version, dataset.queries_split(split), path, queries)
            if split == "dev":
                labels = [
                    {"qid": query, "docid": document, "relevance": relevance}
                    for query, documents_of in made_up_labels().items()
                    for document, relevance in documents_of.items()
                ]
                path, split_name = f"{folder}/dev_qrels.jsonl", dataset.labels_split("dev")
                put(dataset.labels_repository, version, split_name, path, labels)
    for repository, by_version in cards.items():
        found[repository]["README.md"] = card(by_version)
    return found


def card(by_version: Mapping[str, Sequence[Mapping[str, str]]]) -> bytes:
    """A README.md that maps versions to splits and their files."""
    configs = [
        {"config_name": version, "data_files": list(files)} for version, files in by_version.items()
    ]
    return f"---\n{yaml.safe_dump({'configs': configs})}---\n\nMade up.\n".encode()


def texts(by_id: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"id": name, "text": text} for name, text in by_id.items()]


def jsonl(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class NumberModel:
    """Finds the document with the query's number first, then its neighbours by distance."""

    def __init__(self, name: str = "made/up", revision: str = "r1") -> None:
        self.mteb_model_meta: ModelMeta = model_meta(name, revision)
        self.calls: list[dict[str, Any]] = []
        self.corpus: Any = None

    def index(self, corpus, *, task_metadata, hf_split, hf_subset, encode_kwargs, num_proc):
        self.corpus = corpus

    def search(
        self,
        queries,
        *,
        task_metadata,
        hf_split,
        hf_subset,
        top_k,
        encode_kwargs,
        top_ranked=None,
        num_proc,
    ):
        corpus, self.corpus = self.corpus, None
        self.calls.append(
            {
                "task": task_metadata,
                "corpus": corpus,
                "queries": queries.to_dict(),
                "top_k": top_k,
                "encode_kwargs": encode_kwargs,
            }
        )
        numbers = [(name, float(text.split()[-1])) for name, text in _pairs(corpus)]
        answers = {}
        for query, text in _pairs(queries):
            asked = float(text.split()[-1])
            near = sorted(numbers, key=lambda item: (abs(item[1] - asked), item[0]))[:top_k]
            answers[query] = {name: -abs(number - asked) for name, number in near}
        return answers


def _pairs(rows: Any) -> list[tuple[str, str]]:
    return list(zip(rows["id"], rows["text"], strict=True))
