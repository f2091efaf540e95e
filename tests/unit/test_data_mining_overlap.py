"""Documents of a corpus of its own that are or contain benchmark texts, which are not mined."""

import json
import re
from pathlib import Path

import mining_by_hand as by_hand
import pyarrow.parquet as pq
import pytest
from dies_once import innermost
from mining_step import configured, dataset_of, mine, pipeline_context, prepared, told

from rayembed.data.audit import write_folder_audit
from rayembed.data.mining.mine import make_mined
from rayembed.data.sources.tasks import HeldOut

ROWS = by_hand.made_up_rows(25, 0, labels=True)
DOCUMENTS = list(dict.fromkeys(by_hand.made_up_texts(40, 99)))
EQUAL = [*DOCUMENTS[:3], *(f" {text.upper()}" for text in DOCUMENTS[3:6])]
WITHIN = [f"word here. {text} and more of it" for text in DOCUMENTS[6:12]]
MORE = list(dict.fromkeys([*DOCUMENTS, *EQUAL, *WITHIN, *DOCUMENTS[:4]]))
CLEANING = {
    "overlap": {"tasks": ["questions.txt"], "max_similarity": None, "contained": {"shortest": 6}}
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "questions.txt").write_text("\n".join(DOCUMENTS[:12]))
    for name, some in (("a", MORE[::2]), ("b", [*MORE[1::2], *MORE[:5]])):
        rows = [json.dumps({"text": text}) for text in some]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


def config(root: Path, **changes):
    corpus = {"path": str(root / "*.jsonl")}
    return configured(near_duplicate=None, candidates=60, corpus=corpus, **changes)


def plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def allowed(evaluation: list[str]) -> tuple[list[str], dict[str, int]]:
    """Documents in the order of the files without texts of benchmarks, and those left out."""
    equal = {plain(text) for text in evaluation}
    counts = {"text of a benchmark": 0, "contains a text of a benchmark": 0}
    kept = []
    for text in [*MORE[::2], *MORE[1::2]]:
        if " ".join(text.lower().split()) in {one.lower() for one in evaluation}:
            counts["text of a benchmark"] += 1
        elif any(f" {one} " in f" {plain(text)} " for one in equal):
            counts["contains a text of a benchmark"] += 1
        else:
            kept.append(text)
    return kept, counts


def mined_texts(records) -> set[str]:
    return {negative.text for record in records for negative in record.negatives}


@pytest.mark.parametrize("mapped", [1, 1 << 20], ids=["mapped", "in memory"])
@pytest.mark.parametrize("per_part", [5, 1000])
def test_documents_with_benchmark_texts_are_not_mined(
    per_part, mapped, root, tmp_path, monkeypatch
):
    monkeypatch.setattr("rayembed.data.mining.documents._DOCUMENTS_PER_PART", per_part)
    monkeypatch.setattr("rayembed.data.mining.corpus._MAPPED_DOCUMENTS", mapped)
    kept, counts = allowed(DOCUMENTS[:12])
    assert min(counts.values()) >= 6
    banned = set(MORE) - set(kept)
    free, without = mine(tmp_path, ROWS, config(root), root=str(root))
    assert mined_texts(free) & banned & {*EQUAL, *DOCUMENTS[:12]}, "the control"
    assert mined_texts(free) & banned & set(WITHIN), "the control"
    assert "documents_overlap" not in without
    for parts in (1, 3):
        found, manifest = mine(
            tmp_path, ROWS, config(root), parts, cleaning=CLEANING, root=str(root)
        )
        assert told(found) == by_hand.mined(ROWS, config(root), kept)
        assert manifest["documents_overlap"] == counts
        assert manifest["inputs"]["overlap"][0][0] == "questions.txt"


def test_they_are_counted_listed_and_shown(root, tmp_path) -> None:
    kept, counts = allowed(DOCUMENTS[:12])
    before = prepared(tmp_path, ROWS, 2)
    dataset = dataset_of(config(root), CLEANING)
    made = make_mined(pipeline_context(tmp_path, root=str(root)), dataset, before, HeldOut())
    listed = pq.read_table(Path(made.folder) / "removed").to_pylist()
    assert {row["document"] for row in listed} == set(MORE) - set(kept)
    for row in listed:
        assert row["matched"] == "questions.txt"
        assert plain(row["matched_text"]) in plain(row["document"])
        assert row["reason"] in counts
    assert made.manifest["removed"]
    assert all(row in listed for row in made.manifest["removed"])
    page = Path(write_folder_audit(made)).read_text()
    assert "Documents of the corpus that are not mined" in page
    assert made.manifest["removed"][0]["document"] in page


def test_other_evaluation_texts_mine_anew_with_the_vectors_that_are_there(root, tmp_path) -> None:
    before = prepared(tmp_path, ROWS, 1)
    done: list[str] = []

    def execute(task, units, needs):
        for unit in units:
            done.append(type(innermost(task)).__name__)
            yield task(unit)

    def make():
        context = pipeline_context(tmp_path, root=str(root), execute=execute)
        return make_mined(context, dataset_of(config(root), CLEANING), before, HeldOut())

    first = make()
    assert {"FindInDocuments", "EmbedPart", "MineParts"} <= set(done)
    done.clear()
    assert make().folder == first.folder
    assert not done
    (root / "questions.txt").write_text("\n".join(DOCUMENTS[:5]))
    other = make()
    assert other.folder != first.folder
    assert sorted(set(done)) == ["FindInDocuments", "MineParts"]
    assert other.manifest["documents_overlap"] == {
        reason: count for reason, count in allowed(DOCUMENTS[:5])[1].items() if count
    }
    (root / "questions.txt").write_text("words that no document of them has at all")
    assert make().manifest["documents_overlap"] == {}


def test_a_killed_step_goes_on_and_ends_the_same(root, tmp_path) -> None:
    whole, manifest = mine(
        tmp_path / "whole", ROWS, config(root), 2, cleaning=CLEANING, root=str(root)
    )
    tries = 0
    while True:
        tries += 1
        left = 1

        def dies(task, units, needs):
            nonlocal left
            for unit in units:
                if not left:
                    raise KeyboardInterrupt
                left -= 1
                yield task(unit)

        options = {"cleaning": CLEANING, "root": str(root), "execute": dies}
        try:
            found, again = mine(tmp_path / "killed", ROWS, config(root), 2, **options)
            break
        except KeyboardInterrupt:
            continue
    assert tries > 5
    assert found == whole
    for name in ("documents_overlap", "removed", "candidates", "mined", "refused"):
        assert again[name] == manifest[name], name
