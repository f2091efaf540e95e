"""Repositories of mteb's tasks with made-up data, in the layouts of the real ones, on loopback.

The unmodified task classes read them by the normal online code of `datasets`. Names and revisions
come from mteb; layouts were read off the pages of the real repositories at these revisions:

    BEIR ports (mteb/nq)            card, corpus.jsonl, queries.jsonl, qrels/<split>.jsonl
    uploads by mteb (mteb/SciDocsRR)    card, <part>/<split>-00000-of-00001.parquet
    classes (mteb/banking77)        train.jsonl, test.jsonl
    classes by language (mteb/MTOPIntentClassification)  card, en/<split>-00000-of-00001.parquet
    MASSIVE                         card, <split>/en.json.gz with a column of languages
    clustering, pairs, STS          test.jsonl.gz; a set of clusters or all pairs are one row
    STS17, STS22                    card, test/<subset>.jsonl.gz with a column of languages
    SummEval                        data/test-00000-of-00001-<hash>.parquet

Which files a BEIR port and which an upload by mteb has is told by the repository's name: BEIR's are
in small letters. STS22's layout is taken to be that of STS17, which was changed in the same way.
"""

import gzip
import io
import json
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets.config
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_hub import DatasetHub, dataset_hub

Files = dict[str, bytes]
Rows = Sequence[Mapping[str, Any]]

TOPICS = {
    "weather": (
        "rain",
        "storm",
        "cloud",
        "wind",
        "snow",
        "frost",
        "thunder",
        "sunshine",
        "forecast",
        "humid",
    ),
    "kitchen": (
        "bread",
        "oven",
        "flour",
        "butter",
        "recipe",
        "salt",
        "kettle",
        "spoon",
        "boil",
        "taste",
    ),
    "railway": (
        "train",
        "track",
        "station",
        "signal",
        "carriage",
        "platform",
        "whistle",
        "ticket",
        "engine",
        "bridge",
    ),
    "garden": (
        "rose",
        "spade",
        "seed",
        "hedge",
        "lawn",
        "tulip",
        "compost",
        "beetle",
        "pond",
        "orchard",
    ),
}
_SPARE = ("the", "old", "new", "large", "small", "early", "late", "quiet", "open", "near")
_LANGUAGES = ("de", "en", "es")
"""Of repositories with many; the tasks of the English benchmark read English alone."""

_SHARD = "00000-of-00001"
_SUMMEVAL = "data/test-00000-of-00001-35901af5f6649399.parquet"


def made_up_text(topic: str, number: int, *, words: int = 8) -> str:
    """A text of a topic, the same for the same number."""
    chance = random.Random(f"{topic} {number}")
    return " ".join(chance.choices([*TOPICS[topic], *_SPARE], k=words)) + f" {number}"


def repositories_of(tasks: Sequence[Any], times: int = 1) -> dict[str, Files]:
    """Name → path → content, of all repositories that mteb tasks read; aggregates' members too.

    Args:
        times: how many times as many documents, queries and rows there are.
    """
    return {task.metadata.dataset["path"]: _files_of(task, times) for task in _single(tasks)}


def revisions_of(tasks: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """Name → the only revision that it is served at: the one that mteb asks."""
    return {
        task.metadata.dataset["path"]: (task.metadata.dataset["revision"],)
        for task in _single(tasks)
    }


@contextmanager
def mteb_hub(tasks: Sequence[Any], cache: Path, times: int = 1) -> Iterator[DatasetHub]:
    """A hub with the repositories of these tasks, which `datasets` in this process reads.

    Processes that are started inside read it too: `HF_ENDPOINT` and `HF_HOME` are set.

    Args:
        cache: folder for what is downloaded; the user's own cache is left alone.
        times: as `repositories_of` has it.
    """
    served = dataset_hub(repositories_of(tasks, times), revisions=revisions_of(tasks))
    with served as hub, pytest.MonkeyPatch.context() as patch:
        read_from(patch, hub, cache)
        yield hub


def read_from(patch: pytest.MonkeyPatch, hub: DatasetHub, cache: Path) -> None:
    """Let `datasets` read a hub in place of the one that it found when it was imported."""
    constants = huggingface_hub.constants
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        patch.delenv(name, raising=False)
    patch.setenv("HF_ENDPOINT", hub.address)
    patch.setenv("HF_HOME", str(cache))
    patch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "ENDPOINT", hub.address)


def _single(tasks: Sequence[Any]) -> list[Any]:
    return [
        single
        for task in tasks
        for single in (task.metadata.tasks if task.is_aggregate else [task])
    ]


