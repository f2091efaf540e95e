"""Made-up articles as plain files: rows for training, and own sets of the held-out ones.

They have the names, the sizes and the form of the Wikipedia sample's, so that tests of the core
need no package that makes those. Titles stand in no text, so none is masked.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from rayembed.config.settings import changed, parse
from rayembed.data.hashes import seeded_hash
from rayembed.data.sources.classes import ClassesSource
from rayembed.data.sources.pairs import PairsSource
from rayembed.data.words import split_sentences
from rayembed.recipes.sample import RETRIEVAL_TASKS, ScoreSizes, own_sets

WORDS_PER_TOKEN = 0.75


@dataclass(frozen=True)
class PlainSample:
    """The articles of a file, divided into those for training and held-out ones."""

    articles: Path
    held_out: int
    seed: int

    def pairs(self, kind):
        """`description`: description → text. `sentence`: one sentence → the others."""
        return PairsSource(path=self._rows(kind), id="id")

    def topics(self):
        """Texts with their topic."""
        return ClassesSource(path=self._rows("topics"), id="id")

    def scores(self, names=None, **sizes):
        """The sets over the held-out articles; sizes are those of `ScoreSizes`."""
        common = {"held_out": self.held_out, "seed": self.seed, "source": str(self.articles)}
        return plain_sets(parse(ScoreSizes, {**common, **sizes}), names)

    def _rows(self, kind):
        folder = self.articles.with_suffix("") / f"rows.held_out-{self.held_out}.seed-{self.seed}"
        rows = []
        for article in _others(self.articles, self.held_out, self.seed):
            title, text = article["title"], article["extract"]
            if kind == "topics":
                row = {"text": text, "label": article["topic"]}
            elif kind == "description":
                row = {"query": article["description"], "positive": text}
            else:
                query, rest = _sentence_and_rest(article, self.seed)
                row = {"query": query, "positive": rest}
            rows.append({"id": title, **row})
        if rows:
            _write_lines(folder / f"{kind}.jsonl", rows)
        return str(folder / f"{kind}.jsonl")


def sizes_of(sets):
    """The sizes of the first of the sets for retrieval in one language, as the sample's files or
    the plain ones are named.
    """
    path = next(own.path for own in sets if own.kind == "retrieval" and not own.languages)
    if path.startswith("sample://"):
        return parse(ScoreSizes, dict(parse_qsl(path.partition("?")[2])))
    folder = Path(path).parent
    source = f"{folder.parent}.json"
    told = (part.partition("-") for part in folder.name.split(".")[1:])
    return parse(ScoreSizes, {**{name: size for name, _, size in told}, "source": source})


def plain_sets(sizes, names=None):
    """The sample's tasks as own sets of files beside the articles, if these are there."""
    articles = Path(sizes.source)
    told = [
        f"{name}-{getattr(sizes, name)}"
        for name, field in ScoreSizes.model_fields.items()
        if name != "source" and getattr(sizes, name) != field.default
    ]
    folder = articles.with_suffix("") / ".".join(["sets", *told])
    if articles.exists():
        _write_sets(_held_out(articles, sizes), sizes, folder)
    sets = []
    for own in own_sets(sizes, names):
        places = {"path": str(folder / own.name)}
        if own.kind != "retrieval":
            places["path"] += "/test.jsonl"
        if own.kind == "classification":
            places["train"] = str(folder / own.name / "train.jsonl")
        sets.append(changed(own, **places))
    return tuple(sets)


def _articles(path):
    content = json.loads(path.read_text()) if path.exists() else []
    return list(content.values()) if isinstance(content, dict) else content


def _titles_in_order(articles, seed):
    titles = [article["title"] for article in articles]
    return sorted(titles, key=lambda title: (seeded_hash(seed, "held-out", title), title))


def _others(path, held_out, seed):
    """The articles that are not held out."""
    articles = _articles(path)
    left = {*_titles_in_order(articles, seed)[held_out:]}
    return [article for article in articles if article["title"] in left]


def _held_out(path, sizes):
    articles = _articles(path)
    titles = _titles_in_order(articles, sizes.seed)
    kept = {*titles[sizes.first : sizes.first + sizes.held_out]}
    return [article for article in articles if article["title"] in kept]


