"""Texts with classes: what is drawn for them, in both forms."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_records import made_records

from rayembed.data.hashes import seeded_hash
from rayembed.data.records import Record
from rayembed.data.sources import files
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.words import normalised_hash
from rayembed.errors import DataError

CLASSES = ("red", "green", "blue", "white")


def rows(number: int = 80, classes: tuple[Any, ...] = CLASSES) -> list[dict[str, Any]]:
    return [{"text": f"text {i}", "label": classes[i % len(classes)]} for i in range(number)]


def made(
    folder: Path,
    content: list[dict[str, Any]],
    out: str = "out",
    *,
    held_out: HeldOut | None = None,
    seed: int = 0,
    cleaning: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[Record], Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    source = {"kind": "classes", "path": str(folder / "a.jsonl"), **settings}
    records, prepared = made_records(
        folder / out,
        source,
        seed=seed,
        held_out=held_out,
        in_batch_negatives=False,
        cleaning=cleaning or {},
    )
    return records, prepared.manifest


def drawn_for(record: Record) -> tuple[str, ...]:
    return (*record.positives, *(negative.text for negative in record.negatives))


def test_examples_of_the_class_and_of_all_other_classes(tmp_path: Path) -> None:
    content = rows()
    of = {row["text"]: row["label"] for row in content}
    records, manifest = made(tmp_path, content, num_negatives=7)
    assert [r.query for r in records] == [row["text"] for row in content]
    for record in records:
        (positive,) = record.positives
        assert positive != record.query
        assert of[positive] == of[record.query] == record.label
        negatives = [n.text for n in record.negatives]
        assert len(set(negatives)) == 7
        assert {of[text] for text in negatives} == set(CLASSES) - {record.label}
        assert {n.rule for n in record.negatives} == {"other_class"}
    assert len({r.positives[0] for r in records}) > 40, "positives are spread over the class"
    assert manifest["rows_in"] == manifest["rows_out"] == 80


def test_what_is_drawn_depends_on_seed_and_text_alone(tmp_path: Path, monkeypatch) -> None:
    content = rows()
    records, _ = made(tmp_path / "a", content)
    drawn = {r.query: (r.positives, r.negatives) for r in records}
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 300)
    reordered, _ = made(tmp_path / "b", content[::-1])
    assert {r.query: (r.positives, r.negatives) for r in reordered} == drawn
    other, _ = made(tmp_path / "c", content, seed=1)
    same = sum(drawn[r.query] == (r.positives, r.negatives) for r in other)
    assert same < 5


@pytest.mark.parametrize("size", [300, 1 << 20])
def test_only_the_smallest_hashes_are_drawn_from(size: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", size)
    content = rows()
    records, _ = made(tmp_path, content, examples_per_class=3)
    allowed = set()
    for name in CLASSES:
        own = [row["text"] for row in content if row["label"] == name]
        allowed.update(sorted(own, key=lambda text: seeded_hash(0, "example", text))[:3])
    drawn = {t for r in records for t in (*r.positives, *(n.text for n in r.negatives))}
    assert drawn == allowed


@pytest.mark.parametrize("size", [300, 1 << 20])
def test_texts_of_benchmarks_are_not_drawn_but_others_in_their_place(
    size: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", size)
    content = rows()
    benchmark = [row["text"] for row in content[:20]]
    (tmp_path / "benchmark.txt").write_text("\n".join(text.upper() for text in benchmark))
    overlap = {"tasks": [str(tmp_path / "benchmark.txt")], "max_similarity": None}
    records, manifest = made(tmp_path, content, cleaning={"overlap": overlap})
    drawn = {text for record in records for text in drawn_for(record)}
    assert drawn == {row["text"] for row in content[20:]}
    assert {len(record.negatives) for record in records} == {7}, "none is missing"
    # A row goes for its own text alone, not for an example that was drawn for it.
    assert [record.query for record in records] == [row["text"] for row in content[20:]]
    assert manifest["dropped"] == {"text of a benchmark": 20}
    assert "negatives_overlap" not in manifest
    plain, _ = made(tmp_path, content, "plain")
    assert drawn < {text for record in plain for text in drawn_for(record)}
    assert {text for record in plain for text in drawn_for(record)} >= set(benchmark)


def test_a_class_of_benchmark_texts_alone_has_no_examples(tmp_path: Path) -> None:
    content = [*rows(9, ("red", "green", "blue")), {"text": "of white", "label": "white"}]
    (tmp_path / "benchmark.txt").write_text("\n".join(f"text {i}" for i in range(0, 9, 3)))
    overlap = {"tasks": [str(tmp_path / "benchmark.txt")], "max_similarity": None}
    records, manifest = made(tmp_path, content, cleaning={"overlap": overlap})
    assert {record.label for record in records} == {"green", "blue"}
    assert "of white" in {text for record in records for text in drawn_for(record)}
    assert manifest["rejected"] == {"only example of its class": 4}


def test_names_of_classes(tmp_path: Path) -> None:
    names = {"0": "negative", "1": "positive"}
    content = rows(10, (0, 1.0))
    records, _ = made(tmp_path, content, names=names, label_form="label")
    for number, record in enumerate(records):
        assert record.positives == (names[str(number % 2)],)
        assert [n.text for n in record.negatives] == [names[str(1 - number % 2)]]
        assert record.label == names[str(number % 2)]
    many, _ = made(tmp_path, rows(100, tuple(range(50))), label_form="label", num_negatives=3)
    for record in many:
        negatives = [n.text for n in record.negatives]
        assert len(set(negatives)) == 3
        assert record.label not in negatives
    assert len({n.text for r in many for n in r.negatives}) > 40


def test_labels_of_all_types_and_rows_that_give_no_record(tmp_path: Path) -> None:
    content = [
        *({"text": f"yes {i}", "label": True} for i in range(3)),
        *({"text": f"no {i}", "label": [False]} for i in range(3)),
        {"text": "alone", "label": "other"},
        {"text": "both", "label": [True, False]},
        {"text": "none", "label": None},
        {"text": "empty", "label": []},
        {"text": "", "label": True},
        {"text": ["x"], "label": True},
        {"text": "held out", "label": True},
    ]
    held_out = HeldOut(texts=frozenset([normalised_hash("Held  OUT")]))
    with pytest.raises(DataError, match="5 of 13 rows"):
        made(tmp_path, content, held_out=held_out)
    records, manifest = made(tmp_path, content, held_out=held_out, max_rejected_share=0.4)
    assert {r.label for r in records} == {"true", "false"}
    assert len(records) == 6
    assert manifest["rejected"] == {
        "column 'label' contains a list, not one value": 1,
        "column 'text' is not a text": 1,
        "has a held-out text": 1,
        "the class is missing": 2,
        "the text is missing or empty": 1,
        "only example of its class": 1,
    }
    assert "held out" not in {r.positives[0] for r in records}
    assert "alone" in {n.text for r in records for n in r.negatives}


def test_a_text_of_two_classes_is_no_negative_of_either(tmp_path: Path) -> None:
    content = [
        *rows(8, ("a", "b")),
        {"text": "twice", "label": "a"},
        {"text": "twice", "label": "b"},
    ]
    records, _ = made(tmp_path, content)
    assert "twice" in {r.query for r in records}
    assert "twice" not in {n.text for r in records for n in r.negatives}


@pytest.mark.parametrize("size", [200, 1 << 20])
def test_classes_of_a_text_count_beyond_the_examples(
    size: int, tmp_path: Path, monkeypatch
) -> None:
    """Of many texts of two classes some are kept as examples of one of them alone."""
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", size)
    content = rows(60, ("a", "b")) + [
        {"text": f"twice {i}", "label": name} for i in range(40) for name in ("c", "a")
    ]
    classes: dict[str, set[str]] = {}
    for row in content:
        classes.setdefault(row["text"], set()).add(row["label"])
    records, _ = made(tmp_path, content, examples_per_class=4, num_negatives=3)
    examples = {t for r in records for t in (*r.positives, *(n.text for n in r.negatives))}
    assert any(len(classes[text]) == 2 for text in examples)
    for record in records:
        (positive,) = record.positives
        assert record.label in classes[positive]
        assert positive != record.query
        for negative in record.negatives:
            assert record.label not in classes[negative.text]
    # The same texts stand in for negatives where they are none of the class.
    assert any(len(classes[n.text]) == 2 for r in records for n in r.negatives)


def test_a_text_kept_for_another_class_is_not_counted_as_its_own_example(tmp_path: Path) -> None:
    """Of class `a` one example is kept; a text of `a` and `b` that is not it has that positive."""
    texts = sorted((f"text {i}" for i in range(20)), key=lambda t: seeded_hash(0, "example", t))
    content = [{"text": text, "label": "a"} for text in (texts[0], texts[5])]
    content += [{"text": text, "label": "b"} for text in texts[5:10]]
    records, manifest = made(tmp_path, content, examples_per_class=1, max_rejected_share=0)
    (record,) = [r for r in records if r.query == texts[5] and r.label == "a"]
    assert record.positives == (texts[0],)
    assert manifest["rejected"] == {"only example of its class": 2}


@pytest.mark.parametrize("form", ["example", "label"])
def test_rows_without_any_class_are_rejected_rows(form: str, tmp_path: Path) -> None:
    content = [{"text": f"text {i}", "label": ""} for i in range(5)]
    with pytest.raises(
        DataError, match=r"'own' is empty: .* 5 rows, none usable \(5 × the class is missing"
    ):
        made(tmp_path, content, label_form=form)
