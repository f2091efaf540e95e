"""Rows of tasks, read from a hub on loopback in the layout of the real one."""

from dataclasses import replace

import pytest
from dataset_hub import dataset_hub
from made_up_benchmarks import (
    CONTEXT,
    GLUE,
    answers,
    glue_files,
    parquet,
    write_copies,
    xtreme_repositories,
)

from rayembed.errors import AssetError, DataError
from rayembed_papers.backbone.catalogue import FINETUNINGS
from rayembed_papers.backbone.rows import load, prepare
from rayembed_papers.backbone.tasks import ScoredRows


@pytest.fixture
def hub(monkeypatch):
    """A hub with some of both benchmarks, and `HF_ENDPOINT` for it."""
    with dataset_hub({GLUE: glue_files(), **xtreme_repositories()}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


def small(name: str, *subsets: str):
    """A finetuning that is scored on these subsets of its first task alone."""
    one = FINETUNINGS[name]
    kept = tuple(s for s in one.scored if not subsets or s.subset in subsets)
    return replace(one, scored=kept)


def rows_of(one, folder, root=None):
    found = prepare([one], str(folder), root)
    return load(found[one.train]), {s.subset: load(found[s.rows]) for s in one.scored}


def test_one_text_and_a_class_from_two_files(hub, tmp_path):
    train, scored = rows_of(FINETUNINGS["CoLA"], tmp_path)
    assert len(train) == 14
    assert train[:2] == [("the quick fox", 0), ("are cats larger", 1)]
    assert len(scored["validation"]) == 4


def test_pairs_with_two_development_sets_and_with_scores(hub, tmp_path):
    _, scored = rows_of(FINETUNINGS["MNLI"], tmp_path)
    assert {name: len(rows) for name, rows in scored.items()} == {
        "validation_matched": 6,
        "validation_mismatched": 5,
    }
    assert scored["validation_mismatched"][0] == ("where do they live 0", "dogs live in Paris", 1)
    train, _ = rows_of(FINETUNINGS["STS-B"], tmp_path)
    assert [row[-1] for row in train[:3]] == pytest.approx([0, 5 / 12, 10 / 12])


def test_languages_tags_and_answers(hub, tmp_path):
    _, scored = rows_of(small("XNLI", "de"), tmp_path)
    assert len(scored["de"]) == 6
    train, _ = rows_of(small("WikiANN", "de"), tmp_path)
    assert train[1] == (["Paris", "lives", "there"], [3, 4, 0])
    # Parts of speech stand by name, and `_` is none.
    train, _ = rows_of(small("UD-POS", "de"), tmp_path)
    assert [row[1] for row in train] == [[11, 15, 16], [16, 16, 2]]
    # Social IQa counts its answers from 1, in texts.
    train, _ = rows_of(FINETUNINGS["SIQa"], tmp_path)
    assert [row[-1] for row in train] == [2, 0]
    _, scored = rows_of(small("SQuAD", "de").only(["XQuAD"]), tmp_path)
    assert scored["de"][1][1:] == (CONTEXT, answers(("France", CONTEXT.index("France"))))
    train, scored = rows_of(small("TyDiQA-GoldP", "en", "ko"), tmp_path)
    assert (len(train), len(scored["en"]), len(scored["ko"])) == (2, 2, 3)


def test_rows_are_fetched_once_and_again_when_they_change(hub, tmp_path):
    one = FINETUNINGS["CoLA"]
    before = prepare([one], str(tmp_path), None)
    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.parquet")}
    assert len(written) == 2
    assert prepare([one], str(tmp_path), None) == before
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.parquet")} == written
    hub.files[GLUE] = glue_files(num_rows=20)
    after = prepare([one], str(tmp_path), None)
    assert after[one.train] != before[one.train]
    assert after[one.scored[0].rows] == before[one.scored[0].rows]
    assert len(load(after[one.train])) == 22


def test_copies_in_a_folder_are_the_same_rows(hub, tmp_path):
    root = write_copies(tmp_path / "copies", {GLUE: glue_files()})
    one = FINETUNINGS["MNLI"]
    here = rows_of(one, tmp_path / "a", str(root))
    assert here == rows_of(one, tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sentence": ["a"], "label": [2]}, r"the label 2; expected a number from 0 to 1"),
        ({"sentence": ["a"], "label": [None]}, r"an empty cell"),
        ({"sentence": [7], "label": [1]}, r"a value that must be a text is not a text"),
        ({"sentences": ["a"], "label": [1]}, r"no such column; did you mean 'sentences'"),
    ],
)
def test_rows_that_a_task_cannot_be_made_of(hub, tmp_path, change, message):
    hub.files[GLUE]["cola/train/0000.parquet"] = parquet(change)
    with pytest.raises(DataError, match=message):
        rows_of(FINETUNINGS["CoLA"], tmp_path)


def test_tags_that_are_not_known_and_sentences_that_lack_some(hub, tmp_path):
    one = small("WikiANN", "de")
    place = "en/train/0000.parquet"
    hub.files["unimelb-nlp/wikiann"][place] = parquet({"tokens": [["a"]], "ner_tags": [[9]]})
    with pytest.raises(DataError, match=r"the tag 9; expected one of O, B-PER"):
        rows_of(one, tmp_path)
    hub.files["unimelb-nlp/wikiann"][place] = parquet({"tokens": [["a", "b"]], "ner_tags": [[1]]})
    with pytest.raises(DataError, match=r"2 words and 1 tags"):
        rows_of(one, tmp_path)


def test_data_sets_and_languages_that_are_not_there(hub, tmp_path):
    del hub.files["aps/super_glue"]
    with pytest.raises(AssetError, match="aps/super_glue"):
        prepare([small("COPA", "et")], str(tmp_path), None)
    one = small("XNLI", "de")
    french = ScoredRows("XNLI", "fr", FINETUNINGS["XNLI"].scored[6].rows)
    absent = replace(one, scored=(french,))
    with pytest.raises((DataError, AssetError), match="xnli"):
        prepare([absent], str(tmp_path), None)
    lost = replace(FINETUNINGS["TyDiQA-GoldP"], scored=())
    rows = replace(lost.train, where=("id", "latin-"))
    none = replace(lost, train=rows)
    with pytest.raises(DataError, match=r"no rows .* whose 'id' begins with 'latin-'"):
        prepare([none], str(tmp_path), None)