def _files_of(task: Any, times: int) -> Files:
    metadata = task.metadata
    of_beir = metadata.dataset["path"].rpartition("/")[2].islower()
    files: Files
    match metadata.type:
        case "Retrieval" | "Reranking":
            ranked = metadata.type == "Reranking"
            is_port = of_beir and not ranked
            files = _beir_port(task, times) if is_port else _upload(task, times, ranked=ranked)
        case "Classification" if task.fast_loading:
            files = _rows_with_languages(task, lambda split: _classes(split, times), "json.gz")
        case "Classification" if metadata.is_multilingual:
            files = _classes_by_language(task, times)
        case "Classification":
            splits = ("train", "test")
            files = {f"{split}.jsonl": _lines(_classes(split, times)) for split in splits}
        case "Clustering":
            files = {"test.jsonl.gz": gzip.compress(_lines(_cluster_sets(times)))}
        case "PairClassification":
            files = {"test.jsonl.gz": gzip.compress(_lines([_pairs(times)]))}
        case "STS" if task.fast_loading:
            files = _rows_with_languages(task, lambda split: _graded(task, times), "jsonl.gz")
        case "STS":
            files = {"test.jsonl.gz": gzip.compress(_lines(_graded(task, times)))}
        case "Summarization":
            files = {_SUMMEVAL: _parquet(_summaries(times))}
        case kind:
            raise ValueError(f"no layout is known of {metadata.name}, a task of type {kind}")
    return files


def _card(configs: Mapping[str, Mapping[str, str]]) -> bytes:
    """A card that says which files are which split of which configuration."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, path in splits.items():
            lines += [f"  - split: {split}", f"    path: {path}"]
    return "\n".join([*lines, "---", "# Made up", ""]).encode()


def _lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _parquet(rows: Rows) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), buffer)
    return buffer.getvalue()


def _judged(times: int, *, ranked: bool = False, first: int = 0) -> dict[str, Rows]:
    """Documents, queries, and judgements: two documents of its topic are relevant to a query.

    Queries are named `<impression>_<number>`, as MIND's are, whose queries with one impression are
    scored together. Without candidates the first query is a document too, as ArguAna's are.

    Args:
        ranked: with a list of candidates for each query.
        first: number of the first text; others give other texts.
    """
    topics = list(TOPICS)
    documents = [
        {
            "id": f"d{n}",
            "title": topics[n % 4] if n % 3 else "",
            "text": made_up_text(topics[n % 4], first + n, words=16),
        }
        for n in range(30 * times)
    ]
    places = {f"q{n // 2}_{n}": n // 2 for n in range(6 * times)}
    queries = [
        {"id": name, "text": _beginnings(documents[place + 4], documents[place + 8])}
        for name, place in places.items()
    ]
    if not ranked:
        places = {"d0": 0, **places}
        queries.append({"id": "d0", "text": documents[0]["text"]})
    found: dict[str, Rows] = {
        "corpus": documents,
        "queries": queries,
        "qrels": [
            {"query-id": query, "corpus-id": f"d{place + 4 * step}", "score": grade}
            for query, place in places.items()
            for step, grade in ((1, 2), (2, 1), (3, 0))
        ],
    }
    if ranked:
        found["top_ranked"] = [
            {
                "query-id": query,
                "corpus-ids": [f"d{place + 4}", f"d{place + 8}", *_candidates(place, times)],
            }
            for query, place in places.items()
        ]
    return found


def _candidates(place: int, times: int) -> list[str]:
    """Fourteen documents that are relevant to no query."""
    return [f"d{16 * times + (14 * place + n) % (14 * times)}" for n in range(14)]


def _beginnings(*documents: Mapping[str, str]) -> str:
    return " ".join(" ".join(document["text"].split()[:6]) for document in documents)


def _first_text(task: Any) -> int:
    """Each repository has texts of its own."""
    return 100_000 * (zlib.crc32(task.metadata.dataset["path"].encode()) % 1_000)


def _beir_port(task: Any, times: int) -> Files:
    (split,) = task.metadata.eval_splits
    data = _judged(times, first=_first_text(task))
    texts = {
        part: [{"_id": row["id"], **row} for row in data[part]] for part in ("corpus", "queries")
    }
    for row in (row for rows in texts.values() for row in rows):
        del row["id"]
    grades = [{**row, "score": float(row["score"])} for row in data["qrels"]]
    return {
        "README.md": _card(
            {
                "default": {"train": "qrels/train.jsonl", split: f"qrels/{split}.jsonl"},
                "corpus": {"corpus": "corpus.jsonl"},
                "queries": {"queries": "queries.jsonl"},
            }
        ),
        "corpus.jsonl": _lines(texts["corpus"]),
        "queries.jsonl": _lines(texts["queries"]),
        "qrels/train.jsonl": _lines(grades[:1]),
        f"qrels/{split}.jsonl": _lines(grades),
    }


def _upload(task: Any, times: int, *, ranked: bool) -> Files:
    """As mteb's `push_dataset_to_hub` lays out retrieval and reranking."""
    (split,) = task.metadata.eval_splits
    files: Files = {}
    configs: dict[str, dict[str, str]] = {}
    for number, subset in enumerate(_LANGUAGES if task.metadata.is_multilingual else ("",)):
        first = _first_text(task) + number * 5_000
        for part, rows in _judged(times, ranked=ranked, first=first).items():
            config = f"{subset}-{part}" if subset else part
            configs[config] = {split: f"{config}/{split}-*"}
            files[f"{config}/{split}-{_SHARD}.parquet"] = _parquet(rows)
    return {"README.md": _card(configs), **files}


