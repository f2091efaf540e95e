"""What the held-out tasks are made of."""

import json
import random

import pytest

from rayembed.errors import DataError
from rayembed.evaluation.own_set import OwnTask
from rayembed.recipes.sample import TASK_NAMES, ScoreSizes, own_sets
from rayembed_extras.wikipedia_sample import tasks as samples
from rayembed_extras.wikipedia_sample.articles import Article

SIZES = {"num_documents": 40, "num_queries": 30, "max_words": 60}


def articles(count=48, topics=4):
    """Articles whose sentences all carry the article's own word `own<number>`."""
    made = []
    for i in range(count):
        sentences = [
            f"The sentence number {k} speaks of own{i} in this place near Title{i} Town."
            for k in range(3)
        ]
        made.append(
            Article(
                title=f"Title{i} Town",
                extract=" ".join(sentences),
                description=f"Kind{i % 8} of own{i} thing",
                topic=f"Topic{i % topics}",
            )
        )
    return made


def test_sentence_and_rest_are_all_of_the_article():
    made = articles()
    sample = samples.sentence_retrieval(made, **SIZES, seed=3)
    assert len(sample.documents) == 40
    assert len(sample.queries) == len(sample.relevant) == 30
    for query, found in sample.relevant.items():
        ((document, grade),) = found.items()
        assert grade == 1
        assert sample.queries[query] not in sample.documents[document]
        number = next(w for w in sample.queries[query].split() if w.startswith("own"))
        together = sample.queries[query] + " " + sample.documents[document]
        assert together.split().count(number) == 3
        assert sorted(int(w) for w in together.split() if w.isdigit()) == [0, 1, 2]
    asked = {document for found in sample.relevant.values() for document in found}
    whole = samples.description_retrieval(made, **SIZES, seed=3).documents
    for document, text in sample.documents.items():
        assert (text == whole[document]) == (document not in asked)


def test_titles_are_masked_out_of_retrieval_texts():
    made = articles()
    for build in (samples.sentence_retrieval, samples.description_retrieval):
        sample = build(made, **SIZES, seed=0)
        for text in [*sample.documents.values(), *sample.queries.values()]:
            assert "Title" not in text
    assert "Title" in made[0].extract


def test_a_description_that_two_documents_share_is_no_query():
    made = articles(12)
    twins = [
        Article(a.title, a.extract, "Family of birds" if i < 2 else a.description, a.topic)
        for i, a in enumerate(made)
    ]
    sample = samples.description_retrieval(
        twins, num_documents=12, num_queries=12, max_words=60, seed=0
    )
    assert len(sample.documents) == 12
    assert len(sample.queries) == 10
    assert "Family of birds" not in sample.queries.values()


def test_texts_are_cut_by_words():
    sample = samples.sentence_retrieval(
        articles(), num_documents=40, num_queries=30, max_words=7, seed=0
    )
    assert {len(text.split()) for text in sample.documents.values()} == {7}
    assert samples.words_of_tokens(128) == 96
    assert samples.words_of_tokens(1) == samples.MIN_WORDS


def test_classes_have_disjoint_train_and_test_articles():
    sample = samples.topic_classification(articles(), max_words=60, seed=0)
    train, test = sample["train"], sample["test"]
    assert [train["label"].count(f"Topic{label}") for label in range(4)] == [6, 6, 6, 6]
    assert [test["label"].count(f"Topic{label}") for label in range(4)] == [6, 6, 6, 6]
    assert not set(train["text"]) & set(test["text"])
    for text, label in zip(test["text"], test["label"], strict=True):
        number = int(next(w for w in text.split() if w.startswith("own"))[3:])
        assert f"Topic{number % 4}" == label


def test_articles_without_topic_are_no_class():
    made = articles()
    extra = [
        Article(f"x{i}", a.extract, a.description, "Uncategorized") for i, a in enumerate(made[:20])
    ]
    sample = samples.topic_clustering([*made, *extra], max_words=60, seed=0)
    assert set(sample["test"]["label"]) == {"Topic0", "Topic1", "Topic2", "Topic3"}


def test_wrong_descriptions_come_from_the_same_topic():
    sample = samples.title_description_pairs(articles(), max_words=60, seed=0)["test"]
    assert sample["label"].count(1) == sample["label"].count(0) == 48
    for title, text, label in zip(
        sample["sentence1"], sample["sentence2"], sample["label"], strict=True
    ):
        of_title = int(title.split()[0].removeprefix("Title"))
        of_text = int(text.split()[2].removeprefix("own"))
        assert (of_title == of_text) == (label == 1)
        assert of_title % 4 == of_text % 4


def test_grades_follow_from_where_texts_come_from():
    plain = [Article(a.title, a.extract, f"Kind{i % 8}", a.topic) for i, a in enumerate(articles())]
    sample = samples.relatedness_pairs(plain, max_words=60, seed=0)["test"]
    assert [sample["score"].count(grade) for grade in (0.0, 1.0, 2.0, 3.0)] == [48, 48, 48, 48]

    def number(text):
        return int(next(w for w in text.split() if w.startswith("own"))[3:])

    for a, b, grade in zip(sample["sentence1"], sample["sentence2"], sample["score"], strict=True):
        i, j = number(a), number(b)
        expected = 3 if i == j else 2 if i % 8 == j % 8 else 1 if i % 4 == j % 4 else 0
        assert grade == expected
        assert a != b


def sets(path, source, **changed):
    """Tasks over all of the articles, which are written in their order."""
    path.write_text(json.dumps([vars(article) for article in source]))
    sizes = {"held_out": 48, "documents": 40, "queries": 30, "max_length": 64, "seed": 0, **changed}
    return [OwnTask(own).load() for own in own_sets(ScoreSizes(source=str(path), **sizes))]


def test_samples_depend_on_content_sizes_and_seed_and_on_nothing_else(tmp_path):
    made = articles()
    shuffled = random.Random(1).sample(made, len(made))

    def revisions(source, **changed):
        path = tmp_path / "articles.json"
        return [task.metadata.dataset["revision"] for task in sets(path, source, **changed)]

    first = revisions(made)
    assert first == revisions(shuffled)
    assert len(set(first)) == len(TASK_NAMES) == 6
    assert not set(first) & set(revisions(made, seed=1))
    shorter = revisions(made, max_length=12)
    # titles and descriptions are shorter than any cut
    assert [a == b for a, b in zip(first, shorter, strict=True)] == [False] * 4 + [True, False]
    fewer = revisions(made, queries=20)
    assert [a == b for a, b in zip(first, fewer, strict=True)] == [False, False] + [True] * 4


def test_objects_are_fresh(tmp_path):
    first, second = (sets(tmp_path / "articles.json", articles()) for _ in range(2))
    assert tuple(task.metadata.name for task in first) == TASK_NAMES
    for one, other in zip(first, second, strict=True):
        assert one is not other
        one.load_data()
        assert one.data_loaded
        assert not other.data_loaded


def test_too_few_articles_are_named():
    with pytest.raises(DataError, match=r"topics with at least 4 articles.*hold out more"):
        samples.topic_classification(articles(6), max_words=60, seed=0)
    single = [Article(f"t{i}", "One short text only.", "", "A") for i in range(5)]
    with pytest.raises(DataError, match="sentence queries"):
        samples.sentence_retrieval(single, num_documents=5, num_queries=5, max_words=9, seed=0)
