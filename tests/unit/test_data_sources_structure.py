"""Documents without queries: pairs by their structure, one of each, whatever files hold them."""

import gzip
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayembed.api.measure import corpus_run
from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.config.types import has_content
from rayembed.data.audit import audit_page
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.held_out.part import make_part
from rayembed.data.records import Record
from rayembed.data.sources.check import check_source, look
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import Row, read_rows
from rayembed.data.sources.structure import RULES, _unwrapped, _without, draw_pair, sections
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.words import split_sentences, words
from rayembed.errors import ArtifactError, ConfigError, DataError

PARTS = [
    "It is here. ",
    "It is here",
    ".",
    "x",
    "利马是首都。",
    "\n",
    "\n\n",
    "# Head\n",
    "It is. ",
]

MARKDOWN = """\
# Kettles

A kettle boils water for tea or coffee.

## Care

Descale it with vinegar once every
month. Rinse it twice afterwards.

```
## not a heading of this page at all
```

## History
Too short.

== Electric ones ==
They switch off by themselves when water boils.
"""


def pair(rule: str, title: str, text: str, seed: int = 0, min_words: int = 5):
    return RULES[rule](title, text, seed, min_words)


def test_titles() -> None:
    body = "Lima is the capital of Peru."
    assert pair("title", "Lima", body) == ("Lima", body)
    assert pair("title", "Lima", f"Lima\n\n{body}") == ("Lima", body)
    assert pair("title", "Lima", f"# Lima\n{body}") == ("Lima", body)
    assert pair("title", "", f"Lima\n{body}") == ("Lima", body)
    assert pair("title", "", body) is None  # one line is no title
    assert pair("title", "", f"{body}{body}\n{body}") is None  # a title is shorter than its body
    assert pair("title", "Lima", "Too few words") is None
    assert pair("title", "…", f"\u200b\n{body}") == ("…", f"\u200b\n{body}".strip())


def test_headings_and_their_sections() -> None:
    assert [heading for heading, _ in sections(MARKDOWN)] == [
        "Kettles", "Care", "History", "Electric ones",
    ]  # fmt: skip
    drawn = {pair("heading", "Kettles", MARKDOWN, seed) for seed in range(40)}
    assert {query for query, _ in drawn} == {
        "Kettles", "Kettles: Care", "Kettles: Electric ones",
    }  # fmt: skip
    (care,) = (body for query, body in drawn if query == "Kettles: Care")
    assert care.startswith("Descale it with vinegar once every\nmonth.")
    assert "## not a heading" in care
    assert pair("heading", "", "== Use ==\nFor tea and for coffee alone.") == (
        "Use", "For tea and for coffee alone.",
    )  # fmt: skip
    assert pair("heading", "Kettles", "No heading is here at all.") is None


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_only_line_feeds_end_lines(sign: str) -> None:
    heading, body = (
        f"The use{sign}of kettles",
        f"Boil water{sign}## for tea{sign}```{sign}and more.",
    )
    for end in ("\n", "\r\n"):
        text = f"# {heading}{end}{body}{end}## Care{end}Descale it{sign}every month."
        assert sections(text) == [(heading, body), ("Care", f"Descale it{sign}every month.")]
    assert split_sentences(f"Boil the{sign}water now.\nThen stop.\r\n\r\nEnd") == [
        f"Boil the{sign}water now.", "Then stop.", "End",
    ]  # fmt: skip


