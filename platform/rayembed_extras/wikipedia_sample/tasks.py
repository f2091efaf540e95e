"""Sample texts, labels and relevance judgements of the held-out tasks from articles.

Plain data that `files` writes as own sets. All functions take the held-out articles only, in any
order, and give the same sample for the same articles, sizes and seed. Titles are masked out of
every text, because the title is what a reader would search for and what makes most of these tasks
trivial.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayembed.data.words import split_sentences
from rayembed.errors import DataError
from rayembed_extras.wikipedia_sample.articles import NO_TOPIC, Article, mask_title

WORDS_PER_TOKEN = 0.75
"""English words for one sub-word token: 1.35 tokens a word over the sample with SmolLM2's
vocabulary. Texts are cut by words, so that models with different vocabularies and BM25 read the
same text."""

MIN_WORDS = 5
"""Minimum words of a query or document; shorter ones are ambiguous."""

TRAIN_PER_TOPIC = 10
TEST_PER_TOPIC = 20
MIN_PER_TOPIC = 4
PAIRED_ARTICLES = 150
STS_ANCHORS = 60


@dataclass(frozen=True)
class RetrievalSample:
    """Documents, queries and the relevant documents of each query, by their ids."""

    documents: dict[str, str]
    queries: dict[str, str]
    relevant: dict[str, dict[str, int]]


Split = dict[str, list[str] | list[int] | list[float]]
"""Columns of equal length."""

Table = dict[str, Split]
"""Columns by split."""


def words_of_tokens(max_length: int) -> int:
    """Number of words to which a text of `max_length` tokens is cut, at least `MIN_WORDS`."""
    return max(MIN_WORDS, int(max_length * WORDS_PER_TOKEN))


def cut(text: str, max_words: int) -> str:
    """Shorten a text to its first `max_words` words, separated by single spaces."""
    return " ".join(text.split()[:max_words])


def shuffled(articles: Sequence[Article], seed: int, purpose: str) -> list[Article]:
    """Shuffle articles into an order that depends only on their titles, the seed and the
    purpose.
    """
    ordered = sorted(articles, key=lambda article: article.title)
    random.Random(f"{seed}:{purpose}").shuffle(ordered)
    return ordered


def corpus(articles: Sequence[Article], num_documents: int, seed: int) -> list[Article]:
    """Return the documents of the retrieval tasks, the same articles for all."""
    return shuffled(articles, seed, "corpus")[:num_documents]


def description_retrieval(
    articles: Sequence[Article], *, num_documents: int, num_queries: int, max_words: int, seed: int
) -> RetrievalSample:
    """Build a retrieval task: one-line descriptions as queries, title-masked articles as
    documents.

    A description that two documents share ("Family of birds") or that becomes empty when the
    title is masked is no query; its article stays a document.
    """
    documents = corpus(articles, num_documents, seed)
    texts = {_id(i): cut(masked_text(a), max_words) for i, a in enumerate(documents)}
    described = [_masked(a.description, a) for a in documents]
    usable = [i for i, text in enumerate(described) if text and described.count(text) == 1]
    chosen = _draw(usable, num_queries, seed, "description queries")
    return RetrievalSample(
        documents=texts,
        queries={f"q{i}": cut(described[i], max_words) for i in chosen},
        relevant={f"q{i}": {_id(i): 1} for i in chosen},
    )


def sentence_retrieval(
    articles: Sequence[Article], *, num_documents: int, num_queries: int, max_words: int, seed: int
) -> RetrievalSample:
    """Build a retrieval task: a sentence of an article as query, the rest of the article as
    relevant document.

    Articles that give no query (one sentence only, or more articles than queries) stand in the
    corpus with their whole title-masked text, which the description task shares.
    """
    documents = corpus(articles, num_documents, seed)
    splits: dict[int, tuple[str, str]] = {}
    for i, article in enumerate(documents):
        split = _sentence_and_rest(article, seed)
        if split is not None:
            splits[i] = split
    chosen = _draw(list(splits), num_queries, seed, "sentence queries")
    asked = set(chosen)
    texts = {
        _id(i): cut(splits[i][1] if i in asked else masked_text(article), max_words)
        for i, article in enumerate(documents)
    }
    return RetrievalSample(
        documents=texts,
        queries={f"q{i}": cut(splits[i][0], max_words) for i in chosen},
        relevant={f"q{i}": {_id(i): 1} for i in chosen},
    )


def cross_lingual_retrieval(
    articles: Sequence[Article],
    translations: Mapping[str, Sequence[Article]],
    *,
    num_documents: int,
    num_queries: int,
    max_words: int,
    seed: int,
) -> dict[str, RetrievalSample]:
    """Build a retrieval task: articles of another language as queries, articles of the same title
    as relevant documents.

    Both are title-masked. Articles that have a counterpart in a language come first into its
    corpus, others fill it up to `num_documents`: few titles are the same in two languages.

    Args:
        translations: by mteb's code of a language its articles, of which those count that have a
            title of `articles`.

    Raises:
        DataError: a language has no article that is long enough with a held-out title.
    """
    return {
        code: _from_language(code, articles, others, num_documents, num_queries, max_words, seed)
        for code, others in sorted(translations.items())
    }


def _from_language(
    code: str,
    articles: Sequence[Article],
    others: Sequence[Article],
    num_documents: int,
    num_queries: int,
    max_words: int,
    seed: int,
) -> RetrievalSample:
    asked = {other.title: cut(masked_text(other), max_words) for other in others}
    asked = {title: text for title, text in asked.items() if len(text.split()) >= MIN_WORDS}
    ordered = corpus(articles, len(articles), seed)
    # Stable, so that both parts stay in their order.
    documents = sorted(ordered, key=lambda article: article.title not in asked)[:num_documents]
    usable = [i for i, article in enumerate(documents) if article.title in asked]
    chosen = _draw(usable, num_queries, seed, f"queries in {code}")
    return RetrievalSample(
        documents={_id(i): cut(masked_text(a), max_words) for i, a in enumerate(documents)},
        queries={f"q{i}": asked[documents[i].title] for i in chosen},
        relevant={f"q{i}": {_id(i): 1} for i in chosen},
    )


def topic_classification(articles: Sequence[Article], *, max_words: int, seed: int) -> Table:
    """Splits `train` and `test` of title-masked texts with their topic.

    At most `TRAIN_PER_TOPIC` and `TEST_PER_TOPIC` articles a topic; with few articles half of a
    topic's are for training.
    """
    rows: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    for topic, members in _by_topic(articles, seed, "classification").items():
        num_train = min(TRAIN_PER_TOPIC, len(members) // 2)
        for k, article in enumerate(members[: num_train + TEST_PER_TOPIC]):
            split = "train" if k < num_train else "test"
            rows[split].append((cut(masked_text(article), max_words), topic))
    return {
        split: {"text": [text for text, _ in pairs], "label": [topic for _, topic in pairs]}
        for split, pairs in rows.items()
    }


def topic_clustering(articles: Sequence[Article], *, max_words: int, seed: int) -> Table:
    """Split `test` of title-masked texts with their topic, `TEST_PER_TOPIC` texts for each
    topic.
    """
    rows = [
        (cut(masked_text(article), max_words), topic)
        for topic, members in _by_topic(articles, seed, "clustering").items()
        for article in members[:TEST_PER_TOPIC]
    ]
    return {"test": {"text": [text for text, _ in rows], "label": [topic for _, topic in rows]}}


def title_description_pairs(articles: Sequence[Article], *, max_words: int, seed: int) -> Table:
    """Split `test` of title and description: one true pair and one wrong pair for each article.

    The wrong description is that of another article of the same topic, so that telling topics
    apart is not enough. At most `PAIRED_ARTICLES` articles.
    """
    pairs: list[tuple[str, str, int]] = []
    groups = _by_topic([a for a in articles if a.description], seed, "pairs")
    per_topic = -(-PAIRED_ARTICLES // len(groups))
    for members in groups.values():
        for k, article in enumerate(members[:per_topic]):
            true = cut(article.description, max_words)
            following = [*members[k + 1 :], *members[:k]]
            wrong = next(
                (o.description for o in following if o.description != article.description), None
            )
            if wrong is not None:
                pairs.append((article.title, true, 1))
                pairs.append((article.title, cut(wrong, max_words), 0))
    if not pairs:
        raise DataError(
            "no topic of the held-out articles has two different descriptions; hold out more"
        )
    return {
        "test": {
            "sentence1": [title for title, _, _ in pairs],
            "sentence2": [text for _, text, _ in pairs],
            "label": [label for _, _, label in pairs],
        }
    }


def relatedness_pairs(articles: Sequence[Article], *, max_words: int, seed: int) -> Table:
    """Split `test` of text pairs, graded by the articles that the texts come from.

    Grades: 3 both halves of one article; 2 halves of two articles of one topic whose descriptions
    share a content word ("Capital of Chile", "Capital of Peru"); 1 halves of two articles of one
    topic without such a word; 0 halves of articles of different topics without such a word. At
    most `STS_ANCHORS` first halves, each in one pair of every grade that the articles offer.
    """
    groups = _by_topic([a for a in articles if _halves(a)], seed, "relatedness")
    ordered = shuffled([a for members in groups.values() for a in members], seed, "anchors")
    pairs: list[tuple[str, str, float]] = []
    for k, anchor in enumerate(ordered[:STS_ANCHORS]):
        following = [*ordered[k + 1 :], *ordered[:k]]
        partners: dict[float, Article] = {3.0: anchor}
        for other in following:
            shared = bool(_content_words(anchor) & _content_words(other))
            if anchor.topic == other.topic:
                partners.setdefault(2.0 if shared else 1.0, other)
            elif not shared:
                partners.setdefault(0.0, other)
        first = _half_texts(anchor)[0]
        for grade, other in sorted(partners.items()):
            pairs.append((cut(first, max_words), cut(_half_texts(other)[1], max_words), grade))
    return {
        "test": {
            "sentence1": [a for a, _, _ in pairs],
            "sentence2": [b for _, b, _ in pairs],
            "score": [grade for _, _, grade in pairs],
        }
    }


def masked_text(article: Article) -> str:
    """Return the article's text with its title masked."""
    return _masked(article.extract, article)


