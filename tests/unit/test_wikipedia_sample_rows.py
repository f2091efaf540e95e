"""Rows of the Wikipedia sample: masked titles, sentences, the held-out split, files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from garbling import damaged
from made_up_articles import wikipedia_over

from rayembed.assets.reading import open_source
from rayembed.assets.resolver import resolve
from rayembed.data.sources.files import list_pieces
from rayembed.data.words import split_sentences
from rayembed.errors import AssetError, DataError
from rayembed.recipes.sample import RowFile, Wikipedia, row_reference
from rayembed_extras.wikipedia_sample.articles import (
    NO_TOPIC,
    Article,
    held_out_texts,
    held_out_titles,
    hold_out,
    mask_title,
    read_articles,
)
from rayembed_extras.wikipedia_sample.references import parse_reference
from rayembed_extras.wikipedia_sample.rows import Rejected, description_pair, row_of, sentence_pair

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


def rows_of(reference: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in resolve(reference).read_text().splitlines()]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))


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
    with pytest.raises(DataError, match=r"entry 1 of .*is not an article"):
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
    assert description_pair(replace(article, description=" ")) == Rejected("no description")
    assert description_pair(replace(article, description="Cat")) == Rejected(
        "description is too short"
    )
    assert description_pair(replace(article, extract="A cat.")) == Rejected("text is too short")
    assert sentence_pair(replace(article, extract="Only one sentence is there."), 0) == Rejected(
        "fewer than two sentences"
    )
    none = sentence_pair(replace(article, extract="One. Two. Three."), 0)
    assert isinstance(none, Rejected)
    assert none.reason.startswith("no sentence")
    repeated = "The same words are said twice. " * 2 + "Another one follows after it."
    query, rest = sentence_pair(replace(article, extract=repeated), 0)
    assert query not in rest


def test_texts_without_a_visible_character_are_no_rows() -> None:
    marks = " ".join(["\u0301\u200b"] * 6)
    article = Article("Cat", "The cat is a small animal here.", "Small animal", "x")
    assert row_of("description", article, 0) == {
        "id": "Cat",
        "query": "Small animal",
        "positive": "The it is a small animal here.",
    }
    without = replace(article, description=marks)
    assert row_of("description", without, 0) == Rejected("query has no visible character")
    without = replace(article, extract=marks)
    assert row_of("description", without, 0) == Rejected("positive has no visible character")


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


@pytest.mark.parametrize("kind", ["description", "sentence", "topics"])
def test_no_row_touches_a_held_out_title(kind: str, tmp_path: Path) -> None:
    articles = made_up_articles()
    path = tmp_path / "articles.json"
    path.write_text(json.dumps([vars(a) for a in articles]))
    held_out = hold_out([articles], 20, 0)
    # Every third word of "number {i}" and "called {i}" names the article a text comes from.
    marks = {f"number {int(title[-2:])}." for title in held_out.titles}
    marks |= {f"number {int(title[-2:])} " for title in held_out.titles}
    held_descriptions = {a.description for a in articles if a.title in held_out.titles}

    def rows(held: int) -> list[dict[str, Any]]:
        part = RowFile(kind=kind, source=str(path), held_out=held)  # type: ignore[arg-type]
        return rows_of(row_reference(part))

    def touched(rows: list[dict[str, Any]]) -> int:
        return sum(
            any(m in f"{text} " for m in marks) or text in held_descriptions
            for row in rows
            for text in row.values()
        )

    kept = rows(20)
    assert touched(kept) == 0
    assert not {row["id"] for row in kept} & held_out.titles
    usable = [a for a in articles if isinstance(row_of(kind, a, 0), dict)]  # type: ignore[arg-type]
    free = [a for a in usable if a.title not in held_out.titles]
    if kind == "description":  # "Kind of thing" is the description of a held-out article too
        assert len(kept) < len(free)
    else:
        assert [row["id"] for row in kept] == [a.title for a in free]
    # Control: without the split, held-out texts stand in the rows.
    assert touched(rows(0)) > 0


def test_titles_of_every_language_that_is_trained_on_are_held_out(tmp_path: Path) -> None:
    english = made_up_articles(40)
    french = [replace(a, extract=f"{a.title} est un sujet {i}.") for i, a in enumerate(english)]
    for name, articles in (("en-us", english), ("fr-fr", french)):
        content = [vars(a) for a in articles[:: -1 if name == "fr-fr" else 1]]
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    grown = [replace(a, title=f"French {a.title}") for a in french[:20]]
    content = [vars(a) for a in (*french, *grown)]
    (tmp_path / "fr-fr.json").write_text(json.dumps(content))
    source = tmp_path / "{language}.json"
    alone = wikipedia_over(source, held_out=10).pairs("sentence").path
    both = wikipedia_over(source, held_out=10, languages=("en", "fr")).pairs("sentence").path
    told = hold_out([english, [*french, *grown]], 10, 0).titles
    assert {row["id"] for row in rows_of(both)}.isdisjoint(told)
    only = {row["id"] for row in rows_of(alone)} - {row["id"] for row in rows_of(both)}
    assert only == held_out_titles([*french, *grown], 10, 0) & {row["id"] for row in rows_of(alone)}


def test_files_are_the_same_bytes_and_made_again_of_other_summaries(tmp_path: Path) -> None:
    path = tmp_path / "articles.json"
    path.write_text(json.dumps([vars(a) for a in made_up_articles()]))
    reference = wikipedia_over(path, held_out=20).pairs("sentence").path
    first = resolve(reference)
    assert resolve(reference, cache=tmp_path / "other").read_bytes() == first.read_bytes()
    assert resolve(reference) == first
    whole = first.read_bytes()
    first.write_bytes(damaged(whole, "flip", "a row"))
    assert first.read_bytes() != whole
    assert resolve(reference).read_bytes() == whole, "a flipped bit is not trained on"
    path.write_text(json.dumps([vars(a) for a in made_up_articles(60)]))
    assert resolve(reference) != first
    assert 0 < len(rows_of(reference)) < len(first.read_text().splitlines())


def test_pieces_keep_the_reference_that_every_node_resolves(tmp_path: Path) -> None:
    path = tmp_path / "articles.json"
    path.write_text(json.dumps([vars(a) for a in made_up_articles()]))
    source = wikipedia_over(path, held_out=20).pairs("sentence")
    (piece,) = list_pieces(source.path)
    assert (piece.path, piece.name, piece.kind) == (source.path, "sentence.jsonl", "jsonl")
    filesystem, inside = open_source(piece.path)
    with filesystem.open_input_stream(inside) as file:
        assert file.read() == resolve(source.path).read_bytes()
    folder = wikipedia_over(path, held_out=40).scores(documents=30, queries=20)[0].path
    pieces = list_pieces(folder)
    assert [piece.name for piece in pieces] == ["corpus.jsonl", "qrels/test.tsv", "queries.jsonl"]
    address, _, query = folder.partition("?")
    assert pieces[0].path == f"{address}/corpus.jsonl?{query}"


def test_translations_pair_the_articles_of_one_title(tmp_path: Path) -> None:
    english = made_up_articles(12)
    french = [
        replace(a, extract=f"{a.title} est le premier sujet, et il a {i} parties.")
        for i, a in enumerate(english[4:])
    ]
    for name, articles in (("en-us", english), ("fr-fr", french)):
        (tmp_path / f"{name}.json").write_text(json.dumps([vars(a) for a in articles]))
    sample = wikipedia_over(tmp_path / "{language}.json", held_out=2)
    held_out = hold_out([english, french], 2, seed=0)
    found = rows_of(sample.pairs("translation", to="fr").path)
    records = {row["query"]: row["positive"] for row in found}
    common = [a for a in english[4:] if a.title not in held_out.titles]
    assert len(records) == len(common)
    for a, b in ((a, b) for a, b in zip(english[4:], french, strict=True) if a in common):
        assert records[mask_title(a.extract, a.title)] == mask_title(b.extract, b.title)
    with pytest.raises(ValueError, match="must be given for translation"):
        sample.pairs("translation")
    with pytest.raises(ValueError, match="must be given for translation"):
        sample.pairs("sentence", to="fr")


def test_a_reference_names_what_decides_and_nothing_else() -> None:
    assert Wikipedia().pairs("sentence").path == "sample://wikipedia/sentence.jsonl"
    fewer = Wikipedia(held_out=5, seed=1, languages=("es", "en", "fr"))
    path = fewer.pairs("translation", to="fr").path
    assert path == "sample://wikipedia/translation.jsonl?to=fr&held_out=5&held_out_of=es&seed=1"
    assert row_reference(parse_reference(path).part) == path  # type: ignore[arg-type]
    assert fewer.texts("es") == "sample://wikipedia/texts.jsonl?language=es"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("sample://wikipedia/sentences.jsonl", "did you mean 'sentence.jsonl'"),
        ("sample://other/sentence.jsonl", "expected sample://wikipedia/"),
        ("sample://wikipedia/sentence.jsonl?heldout=5", "did you mean 'held_out'"),
        ("sample://wikipedia/texts.jsonl?held_out=5", "held_out, which has no effect"),
        ("sample://wikipedia/sentence.jsonl?held_out=1000", "write .*sentence.jsonl$"),
        ("sample://wikipedia/WikiTopicClustering/test.jsonl?documents=3", "has no effect"),
        ("sample://wikipedia/WikiSentenceRetrieval?queries=501", "queries 501 exceeds documents"),
        ("sample://wikipedia/WikiCrossLingualRetrieval", "languages, such as"),
        ("sample://wikipedia/sentence.jsonl?language=de", "must be 'en', 'fr' or 'es'"),
    ],
)
def test_wrong_references_are_refused(reference: str, message: str) -> None:
    with pytest.raises(AssetError, match=message):
        resolve(reference)
