"""Describe an AIR-Bench data set as an mteb task, with an instruction for its queries.

The instructions are ours. AIR-Bench publishes none, and the published runs of instructed models
use one sentence for everything. Documents get no instruction.
"""

from collections.abc import Mapping

from mteb.abstasks.task_metadata import TaskMetadata

from rayembed_extras.air_bench.catalogue import AirBenchDataset, Task

MAIN_SCORES: Mapping[Task, str] = {"qa": "ndcg_at_10", "long-doc": "recall_at_10"}
"""Score used by the leaderboard to rank models."""

_INSTRUCTIONS: Mapping[Task, Mapping[str, str]] = {
    "qa": {
        "arxiv": "Given a scientific question, retrieve abstracts of papers that answer it",
        "finance": "Given a question about finance, retrieve financial news and reports that "
        "answer it",
        "healthcare": "Given a medical question, retrieve passages of medical texts that answer it",
        "law": "Given a legal question, retrieve passages of laws and rulings that answer it",
        "msmarco": "Given a web search query, retrieve passages that answer it",
        "news": "Given a question about the news, retrieve news articles that answer it",
        "science": "Given a scientific question, retrieve abstracts of papers that answer it",
        "web": "Given a question, retrieve web pages that answer it",
        "wiki": "Given a question, retrieve Wikipedia passages that answer it",
    },
    "long-doc": {
        "arxiv": "Given a question about a scientific paper, retrieve the passages of the paper "
        "that answer it",
        "book": "Given a question about a book, retrieve the passages of the book that answer it",
        "healthcare": "Given a question about medical articles, retrieve the passages of the "
        "articles that answer it",
        "law": "Given a question about legal documents, retrieve the passages of the documents "
        "that answer it",
    },
}

_LANGUAGES: Mapping[str, str] = {
    "ar": "arb-Arab",
    "bn": "ben-Beng",
    "de": "deu-Latn",
    "en": "eng-Latn",
    "es": "spa-Latn",
    "fa": "fas-Arab",
    "fr": "fra-Latn",
    "hi": "hin-Deva",
    "id": "ind-Latn",
    "ja": "jpn-Jpan",
    "ko": "kor-Hang",
    "ru": "rus-Cyrl",
    "zh": "cmn-Hans",
}


def query_instruction(dataset: AirBenchDataset) -> str:
    """Return an English instruction for queries, which says what documents to search for."""
    return _INSTRUCTIONS[dataset.task][dataset.domain]


def task_metadata(dataset: AirBenchDataset, revision: str) -> TaskMetadata:
    """Build mteb's metadata of a retrieval task, with `query_instruction` as the prompt of
    queries.

    Args:
        revision: the commit of the data set's repository.
    """
    return TaskMetadata(
        name=f"{dataset.version}_{dataset.label}",
        description=(
            f"{dataset.version}, {dataset.task} in the domain {dataset.domain!r} "
            f"({dataset.language}): data set {dataset.name!r}."
        ),
        type="Retrieval",
        category="t2t",
        main_score=MAIN_SCORES[dataset.task],
        dataset={
            "path": dataset.repository,
            "name": dataset.version,
            "revision": revision,
        },
        reference="https://arxiv.org/abs/2412.13102",
        prompt={"query": query_instruction(dataset)},
        eval_splits=list(dataset.splits),
        eval_langs=[_LANGUAGES[dataset.language]],
    )