def _write_sets(articles, sizes, folder):
    retrieval_words, table_words = (
        max(5, int(tokens * WORDS_PER_TOKEN))
        for tokens in (sizes.max_length, sizes.max_length // 2)
    )
    documents = _shuffled(articles, sizes.seed, "corpus")[: sizes.documents]
    for name in RETRIEVAL_TASKS:
        _write_retrieval(folder / name, name, documents, sizes, retrieval_words)
    for name, splits in _tables(articles, sizes.seed).items():
        for split, rows in splits.items():
            cut = [
                {k: _cut(v, table_words) if isinstance(v, str) else v for k, v in row.items()}
                for row in rows
            ]
            _write_lines(folder / name / f"{split}.jsonl", cut)


def _write_retrieval(folder, name, documents, sizes, words):
    """A folder in BEIR's layout; documents that are asked for lack the sentence of their query."""
    by_sentence = name == "WikiSentenceRetrieval"
    numbers = [*range(len(documents))]
    random.Random(f"{sizes.seed}:{'sentence' if by_sentence else 'description'} queries").shuffle(
        numbers
    )
    asked = sorted(numbers[: sizes.queries])
    texts = {i: article["extract"] for i, article in enumerate(documents)}
    queries = {i: documents[i]["description"] for i in asked}
    if by_sentence:
        for i in asked:
            queries[i], texts[i] = _sentence_and_rest(documents[i], sizes.seed)
    for file, prefix, found in (("corpus", "d", texts), ("queries", "q", queries)):
        rows = [{"_id": f"{prefix}{i}", "text": _cut(text, words)} for i, text in found.items()]
        _write_lines(folder / f"{file}.jsonl", rows)
    lines = ["query-id\tcorpus-id\tscore", *(f"q{i}\td{i}\t1" for i in asked)]
    _write(folder / "qrels" / "test.tsv", lines)


def _tables(articles, seed):
    """Rows by task and split."""
    by_topic = {}
    for article in _shuffled(articles, seed, "topics"):
        by_topic.setdefault(article["topic"], []).append(article)
    train, test, grouped, pairs, graded = [], [], [], [], []
    for topic, members in sorted(by_topic.items()):
        labelled = [{"text": a["extract"], "label": topic} for a in members]
        middle = min(10, len(members) // 2)
        train += labelled[:middle]
        test += labelled[middle : middle + 20]
        grouped += labelled[:20]
        for article, other in zip(members, members[1:] + members[:1], strict=True):
            for label, described in ((1, article), (0, other)):
                texts = {"sentence1": article["title"], "sentence2": described["description"]}
                pairs.append({**texts, "label": label})
    ordered = _shuffled(articles, seed, "anchors")
    for k, anchor in enumerate(ordered[:60]):
        partners = {3.0: anchor}
        for other in ordered[k + 1 :] + ordered[:k]:
            words = {*anchor["description"].split()} & {*other["description"].split()}
            if anchor["topic"] == other["topic"]:
                partners.setdefault(2.0 if words else 1.0, other)
            elif not words:
                partners.setdefault(0.0, other)
        for score, other in sorted(partners.items()):
            texts = {"sentence1": _halves(anchor)[0], "sentence2": _halves(other)[1]}
            graded.append({**texts, "score": score})
    return {
        "WikiTopicClassification": {"train": train, "test": test},
        "WikiTopicClustering": {"test": grouped},
        "WikiTitleDescriptionPairClassification": {"test": pairs},
        "WikiRelatednessSTS": {"test": graded},
    }


def _sentence_and_rest(article, seed):
    sentences = split_sentences(article["extract"])
    asked = random.Random(f"{seed}:{article['title']}").randrange(len(sentences))
    return sentences[asked], " ".join([*sentences[:asked], *sentences[asked + 1 :]])


def _halves(article):
    sentences = split_sentences(article["extract"])
    middle = (len(sentences) + 1) // 2
    return " ".join(sentences[:middle]), " ".join(sentences[middle:])


def _shuffled(articles, seed, purpose):
    ordered = sorted(articles, key=lambda article: article["title"])
    random.Random(f"{seed}:{purpose}").shuffle(ordered)
    return ordered


def _cut(text, words):
    return " ".join(text.split()[:words])


def _write_lines(path, rows):
    _write(path, [json.dumps(row) for row in rows])


def _write(path, lines):
    """Write lines; a file that has them stays as it is, with its times."""
    content = "".join(f"{line}\n" for line in lines)
    if not path.exists() or path.read_text() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
