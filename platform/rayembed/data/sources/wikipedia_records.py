"""Records of Wikipedia summaries: description pairs, sentence pairs, topic examples and labels.

Pure functions of articles and a seed: an article's record is independent of the order of articles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayembed.config.data import DatasetConfig
from rayembed.config.sources import WikipediaSource
from rayembed.data.hashes import text_hash
from rayembed.data.records import Negative, Record, has_content, reject_reason
from rayembed.data.sources.wikipedia import (
    NO_TOPIC,
    Article,
    mask_title,
    seeded_hash,
    split_sentences,
)

MIN_WORDS = 5
"""Minimum number of words of a text; shorter ones are too unspecific. The evaluation has the same.
"""

MIN_WORDS_OF_DESCRIPTION = 2

OTHER_CLASS = "other_class"
"""Rule name of negatives that are examples, or names, of other classes."""


@dataclass(frozen=True)
class Examples:
    """Example pool of topic records: texts of training articles by class."""

    by_class: Mapping[str, tuple[str, ...]]
    """Sorted distinct texts of each class."""


def examples_of(
    articles: Sequence[Article], source: WikipediaSource, banned: frozenset[int]
) -> Examples:
    """Build the example pool of topic records.

    Args:
        articles: training articles only.
        banned: hashes of texts that must not occur in training (`held_out_texts`).
    """
    texts: dict[str, set[str]] = {}
    for article in articles:
        text = _classified_text(article, source)
        if article.topic != NO_TOPIC and text is not None and text_hash(text) not in banned:
            texts.setdefault(article.topic, set()).add(text)
    return Examples({topic: tuple(sorted(found)) for topic, found in sorted(texts.items())})


def convert(
    article: Article,
    dataset: DatasetConfig,
    seed: int,
    examples: Examples | None = None,
    translations: Mapping[str, Article] | None = None,
) -> Record | str:
    """Record of a training article, or the reason for its rejection.

    Args:
        dataset: one whose source is a `WikipediaSource`.
        examples: of the data set; needed for topic records.
        translations: articles of another language by title; needed for translation records.
    """
    source = dataset.source
    assert isinstance(source, WikipediaSource)
    match source.pairs:
        case "description":
            made = description_pair(article)
        case "sentence":
            made = sentence_pair(article, seed)
        case "translation":
            made = translation_pair(article, (translations or {}).get(article.title))
        case "topic":
            assert examples is not None
            return _topic_record(article, dataset, source, seed, source.num_negatives, examples)
    if isinstance(made, str):
        return made
    query, positive = made
    return _record(article, dataset, query, positive)


def description_pair(article: Article) -> tuple[str, str] | str:
    """Description and title-masked text, or the reason for rejection."""
    query = mask_title(article.description, article.title).strip()
    positive = mask_title(article.extract, article.title).strip()
    if not article.description.strip():
        return "no description"
    if len(query.split()) < MIN_WORDS_OF_DESCRIPTION:
        return "description is too short"
    if _too_short(positive):
        return "text is too short"
    return query, positive


def translation_pair(article: Article, other: Article | None) -> tuple[str, str] | str:
    """Title-masked texts of an article in two languages, or the reason for rejection.

    Args:
        other: the article of the same title in the other language; None: there is none. Most such
            titles are names of people and places, so that they mean the same.
    """
    if other is None:
        return "no article of this title in the other language"
    texts = [mask_title(a.extract, a.title).strip() for a in (article, other)]
    if any(map(_too_short, texts)):
        return "text is too short"
    return texts[0], texts[1]


def sentence_pair(article: Article, seed: int) -> tuple[str, str] | str:
    """A sentence and the rest of its article, both title-masked, or the reason for rejection.

    The sentence is the one with the smallest hash among those of sufficient length that leave a
    rest of sufficient length; if it occurs twice, the rest lacks both.
    """
    sentences = [mask_title(text, article.title) for text in split_sentences(article.extract)]
    if len(sentences) < 2:
        return "fewer than two sentences"
    places = sorted(
        range(len(sentences)), key=lambda i: seeded_hash(seed, f"sentence {i}", article.title)
    )
    for place in places:
        query = sentences[place]
        rest = " ".join(text for text in sentences if text != query)
        if not _too_short(query) and not _too_short(rest):
            return query, rest
    return "no sentence that is long enough and leaves a rest"


def _topic_record(
    article: Article,
    dataset: DatasetConfig,
    source: WikipediaSource,
    seed: int,
    num_negatives: int,
    examples: Examples,
) -> Record | str:
    query = _classified_text(article, source)
    if article.topic == NO_TOPIC:
        return "no topic"
    if query is None:
        return "text is too short"
    key = f"{dataset.name}/{article.title}"  # another data set draws other examples
    others = [topic for topic in examples.by_class if topic != article.topic]
    if source.label_form == "label":
        ordered = sorted(others, key=lambda t: seeded_hash(seed, f"name {t}", key))
        names = [Negative(text, rule=OTHER_CLASS) for text in ordered[:num_negatives]]
        return _record(article, dataset, query, article.topic, names, article.topic)
    same = [text for text in examples.by_class.get(article.topic, ()) if text != query]
    if not same:
        return "only example of its topic"
    positive = same[seeded_hash(seed, "positive", key) % len(same)]
    texts = _other_examples(
        article.topic, key, others, seed, num_negatives, examples, {query, positive}
    )
    negatives = [Negative(text, rule=OTHER_CLASS) for text in texts]
    return _record(article, dataset, query, positive, negatives, article.topic)


def _other_examples(
    topic: str,
    key: str,
    others: Sequence[str],
    seed: int,
    num_negatives: int,
    examples: Examples,
    taken: set[str],
) -> list[str]:
    """Distinct examples of other classes, spread over as many classes as possible."""
    # A text of two classes (a description that both use) cannot be told apart: never a negative.
    own = set(examples.by_class.get(topic, ()))
    order = sorted(others, key=lambda other: seeded_hash(seed, f"class {other}", key))
    texts: list[str] = []
    tried = 0
    while order and len(texts) < num_negatives and tried < 10 * (num_negatives + len(order)):
        pool = examples.by_class[order[tried % len(order)]]
        text = pool[seeded_hash(seed, f"negative {tried}", key) % len(pool)]
        if text not in taken and text not in own:
            texts.append(text)
            taken = taken | {text}
        tried += 1
    return texts


def _record(
    article: Article,
    dataset: DatasetConfig,
    query: str,
    positive: str,
    negatives: Sequence[Negative] = (),
    label: str | None = None,
) -> Record | str:
    reason = reject_reason({"query": query, "positives": [positive]})
    if reason is not None:
        return reason
    return Record(
        id=f"{dataset.name}/{article.title}",
        query=query,
        positives=(positive,),
        negatives=tuple(n for n in negatives if has_content(n.text)),
        dataset=dataset.name,
        task=dataset.task,
        query_instruction=dataset.query_instruction,
        document_instruction=dataset.document_instruction,
        in_batch=dataset.in_batch_negatives,
        label=label,
    )


def _classified_text(article: Article, source: WikipediaSource) -> str | None:
    """Title-masked text to classify, as in the evaluation; None if it is too short."""
    whole = article.extract if source.text == "extract" else article.description
    text = mask_title(whole, article.title).strip()
    shortest = MIN_WORDS if source.text == "extract" else MIN_WORDS_OF_DESCRIPTION
    return text if len(text.split()) >= shortest else None


def _too_short(text: str) -> bool:
    return len(text.split()) < MIN_WORDS
