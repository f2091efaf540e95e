"""Wikipedia summaries: masked titles, sentences, the held-out split, records."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayembed.config.data import DatasetConfig
from rayembed.config.sources import WikipediaSource
from rayembed.data.artifacts import PipelineContext
from rayembed.data.parts import read_records
from rayembed.data.records import Record
from rayembed.data.sources.convert import check_source, make_records
from rayembed.data.sources.tasks import (
    HELD_OUT_TEXT,
    HELD_OUT_TITLE,
    ArticleRange,
    ConvertArticles,
    HeldOut,
    hold_out,
)
from rayembed.data.sources.wikipedia import (
    NO_TOPIC,
    Article,
    held_out_texts,
    held_out_titles,
    mask_title,
    read_articles,
    split_sentences,
)
from rayembed.data.sources.wikipedia_records import (
    convert,
    description_pair,
    examples_of,
    sentence_pair,
)
from rayembed.errors import DataError

TOPICS = ("Arts", "Geography", "Mathematics", NO_TOPIC)


def made_up_articles(count: int = 80) -> list[Article]:
    return [
        Article(
            f"Thing {i:02d}",
            f"Thing {i:02d} is the first subject of number {i}. It has {i} parts of some size. "
            f"Nobody knows where number {i} was found.",
            "Kind of thing" if i % 10 == 0 else f"Thing that is called {i}",
            TOPICS[i % 4],
        )
        for i in range(count)
    ]


def dataset(pairs: str, **source: Any) -> DatasetConfig:
    return DatasetConfig(
        name=f"wiki-{pairs}",
        source=WikipediaSource(path="articles.json", pairs=pairs, **{"num_negatives": 4, **source}),
        query_instruction="Find it",
        in_batch_negatives=pairs != "topic",
    )


@pytest.mark.parametrize(
    ("title", "text", "expected"),
    [
        (
            "Cat",
            "The cat is a CAT; cats and concatenation.",
            "The it is a it; it and concatenation.",
        ),
        (
            "Friedrich Nietzsche",
            "Friedrich Wilhelm Nietzsche was German. Nietzsche's work is his.",
            "it Wilhelm it was German. it's work is his.",
        ),
        ("Fela Kuti", "Fela Aníkúlápó Kútì was Nigerian.", "it Aníkúlápó it was Nigerian."),
        (
            "Dune (novel)",
            "Dune is a 1965 novel. A dune is sand.",
            "it is a 1965 novel. A it is sand.",
        ),
        ("Austin, Texas", "Austin is in the state of Texas.", "it is in the state of it."),
        ("Turkish language", "Turkish is a language.", "it is a language."),
        (
            "History of the world",
            "The history of the  World is long; history is not.",
            "The it is long; history is not.",
        ),
        ("World War II", "World War II was a war after World War I.", "it was a war after it I."),
        ("C++", "C++ is not C.", "it is not C."),
        ("The Who", "The Who is a band. The band plays.", "it is a band. The band plays."),
    ],
)
def test_mask_title(title: str, text: str, expected: str) -> None:
    assert mask_title(text, title) == expected


def test_split_sentences() -> None:
    text = (
        'J. S. Bach wrote it c. 1720. He died! Did he? "Yes." The U.S. Congress met St. John.\n'
        "A new line without end\n\nWorld War I. Then peace of 3.5 years.[1] It is No. 5 etc."
    )
    assert split_sentences(text) == [
        "J. S. Bach wrote it c. 1720.",
        "He died!",
        "Did he?",
        '"Yes."',
        "The U.S. Congress met St. John.",
        "A new line without end",
        "World War I.",
        "Then peace of 3.5 years.[1]",
        "It is No. 5 etc.",
    ]
    assert split_sentences("  \n ") == []


def test_read_articles_tells_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    articles = made_up_articles(3)
    path.write_text(json.dumps({a.title: vars(a) for a in articles}))
    assert read_articles(path) == articles
    path.write_text(json.dumps([vars(articles[0]), {"title": "x"}]))
    with pytest.raises(DataError, match=r"entry 1 of .*is no article"):
        read_articles(path)
    path.write_text("[1, ")
    with pytest.raises(DataError, match="cannot read the Wikipedia summaries"):
        read_articles(path)
    path.write_text("{}")
    with pytest.raises(DataError, match="holds no articles"):
        read_articles(path)


def test_held_out_titles_depend_on_seed_and_title_only() -> None:
    articles = made_up_articles()
    titles = held_out_titles(articles, 20, 0)
    assert len(titles) == 20
    assert held_out_titles(articles[::-1], 20, 0) == titles
    assert held_out_titles(articles, 20, 1) != titles
    assert held_out_titles(articles, 10, 0) < titles
    # More articles push out few titles: each of the 10 new ones at most one.
    grown = held_out_titles(
        [*articles, *(replace(a, title=f"New {a.title}") for a in articles[:10])], 20, 0
    )
    assert len(titles - grown) <= 10


def test_description_and_sentence_pairs() -> None:
    article = Article(
        "Cat",
        "The cat is a small animal here. It hunts mice in every old barn.",
        "Small animal",
        "x",
    )
    assert description_pair(article) == (
        "Small animal",
        "The it is a small animal here. It hunts mice in every old barn.",
    )
    sentences = ["The it is a small animal here.", "It hunts mice in every old barn."]
    query, rest = sentence_pair(article, 0)
    assert sorted([query, rest]) == sorted(sentences)
    both = {sentence_pair(replace(article, title=f"Cat{'s' * n}"), 0)[0] for n in range(20)}
    assert len(both) > 1, "which sentence is the query depends on the title's hash"
    assert description_pair(replace(article, description=" ")) == "no description"
    assert description_pair(replace(article, description="Cat")) == "description is too short"
    assert description_pair(replace(article, extract="A cat.")) == "text is too short"
    assert sentence_pair(replace(article, extract="Only one sentence is there."), 0) == (
        "fewer than two sentences"
    )
    assert sentence_pair(replace(article, extract="One. Two. Three."), 0).startswith("no sentence")
    repeated = "The same words are said twice. " * 2 + "Another one follows after it."
    query, rest = sentence_pair(replace(article, extract=repeated), 0)
    assert query not in rest


def test_texts_without_a_visible_character_are_no_records() -> None:
    marks = " ".join(["\u0301\u200b"] * 6)
    article = Article("Cat", "The cat is a small animal here.", "Small animal", "x")
    config = dataset("description")
    assert isinstance(convert(article, config, 0), Record)
    without = replace(article, description=marks)
    assert convert(without, config, 0) == "query has no visible character"
    without = replace(article, extract=marks)
    assert convert(without, config, 0) == "positive has no visible character"


def test_topic_records_take_other_examples_of_the_class() -> None:
    articles = made_up_articles()
    config = dataset("topic")
    examples = examples_of(articles, config.source, frozenset())
    assert sorted(examples.by_class) == ["Arts", "Geography", "Mathematics"]
    topic_of = {mask_title(a.extract, a.title): a.topic for a in articles}
    positives = set()
    for article in articles:
        made = convert(article, config, 0, examples)
        if article.topic == NO_TOPIC:
            assert made == "no topic"
            continue
        assert isinstance(made, Record)
        assert made.label == article.topic
        assert not made.in_batch
        assert topic_of[made.positives[0]] == article.topic
        assert made.positives[0] != made.query
        assert len(made.negatives) == 4
        assert len({n.text for n in made.negatives}) == 4
        assert {topic_of[n.text] for n in made.negatives} == set(examples.by_class) - {
            article.topic
        }
        assert {n.rule for n in made.negatives} == {"other_class"}
        positives.add(made.positives[0])
        assert made == convert(article, config, 0, examples)
    assert len(positives) > 20, "drawn by hash, not always the first"
    other = convert(articles[0], config.model_copy(update={"name": "second"}), 0, examples)
    first = convert(articles[0], config, 0, examples)
    assert other.positives != first.positives or other.negatives != first.negatives
    alone = examples_of(articles[:1], config.source, frozenset())
    assert convert(articles[0], config, 0, alone) == "only example of its topic"


def test_topic_records_with_names_of_classes() -> None:
    articles = made_up_articles()
    config = dataset("topic", label_form="label")
    made = convert(articles[0], config, 0, examples_of(articles, config.source, frozenset()))
    assert made.positives == ("Arts",)
    assert sorted(n.text for n in made.negatives) == ["Geography", "Mathematics"]


def all_texts(record: Record) -> list[str]:
    return [record.query, *record.positives, *(n.text for n in record.negatives)]


def test_held_out_texts_are_all_that_is_shown() -> None:
    cat = Article("Cat", "A cat purrs. It sleeps a lot. A cat hunts.", "Small animal", "History")
    history = Article("History", "The past.", "Field", "History")
    kept = Article("Dog", "A dog barks.", "Larger animal", "Nature")
    assert held_out_texts(iter([cat, history, kept]), frozenset(["Cat", "History"])) == {
        *("Cat", "Small animal", "Field", "The past."),  # not "History", the name of a class
        *("A cat purrs. It sleeps a lot. A cat hunts.", "A it purrs. It sleeps a lot. A it hunts."),
        *("A cat purrs.", "It sleeps a lot.", "A cat hunts.", "A it purrs.", "A it hunts."),
        *("It sleeps a lot. A cat hunts.", "It sleeps a lot. A it hunts."),  # without the first
        *("A cat purrs. A cat hunts.", "A it purrs. A it hunts."),
        *("A cat purrs. It sleeps a lot.", "A it purrs. It sleeps a lot."),  # also the first half
    }


@pytest.mark.parametrize("pairs", ["description", "sentence", "topic"])
def test_no_row_touches_a_held_out_title(pairs: str, tmp_path: Path) -> None:
    articles = made_up_articles()
    path = tmp_path / "articles.json"
    path.write_text(json.dumps([vars(a) for a in articles]))
    held_out = hold_out([articles], 20, 0)
    # Every third word of "number {i}" and "called {i}" names the article a text comes from.
    marks = {f"number {int(title[-2:])}." for title in held_out.titles}
    marks |= {f"number {int(title[-2:])} " for title in held_out.titles}
    held_descriptions = {a.description for a in articles if a.title in held_out.titles}

    def rows(held: HeldOut) -> tuple[list[Record], dict]:
        task = ConvertArticles(str(tmp_path / "out"), str(path), "content", dataset(pairs), 0, held)
        result = task(ArticleRange(0, len(articles)))
        assert result["rows_in"] == 80 == result["rows_out"] + sum(result["rejected"].values())
        return read_records(str(tmp_path / "out" / result["parts"][0][0])), result["rejected"]

    def touched(records: list[Record]) -> int:
        return sum(
            any(m in f"{text} " for m in marks) or text in held_descriptions
            for record in records
            for text in all_texts(record)
        )

    kept, rejected = rows(held_out)
    assert touched(kept) == 0
    assert rejected[HELD_OUT_TITLE] == 20
    assert not {r.id.split("/")[1] for r in kept} & held_out.titles
    if pairs == "description":  # "Kind of thing" is the description of a held-out article too
        assert rejected[HELD_OUT_TEXT] > 0
    # Control: without the split, held-out texts stand in the rows.
    assert touched(rows(HeldOut())[0]) > 0
    if pairs == "topic":  # control: leaving out the rows alone lets examples in
        source = dataset(pairs).source
        leaky = examples_of(articles, source, frozenset())
        made = [
            convert(a, dataset(pairs), 0, leaky) for a in articles if a.title not in held_out.titles
        ]
        assert touched([m for m in made if isinstance(m, Record)]) > 0


def test_a_process_reads_a_file_again_whose_content_is_another(tmp_path: Path) -> None:
    path = tmp_path / "articles.json"
    pipeline_context = PipelineContext(str(tmp_path / "out"), 0)

    def records(articles: list[Article]) -> list[Record]:
        path.write_text(json.dumps([vars(a) for a in articles]))
        checked = check_source(dataset("description"), str(tmp_path))
        made = make_records(pipeline_context, checked, HeldOut())
        return [r for part in made.parts for r in read_records(part.path)]

    articles = made_up_articles(20)
    first = records(articles)
    changed = [replace(a, description=f"Another {a.description}") for a in articles]
    second = records(changed)
    assert len(second) == len(first) > 0
    assert not any("Another" in text for record in first for text in all_texts(record))
    assert all(any("Another" in text for text in all_texts(record)) for record in second)


def test_translations_pair_the_articles_of_one_title(tmp_path):
    english = made_up_articles(12)
    french = [
        replace(a, extract=f"{a.title} est le premier sujet, et il a {i} parties.")
        for i, a in enumerate(english[4:])
    ]
    for name, articles in (("articles.json", english), ("fr.json", french)):
        (tmp_path / name).write_text(json.dumps([vars(a) for a in articles]))
    chosen = dataset("translation", translations="fr.json")
    checked = check_source(chosen, str(tmp_path))
    held_out = hold_out([english, french], 2, seed=0)
    made = make_records(PipelineContext(str(tmp_path / "out"), 0), checked, held_out)
    found = [r for part in made.parts for r in read_records(part.path)]
    records = {r.query: r.positives[0] for r in found}
    common = [a for a in english[4:] if a.title not in held_out.titles]
    assert len(records) == len(common)
    for a, b in ((a, b) for a, b in zip(english[4:], french, strict=True) if a in common):
        assert records[mask_title(a.extract, a.title)] == mask_title(b.extract, b.title)
    # Another content of the second file is another data set.
    (tmp_path / "fr.json").write_text(json.dumps([vars(a) for a in french[:-1]]))
    assert check_source(chosen, str(tmp_path)).content != checked.content
    with pytest.raises(ValueError, match="go together"):
        dataset("translation")
    with pytest.raises(ValueError, match="go together"):
        dataset("sentence", translations="fr.json")
