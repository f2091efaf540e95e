"""Make training rows from the sample's articles: descriptions, sentences, translations, topics,
texts.

Pure functions of articles and a seed: an article's row is independent of the order of articles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rayembed.data.hashes import seeded_hash
from rayembed.data.records import reject_reason
from rayembed.data.words import split_sentences
from rayembed.recipes.sample import RowKind
from rayembed_extras.wikipedia_sample.articles import NO_TOPIC, Article, HeldOutTitles, mask_title

MIN_WORDS = 5
"""Minimum number of words of a text; shorter ones are too unspecific. The tasks have the same."""

MIN_WORDS_OF_DESCRIPTION = 2

Row = dict[str, str]


@dataclass(frozen=True)
class Rejected:
    """Reason why an article gives no row."""

    reason: str


def training_rows(
    kind: RowKind,
    articles: Sequence[Article],
    held_out: HeldOutTitles,
    seed: int,
    translations: Mapping[str, Article],
) -> Iterator[Row]:
    """Yield rows of all articles allowed in training, in the order of the articles.

    Args:
        held_out: titles that give no row, and texts that no row may hold.
        translations: articles of another language by title, for translations.
    """
    for article in articles:
        if article.title not in held_out.titles:
            row = row_of(kind, article, seed, translations.get(article.title))
            if isinstance(row, dict) and held_out.texts.isdisjoint(
                text.strip() for name, text in row.items() if name not in ("id", "label")
            ):
                yield row


def row_of(
    kind: RowKind, article: Article, seed: int, other: Article | None = None
) -> Row | Rejected:
    """Return the row of an article, named by its title, or the reason why the article gives
    none.

    Args:
        other: the article of the same title in another language, for a translation.
    """
    match kind:
        case "texts":
            return {"id": article.title, "text": article.extract}
        case "topics":
            return _topic_row(article)
        case "description":
            pair = description_pair(article)
        case "sentence":
            pair = sentence_pair(article, seed)
        case "translation":
            pair = translation_pair(article, other)
    if isinstance(pair, Rejected):
        return pair
    query, positive = pair
    reason = reject_reason({"query": query, "positives": [positive]})
    if reason is not None:
        return Rejected(reason)
    return {"id": article.title, "query": query, "positive": positive}


def _topic_row(article: Article) -> Row | Rejected:
    text = mask_title(article.extract, article.title).strip()
    if article.topic == NO_TOPIC:
        return Rejected("no topic")
    if _too_short(text):
        return Rejected("text is too short")
    return {"id": article.title, "text": text, "label": article.topic}


def description_pair(article: Article) -> tuple[str, str] | Rejected:
    """Pair an article's description with its title-masked text, or return the reason for
    rejection.
    """
    query = mask_title(article.description, article.title).strip()
    positive = mask_title(article.extract, article.title).strip()
    if not article.description.strip():
        return Rejected("no description")
    if len(query.split()) < MIN_WORDS_OF_DESCRIPTION:
        return Rejected("description is too short")
    if _too_short(positive):
        return Rejected("text is too short")
    return query, positive


def translation_pair(article: Article, other: Article | None) -> tuple[str, str] | Rejected:
    """Pair title-masked texts of an article in two languages, or return the reason for
    rejection.

    Args:
        other: the article of the same title in the other language; None: there is none. Most such
            titles are names of people and places, so that they mean the same.
    """
    if other is None:
        return Rejected("no article of this title in the other language")
    first, second = (mask_title(a.extract, a.title).strip() for a in (article, other))
    if _too_short(first) or _too_short(second):
        return Rejected("text is too short")
    return first, second


def sentence_pair(article: Article, seed: int) -> tuple[str, str] | Rejected:
    """Pair a sentence with the rest of its article, both title-masked, or return the reason for
    rejection.

    The sentence is the one with the smallest hash among those of sufficient length that leave a
    rest of sufficient length; if it occurs twice, the rest lacks both.
    """
    sentences = [mask_title(text, article.title) for text in split_sentences(article.extract)]
    if len(sentences) < 2:
        return Rejected("fewer than two sentences")
    places = sorted(
        range(len(sentences)), key=lambda i: seeded_hash(seed, f"sentence {i}", article.title)
    )
    for place in places:
        query = sentences[place]
        rest = " ".join(text for text in sentences if text != query)
        if not _too_short(query) and not _too_short(rest):
            return query, rest
    return Rejected("no sentence that is long enough and leaves a rest")


def _too_short(text: str) -> bool:
    return len(text.split()) < MIN_WORDS