def test_sentences_and_the_rest() -> None:
    text = "First comes this one here. Second comes that one there. Short one."
    found = {pair("sentence", "", text, seed) for seed in range(20)}
    assert found == {
        ("First comes this one here.", "Second comes that one there. Short one."),
        ("Second comes that one there.", "First comes this one here. Short one."),
    }
    # What is repeated is taken out wherever it stands, and a wrapped line goes on.
    twice = "It says this every time.\nA line that was\nwrapped here.\n\nIt says this every time."
    assert {pair("sentence", "", twice, seed) for seed in range(20)} == {
        ("It says this every time.", "A line that was wrapped here."),
        ("A line that was wrapped here.", "It says this every time.\n\nIt says this every time."),
    }
    assert pair("sentence", "", "Only one sentence is in this text.") is None
    queries = {pair("sentence", "", MARKDOWN, seed)[0] for seed in range(60)}
    assert "Descale it with vinegar once every month." in queries
    assert not any(query.startswith(("#", "==")) for query in queries)


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=24), st.integers(1, 9))
def test_the_drawn_sentences_are_those_that_leave_enough(parts: list[str], min_words: int) -> None:
    text = "".join(parts)
    whole = _unwrapped(text)
    rests = {one: _without(whole, one) for one in dict.fromkeys(split_sentences(whole))}
    fitting = {
        (sentence, rest)
        for sentence, rest in rests.items()
        if not sentence.startswith(("#", "=="))
        and len(words(sentence)) >= min_words
        and has_content(rest)
        and len(words(rest)) >= min_words
    }
    drawn = {pair("sentence", "", text, seed, min_words) for seed in range(8)} - {None}
    assert drawn <= fitting
    assert bool(drawn) == bool(fitting)


def test_a_long_document_is_no_work_of_minutes() -> None:
    text = "".join(f"This is sentence number {i} of a long book.\n" for i in range(20_000))
    began = time.process_time()
    assert pair("sentence", "", text) is not None
    # 5 s on an old core; with each sentence's rest made it is an hour.
    assert time.process_time() - began < 60


def test_full_width_punctuation_ends_sentences() -> None:
    assert split_sentences("利马是首都。它很大！「真的？」是。") == [
        "利马是首都。", "它很大！", "「真的？」", "是。",
    ]  # fmt: skip


def test_rules_are_drawn_by_weight_among_those_that_fit() -> None:
    weights = {"title": 1.0, "heading": 1.0, "sentence": 2.0}
    texts = [f"# Head {i}\nThe number {i} stands here. The other is not {i}." for i in range(800)]
    drawn = [draw_pair(f"Title {i}", text, weights, 0, 5) for i, text in enumerate(texts)]
    kinds = Counter(rule for rule, _ in filter(None, drawn))
    assert kinds.total() == 800
    for i, (rule, made) in enumerate(filter(None, drawn)):
        assert made == pair(rule, f"Title {i}", texts[i])
    # Three standard deviations of a share of a quarter are 37.
    assert abs(kinds["title"] - 200) < 40
    assert abs(kinds["heading"] - 200) < 40
    assert drawn != [draw_pair(f"Title {i}", t, weights, 1, 5) for i, t in enumerate(texts)]
    plain = "The number stands here alone. The other one does not."
    sentences = {("sentence", pair("sentence", "", plain, seed)) for seed in range(9)}
    assert draw_pair("", plain, weights, 0, 5) in sentences
    assert draw_pair("", plain, {"heading": 1.0}, 0, 5) is None


