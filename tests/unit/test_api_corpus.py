"""`rayembed.adapt`: documents in any form become the run of the job, and a scored model."""

import json
from pathlib import Path

import pytest
from own_pairs import UNGUARDED
from tiny_models import save_encoder

import rayembed
from rayembed.api.measure import _documents, corpus_run
from rayembed.config.data import DatasetConfig
from rayembed.data.given_rows import rows_file
from rayembed.errors import ConfigError, DataError

CAN_FILTER = "consistency" in DatasetConfig.model_fields
UNFILTERED = {"data.datasets.corpus.consistency": None} if CAN_FILTER else {}
WORDS = ("cats", "dogs", "live", "fox", "jumps", "river", "ancient", "world", "Paris", "bridge")


def words(i: int) -> str:
    return " ".join(WORDS[(i * (n + 3)) % len(WORDS)] for n in range(5))


def texts(count: int = 120) -> list[str]:
    return [f"Number {i} has {words(i)}. It is {i} and is alone." for i in range(count)]


def source_of(corpus, folder: Path):
    return run_of(corpus, folder).data.datasets[0].source


def run_of(corpus, folder: Path):
    return corpus_run(rows_file(_documents(corpus), str(folder)), {}, {}, None)


def test_documents_in_any_form(tmp_path: Path) -> None:
    plain = source_of(texts(), tmp_path)
    assert plain.title is None
    assert plain.path == source_of([{"text": text} for text in texts()], tmp_path).path
    titled = source_of([(f"t{i}", text) for i, text in enumerate(texts())], tmp_path)
    assert titled.title == "title"
    rows = [{"title": f"t{i}", "text": text} for i, text in enumerate(texts())]
    assert titled.path == source_of(rows, tmp_path).path
    file = tmp_path / "a.csv"
    file.write_text("text,title\nsome text,some title\n")
    assert source_of(str(file), tmp_path).title == "title"
    assert plain.path == source_of(iter(texts()), tmp_path).path
    late = [{"text": text} for text in texts()] + [{"text": "last", "title": "Title"}]
    assert source_of(late, tmp_path).title == "title"
    lines = tmp_path / "late.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in late))
    assert source_of(str(lines), tmp_path).title == "title"


@pytest.mark.parametrize("ending", ["txt", "csv"])
def test_documents_that_change_have_a_run_of_another_name(tmp_path: Path, ending: str) -> None:
    folder, file = tmp_path / "corpus", tmp_path / "corpus" / f"a.{ending}"
    folder.mkdir()
    file.write_text("text\nsome text of foxes\n")
    run = run_of(folder, tmp_path)
    assert run.name.startswith("corpus-")
    assert run_of(folder, tmp_path).name == run.name
    file.write_text("text\nsome text of rivers\n")
    changed = run_of(folder, tmp_path)
    assert changed.fingerprint == run.fingerprint, "otherwise nothing is tested"
    assert changed.name != run.name
    assert corpus_run(str(folder), {}, {}, "mine").name == "mine"


@pytest.mark.parametrize("wrong", [[("a", "b", "c")], ["a", ("b", "c")], [{"text": "a"}, "b"], [3]])
def test_documents_of_several_kinds_are_told(wrong) -> None:
    with pytest.raises(DataError, match=r"documents are texts, tuples \(title, text\)"):
        _documents(wrong)


def test_wrong_settings_and_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lost\.jsonl"):
        rayembed.adapt("all-MiniLM-L6-v2", "lost.jsonl", output=tmp_path / "out")
    wrong = {"data.datasets.corpus.source.min_word": 3}
    with pytest.raises(ConfigError, match="did you mean 'min_words'"):
        rayembed.adapt("all-MiniLM-L6-v2", texts(), output=tmp_path / "out", settings=wrong)
    assert not (tmp_path / "out" / "runs").exists()


def test_texts_alone_become_a_scored_model(tmp_path: Path) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    adapted = rayembed.adapt(
        encoder,
        texts(),
        teacher=encoder,
        steps=2,
        batch_size=8,
        name="tiny",
        output=tmp_path / "out",
        settings={
            **UNGUARDED,
            **UNFILTERED,
            "data.datasets.corpus.mining.candidates": 40,
            "data.datasets.corpus.mining.rule": {"kind": "top_k"},
            "model.backbone.dtype": "float32",
            "model.query_max_length": 24,
            "model.document_max_length": 24,
        },
    )
    assert list(adapted.scores)[:3] == ["untrained", "stage 1: adapt", "BM25"]
    hybrid = ["hybrid: BM25 and untrained", "hybrid: BM25 and stage 1: adapt"]
    assert list(adapted.scores)[3:] == hybrid
    assert adapted.version == "models:/tiny/1"
    assert adapted.model.encode("cats and dogs").shape == (32,)
