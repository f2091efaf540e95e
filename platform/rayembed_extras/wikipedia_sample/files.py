"""Make the files of the Wikipedia sample once on a machine, from summaries in a Python
package.

They depend on the summaries and the reference alone, so that every node of a cluster makes the same
bytes by itself. An entry of the cache is named by what decides its content.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rayembed.assets.cache import filled
from rayembed.assets.resolver import resolve
from rayembed.config.document import fingerprint
from rayembed.errors import AssetError, DataError
from rayembed.recipes.sample import LANGUAGE_CODES, RowFile, ScoreSizes, TaskFolder
from rayembed_extras.wikipedia_sample import tasks
from rayembed_extras.wikipedia_sample.articles import (
    Article,
    HeldOutTitles,
    held_out_in_order,
    hold_out,
    read_articles,
)
from rayembed_extras.wikipedia_sample.references import languages_read, parse_reference, place_of
from rayembed_extras.wikipedia_sample.rows import training_rows

CODE_VERSION = 1
"""Version of this package's rows and tasks; raise it when the same reference yields other files."""


def fetch_sample(reference: str, cache: Path) -> Path:
    """Return the local path of a file or folder of the sample; make it if it is missing.

    Raises:
        AssetError: no such file, or the summaries cannot be had.
        DataError: the summaries are none, or give too few rows for a task.
    """
    wanted = parse_reference(reference)
    part = wanted.part
    digests = [_digest(place_of(part, language)) for language in languages_read(part)]
    key = fingerprint([CODE_VERSION, digests, part.model_dump(mode="json", exclude={"source"})])

    def make(folder: Path) -> None:
        if isinstance(part, TaskFolder):
            _write_task(part, folder)
        else:
            _write_rows(part, folder)

    folder = filled(cache / "samples" / f"wikipedia-{key}", make, checked=True)
    path = folder / wanted.inside
    if not path.exists():
        held = ", ".join(sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.*")))
        raise AssetError(
            f"the sample {reference!r} has no file {wanted.inside!r}; it has the files {held}"
        )
    return path


def held_out_articles(sizes: ScoreSizes) -> list[Article]:
    """Select the held-out articles from which the scored tasks are made.

    Raises:
        DataError: fewer than the documents of a corpus.
    """
    articles = summaries(sizes, sizes.language or "en")
    ordered = held_out_in_order(articles, sizes.first + sizes.held_out, sizes.seed)
    titles = set(ordered[sizes.first :])
    kept = [article for article in articles if article.title in titles]
    if sizes.topic:
        return [article for article in kept if article.topic == sizes.topic]
    if len(kept) < sizes.documents:
        raise DataError(
            f"the sample has {len(kept)} held-out articles, fewer than {sizes.documents} documents;"
            " request fewer documents"
        )
    return kept


def summaries(part: RowFile | ScoreSizes, language: Any) -> tuple[Article, ...]:
    """Read all articles of the sample in a language, including held-out ones."""
    reference = place_of(part, language)
    return _articles(reference, _digest(reference))


def _write_retrieval(sample: tasks.RetrievalSample, folder: Path) -> None:
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", sample.documents), ("queries", sample.queries)):
        _write_lines(folder / f"{name}.jsonl", ({"_id": i, "text": t} for i, t in texts.items()))
    lines = ["query-id\tcorpus-id\tscore\n"]
    for query, found in sample.relevant.items():
        lines += [f"{query}\t{document}\t{grade}\n" for document, grade in found.items()]
    (folder / "qrels" / "test.tsv").write_text("".join(lines), encoding="utf-8")


def _write_rows(part: RowFile, folder: Path) -> None:
    held_out = HeldOutTitles(frozenset(), frozenset())
    if part.kind != "texts":
        places = tuple(place_of(part, language) for language in languages_read(part))
        held_out = _held_out(places, tuple(map(_digest, places)), part.held_out, part.seed)
    translations = summaries(part, part.to) if part.to else ()
    others = {article.title: article for article in translations}
    rows = training_rows(part.kind, summaries(part, part.language), held_out, part.seed, others)
    _write_lines(folder / f"{part.kind}.jsonl", rows)


def _write_task(part: TaskFolder, folder: Path) -> None:
    articles = held_out_articles(part)
    retrieval = {
        "num_documents": part.documents,
        "num_queries": part.queries,
        "max_words": tasks.words_of_tokens(part.max_length),
        "seed": part.seed,
    }
    table = {"max_words": tasks.words_of_tokens(part.max_length // 2), "seed": part.seed}
    splits: tasks.Table = {}
    match part.task:
        case "WikiSentenceRetrieval":
            _write_retrieval(tasks.sentence_retrieval(articles, **retrieval), folder)
        case "WikiDescriptionRetrieval":
            _write_retrieval(tasks.description_retrieval(articles, **retrieval), folder)
        case "WikiCrossLingualRetrieval":
            others = {LANGUAGE_CODES[code]: summaries(part, code) for code in part.languages}
            samples = tasks.cross_lingual_retrieval(articles, others, **retrieval)
            for code, sample in samples.items():
                _write_retrieval(sample, folder / code)
        case "WikiTopicClassification":
            splits = tasks.topic_classification(articles, **table)
        case "WikiTopicClustering":
            splits = tasks.topic_clustering(articles, **table)
        case "WikiTitleDescriptionPairClassification":
            splits = tasks.title_description_pairs(articles, **table)
        case "WikiRelatednessSTS":
            splits = tasks.relatedness_pairs(articles, **table)
    for split, columns in splits.items():
        cells = zip(*columns.values(), strict=True)
        rows = (dict(zip(columns, row, strict=True)) for row in cells)
        _write_lines(folder / f"{split}.jsonl", rows)


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _digest(reference: str) -> str:
    """Identify the summaries: the reference of a pinned package, or a hash of the file."""
    if reference.startswith("pypi://"):
        return reference
    return hashlib.sha256(resolve(reference).read_bytes()).hexdigest()


@lru_cache(maxsize=3)
def _articles(reference: str, digest: str) -> tuple[Article, ...]:
    del digest  # a part of the key: a file that changed is read again
    return tuple(read_articles(resolve(reference)))


@lru_cache(maxsize=3)
def _held_out(
    references: tuple[str, ...], digests: tuple[str, ...], number: int, seed: int
) -> HeldOutTitles:
    found = zip(references, digests, strict=True)
    return hold_out((_articles(place, digest) for place, digest in found), number, seed)