def documents(count: int = 200) -> list[dict[str, Any]]:
    return [
        {"title": f"Town {i}", "text": f"It lies by river number {i}. Its {i} people like it."}
        for i in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset(path: str, **changes: Any) -> DatasetConfig:
    values = {"name": "d", "source": {"kind": "structure", "path": path}, **changes}
    return parse(DatasetConfig, values)


def converted(folder: Path, config: DatasetConfig) -> tuple[list[Record], Any]:
    context = PipelineContext(str(folder), 0)
    checked = check_source(config, "")
    part = make_part(context, checked)
    held_out = HeldOut(frozenset() if part is None else part.texts, part and part.rows)
    made = make_records(context, checked, held_out, part and part.artifact)
    return [r for p in made.parts for r in read_records(p.path)], made.manifest


def test_a_document_gives_one_row_whatever_files_hold_it(tmp_path: Path) -> None:
    rows = documents()
    found, told = converted(tmp_path / "one", dataset(write(tmp_path / "in" / "a.jsonl", rows)))
    assert told["rows_out"] == len(rows)
    assert told["rejected"] == {}
    for n in range(4):
        write(tmp_path / "split" / f"{n}.jsonl", rows[n::4][::-1])
    several, _ = converted(tmp_path / "several", dataset(str(tmp_path / "split")))
    pairs = {(r.id, r.query, r.positives) for r in found}
    assert pairs == {(r.id, r.query, r.positives) for r in several}
    assert len({r.query.startswith("Town") for r in found}) == 2  # titles and sentences
    # Each says which rule gave it, and the manifest and its page how many each gave.
    assert {r.pair_rule for r in found if r.query.startswith("Town")} == {"title"}
    rules = Counter(r.pair_rule for r in found)
    assert told["pair_rules"] == dict(sorted(rules.items()))
    page = audit_page(told, found)
    assert "Pairs by the rule that gave them, before duplicates are dropped" in page
    assert re.search(rf"sentence</t[dh]><td[^>]*>{rules['sentence']}<", page)
    assert "· by title" in page


def test_no_text_of_a_held_out_document_is_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", documents())
    found, told = converted(tmp_path / "out", dataset(path, held_out={"kind": "fraction"}))
    assert told["rejected"] == {"held out": 20}
    assert told["rows_out"] == 180
    (corpus,) = (tmp_path / "out").glob("data/held_out/*/beir/corpus.jsonl")
    held_out = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    numbers = {
        word for text in held_out for word in text.replace(".", "").split() if word.isdigit()
    }
    trained = {
        word for r in found for word in r.positives[0].replace(".", "").split() if word.isdigit()
    }
    assert numbers
    assert not numbers & trained


def test_documents_without_a_pair_are_told_and_tolerated(tmp_path: Path) -> None:
    rows = [*documents(20), *({"title": "", "text": "Too short."} for _ in range(30))]
    _, told = converted(tmp_path / "out", dataset(write(tmp_path / "a.jsonl", rows)))
    assert told["rejected"] == {"no rule gives a pair": 30}
    empty = [*documents(20), {"title": "x", "text": ""}]
    with pytest.raises(DataError, match="the text is missing or empty"):
        converted(tmp_path / "out", dataset(write(tmp_path / "b.jsonl", empty)))


def test_a_corpus_without_titles_is_told_what_to_set(tmp_path: Path) -> None:
    rows = [{"text": one["text"]} for one in documents()]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=r"source\.title = 'title'.* or .*source\.title=null"):
        check_source(dataset(path), "")
    found, _ = converted(
        tmp_path / "out",
        dataset(path, source={"kind": "structure", "path": path, "title": None}),
    )
    assert len(found) == len(rows)
    with pytest.raises(ConfigError, match=r"source\.text = 'txt'"):
        check_source(
            dataset(path, source={"kind": "structure", "path": path, "text": "txt", "title": None}),
            "",
        )


def write_texts(folder: Path, number: int = 40) -> str:
    (folder / "in" / "deeper").mkdir(parents=True)
    for i in range(number):
        name = f"in/deeper/{i}.md" if i % 2 else f"in/{i}.txt"
        text = f"# Town {i}\r\n\r\nIt lies by river number {i}. Its {i} people like it.\n"
        (folder / name).write_bytes(text.encode("utf-8-sig"))
    packed = (folder / "in" / "0.txt").rename(folder / "in" / "0.txt.gz")
    packed.write_bytes(gzip.compress(packed.read_bytes()))
    return str(folder / "in")


def test_each_text_file_is_a_document(tmp_path: Path) -> None:
    path = write_texts(tmp_path)
    found, told = converted(tmp_path / "out", dataset(path))
    assert told["rows_in"] == told["rows_out"] == 40
    assert {r.origin for r in found} == {
        (f"deeper/{i}.md" if i % 2 else f"{i}.txt{'' if i else '.gz'}",) for i in range(40)
    }
    titles = {r.query for r in found if r.pair_rule == "title"}
    assert titles
    assert titles < {f"Town {i}" for i in range(40)}
    assert told["pair_rules"].keys() == {"title", "heading", "sentence"}
    assert not any("\r" in text or "\ufeff" in text for r in found for text in r.positives)
    (piece,) = list_pieces(path, texts=True)
    assert len(piece.names) == 40
    # By a pattern, with their paths as names, and by groups of these.
    named = {"kind": "structure", "path": f"{path}/**/*.md", "id": "id"}
    some, _ = converted(tmp_path / "some", dataset(path, source=named))
    assert {r.id for r in some} == {f"d/deeper/{i}.md" for i in range(1, 40, 2)}
    run = corpus_run(path, {}, {}, None)
    assert run.data.datasets[0].source.title == "title"
    head = look(dataset(path), "")
    assert (head.rows, head.exact, len(head.files)) == (40, True, 40)