def _masked(text: str, article: Article) -> str:
    return mask_title(text, article.title).strip()


def _id(index: int) -> str:
    return f"d{index}"


def _draw(usable: list[int], count: int, seed: int, purpose: str) -> list[int]:
    if not usable:
        raise DataError(f"no held-out article yields {purpose}; hold out more articles")
    shuffled_indices = sorted(usable)
    random.Random(f"{seed}:{purpose}").shuffle(shuffled_indices)
    return sorted(shuffled_indices[:count])


def _sentence_and_rest(article: Article, seed: int) -> tuple[str, str] | None:
    """A sentence of the article and the others, both title-masked; None if it has
    fewer than two.
    """
    sentences = [_masked(sentence, article) for sentence in split_sentences(article.extract)]
    long_enough = [i for i, text in enumerate(sentences) if len(text.split()) >= MIN_WORDS]
    random.Random(f"{seed}:{article.title}").shuffle(long_enough)
    for i in long_enough:
        rest = " ".join([*sentences[:i], *sentences[i + 1 :]])
        if len(rest.split()) >= MIN_WORDS:
            return sentences[i], rest
    return None


def _by_topic(articles: Sequence[Article], seed: int, purpose: str) -> dict[str, list[Article]]:
    groups: dict[str, list[Article]] = {}
    for article in shuffled(articles, seed, purpose):
        if article.topic and article.topic != NO_TOPIC:
            groups.setdefault(article.topic, []).append(article)
    large = {name: groups[name] for name in sorted(groups) if len(groups[name]) >= MIN_PER_TOPIC}
    if len(large) < 2:
        raise DataError(
            f"{purpose}: the {len(articles)} held-out articles have {len(large)} topics with at "
            f"least {MIN_PER_TOPIC} articles, but 2 such topics are needed; hold out more articles"
        )
    return large


def _half_texts(article: Article) -> tuple[str, str]:
    sentences = split_sentences(article.extract)
    middle = (len(sentences) + 1) // 2
    first, second = " ".join(sentences[:middle]), " ".join(sentences[middle:])
    return _masked(first, article), _masked(second, article)


def _halves(article: Article) -> bool:
    return all(len(text.split()) >= MIN_WORDS for text in _half_texts(article))


_FUNCTION_WORDS = frozenset(
    ("a", "an", "and", "as", "at", "by", "for", "from", "in", "into", "of", "on", "or", "the")
)


def _content_words(article: Article) -> frozenset[str]:
    words = "".join(c if c.isalnum() else " " for c in article.description.lower()).split()
    return frozenset(word for word in words if word not in _FUNCTION_WORDS and not word.isdigit())