def _classes(split: str, times: int) -> Rows:
    """Enough rows of a class for the 32 examples that some tasks train on."""
    num_of_class, first = (36 * times, 0) if split == "train" else (8 * times, 500 * times)
    return [
        {"text": made_up_text(topic, first + n), "label": label, "label_text": topic}
        for n in range(num_of_class)
        for label, topic in enumerate(TOPICS)
    ]


def _classes_by_language(task: Any, times: int) -> Files:
    splits = ("train", *task.metadata.eval_splits)
    configs = {
        language: {split: f"{language}/{split}-*" for split in splits} for language in _LANGUAGES
    }
    return {
        "README.md": _card(configs),
        **{
            f"{language}/{split}-{_SHARD}.parquet": _parquet(_classes(split, times))
            for language in _LANGUAGES
            for split in splits
        },
    }


def _rows_with_languages(task: Any, rows: Any, ending: str) -> Files:
    """A file for each language, all in the configuration `default` by a column that tells it.

    The classes of MASSIVE are texts.
    """
    is_sts = task.metadata.type == "STS"
    splits = ("test",) if is_sts else ("train", *task.metadata.eval_splits)
    languages = ("ar-ar", "en", "en-en") if is_sts else _LANGUAGES
    configs = {"default": {split: f"{split}/*.{ending}" for split in splits}}
    configs |= {
        language: {split: f"{split}/{language}.{ending}" for split in splits}
        for language in languages
    }
    files = {"README.md": _card(configs)}
    for split in splits:
        for language in languages:
            found = [{**row, "lang": language} for row in rows(split)]
            if not is_sts:
                found = [{**row, "label": row["label_text"]} for row in found]
            files[f"{split}/{language}.{ending}"] = gzip.compress(_lines(found))
    return files


def _cluster_sets(times: int) -> Rows:
    """Three sets of texts, each to be clustered by itself."""
    size = 12 * times
    return [
        {
            "sentences": [
                made_up_text(topic, 40 * times * s + n) for n in range(size) for topic in TOPICS
            ],
            "labels": [topic for _ in range(size) for topic in TOPICS],
        }
        for s in range(3)
    ]


def _pairs(times: int) -> dict[str, list[Any]]:
    """All pairs in one row: alike, or of another topic."""
    topics = list(TOPICS)
    first = [(topic, n) for n in range(10 * times) for topic in topics]
    other = [(t if n % 2 else topics[(topics.index(t) + 1) % 4], n + 200 * times) for t, n in first]
    return {
        "sent1": [made_up_text(*place) for place in first],
        "sent2": [made_up_text(*place) for place in other],
        "labels": [n % 2 for _, n in first],
    }


def _graded(task: Any, times: int) -> Rows:
    """Pairs whose grade is the share of words that they have in common, in the task's range."""
    topics = list(TOPICS)
    rows = []
    for n in range(24 * times):
        text = made_up_text(topics[n % 4], n, words=10).split()
        kept = text[: n % 11]
        other = made_up_text(topics[(n + 1) % 4], n + 300 * times, words=10).split()
        other = kept + other[len(kept) :]
        grade = task.min_score + (task.max_score - task.min_score) * len(kept) / 10
        rows.append({"sentence1": " ".join(text), "sentence2": " ".join(other), "score": grade})
    return rows


def _summaries(times: int) -> Rows:
    """Texts with summaries by people and by machines, these with grades."""
    rows = []
    for n in range(4 * times):
        topic, other = list(TOPICS)[n % 4], list(TOPICS)[(n + 1) % 4]
        good = [made_up_text(topic, 10 * n + k) for k in range(3)]
        bad = [made_up_text(other, 10 * n + k) for k in range(3)]
        rows.append(
            {
                "id": f"s{n}",
                "text": made_up_text(topic, n, words=40),
                "human_summaries": [made_up_text(topic, 70 * times + n + k) for k in range(2)],
                "machine_summaries": [*good, *bad],
                "relevance": [5.0, 4.3, 4.0, 2.7, 2.0, 1.3],
                "coherence": [5.0, 4.0, 4.0, 3.0, 2.0, 1.0],
            }
        )
    return rows