@pytest.mark.parametrize(
    ("written", "title", "text"),
    [
        ("---\ntitle: 'Night owls'\ntags: [a]\n---\n# One\nbody", "Night owls", "# One\nbody"),
        ("---\r\ndate: 2020\r\n---\r\nbody", "", "body"),
        ("---\nOnly a rule opens this.\n", "", "---\nOnly a rule opens this.\n"),
        ("One\n---\ntitle: no\n---\n", "", "One\n---\ntitle: no\n---\n"),
        ("---\ntitle: all\n---", "all", ""),
        ("---\ntitle: >-\n  Two\n  lines\n---\nbody", "Two lines", "body"),
        ("---\ntitle: One # two\n---\nbody", "One", "body"),
        ("---\n---\nbody\n---\nrest", "", "body\n---\nrest"),
        ("---\nA rule opens this\n\n---\nrest", "", "---\nA rule opens this\n\n---\nrest"),
        ("---\n- a\n- list\n---\nrest", "", "---\n- a\n- list\n---\nrest"),
        ("---\na: [b\n---\nrest", "", "---\na: [b\n---\nrest"),
    ],
)
def test_settings_above_a_text_are_no_part_of_it(
    written: str, title: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "a.md").write_text(written)
    (piece,) = list_pieces(str(tmp_path), texts=True)
    (row,) = read_rows(piece)
    assert isinstance(row, Row)
    assert (row.values["title"], row.values["text"]) == (title, text)
    (tmp_path / "a.md").rename(tmp_path / "a.txt")
    (plain,) = read_rows(*list_pieces(str(tmp_path), texts=True))
    assert isinstance(plain, Row)
    assert plain.values["text"] == written.replace("\r\n", "\n"), "of Markdown alone"


def test_a_broken_text_is_named_among_the_others_of_its_piece(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"text " * 100)[:-20])
    (piece,) = list_pieces(str(tmp_path), texts=True)
    with pytest.raises(ArtifactError, match=r"cannot read the text .*b\.txt\.gz"):
        list(read_rows(piece))


def test_texts_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    path = write_texts(tmp_path)
    (tmp_path / "in" / "empty.txt").write_text("")
    latin = "# Café\nIt is a café by the river.".encode("latin-1")
    (tmp_path / "in" / "latin.txt").write_bytes(latin)
    source = {"kind": "structure", "path": path, "max_rejected_share": 0.1}
    _, told = converted(tmp_path / "out", dataset(path, source=source))
    assert told["rejected"] == {"the text is missing or empty": 1, "not UTF-8": 1}
    assert {e["reason"]: e["row"] for e in told["examples"]}["not UTF-8"].startswith("latin.txt: ")
    (tmp_path / "in" / "empty.txt").unlink()
    source |= {"encoding": "latin-1"}
    found, told = converted(tmp_path / "latin", dataset(path, source=source))
    assert told["rejected"] == {}
    assert any("café" in text.lower() for r in found for text in (r.query, *r.positives))
    source |= {"encoding": "ascii"}
    with pytest.raises(DataError, match="not ascii"):
        converted(tmp_path / "ascii", dataset(path, source=source))


def test_a_changed_text_is_another_source_and_pieces_hold_many(tmp_path: Path) -> None:
    path = write_texts(tmp_path)
    before = check_source(dataset(path), "").content
    assert check_source(dataset(path), "").content == before
    (tmp_path / "in" / "2.txt").write_text("# Other\nThis town has another text now.")
    assert check_source(dataset(path), "").content != before
    for i in range(1100):
        (tmp_path / "in" / f"more-{i}.txt").write_text("x")
    sizes = [len(piece.texts) for piece in list_pieces(path, texts=True, versions=False)]
    assert sizes == [1024, 116]


def test_texts_among_other_files_are_named_by_a_pattern(tmp_path: Path) -> None:
    path = write_texts(tmp_path)
    (tmp_path / "in" / "plot.png").write_text("")
    with pytest.raises(
        DataError, match=r"'plot\.png'; select .* with a pattern: .*in/\*\*/\*\.txt"
    ):
        check_source(dataset(path), "")
    with pytest.raises(DataError, match="ending is not one of"):
        list_pieces(path)
