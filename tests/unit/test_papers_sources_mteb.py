"""Splits of mteb tasks: real task classes with made-up data, no network."""

from functools import partial
from pathlib import Path
from typing import Any

import datasets
import mteb
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value
from garbling import check_garbled
from made_records import made_records
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.clustering import AbsTaskClustering
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy
from mteb.abstasks.multilabel_classification import AbsTaskMultilabelClassification
from mteb.abstasks.pair_classification import AbsTaskPairClassification
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.abstasks.text.bitext_mining import AbsTaskBitextMining

from rayembed.config.override import override
from rayembed.data.records import Record
from rayembed.errors import ConfigError, DataError
from rayembed.pipeline.checks.files import look_at
from rayembed.recipes.catalogue import get_recipe
from rayembed_papers.sources import mteb_tasks


def metadata(kind: str, **more: Any) -> TaskMetadata:
    values: dict[str, Any] = {
        "name": "MadeUp",
        "description": "Made-up rows",
        "type": kind,
        "category": "t2t",
        "main_score": "accuracy",
        "dataset": {"path": "made/up", "revision": "r1"},
        "reference": "https://example.org/made-up",
        "eval_splits": ["test"],
        "eval_langs": ["eng-Latn"],
        "date": ("2020-01-01", "2020-12-31"),
        "domains": ["Written"],
        "task_subtypes": [],
        "license": "cc-by-4.0",
        "annotations_creators": "derived",
        "dialect": [],
        "sample_creation": "found",
        "bibtex_citation": "",
    }
    return TaskMetadata(**values | more)


@pytest.fixture
def task(monkeypatch):
    """Puts a task of a class with this data in mteb's place."""

    def put(
        base: Any, kind: str, data: Any, more: dict[str, Any] | None = None, **fields: Any
    ) -> None:
        def load_data(self, num_proc=None, *, timer=None, **options):
            self.dataset = data
            self.data_loaded = True

        body = {"metadata": metadata(kind, **(more or {})), "load_data": load_data, **fields}
        made = type("MadeUp", (base,), body)

        def get_task(name: str, eval_splits: Any = None, hf_subsets: Any = None) -> Any:
            found = made()
            if eval_splits:
                found.filter_eval_splits(eval_splits)
            return found.filter_languages(None, None, hf_subsets=hf_subsets)

        monkeypatch.setattr(mteb, "get_task", get_task)
        mteb_tasks._loaded.cache_clear()

    yield put
    mteb_tasks._loaded.cache_clear()


def records_of(folder: Path, **settings: Any) -> tuple[list[Record], Any]:
    source = {"kind": "mteb", "task": "MadeUp", **settings}
    records, made = made_records(folder / "out", source)
    return records, made.manifest


def splits(train: dict[str, list[Any]], features: Features | None = None) -> DatasetDict:
    return DatasetDict(
        {
            "train": Dataset.from_dict(train, features=features),
            "test": Dataset.from_dict({name: values[:1] for name, values in train.items()}),
        }
    )


def test_sentences_scaled_to_the_range_of_the_task(task, tmp_path: Path) -> None:
    columns = {"sentence1": ["a", "c", "e"], "sentence2": ["b", "d", "f"], "score": [0.8, 0.79, 1]}
    task(AbsTaskSTS, "STS", splits(columns), min_score=0, max_score=1)
    records, manifest = records_of(tmp_path)
    assert [(r.query, *r.positives) for r in records] == [
        ("a", "b"),
        ("b", "a"),
        ("e", "f"),
        ("f", "e"),
    ]
    assert [r.origin for r in records][::2] == [
        ("MadeUp/train/default#0",),
        ("MadeUp/train/default#2",),
    ]
    assert {r.language for r in records} == {"eng"}
    assert manifest["rejected"] == {"not similar": 1}


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_files_that_a_split_is_written_to_are_refused_when_they_change(
    task, tmp_path: Path, damage: str
) -> None:
    texts = [f"text {i}" for i in range(50)]
    columns = {"sentence1": texts, "sentence2": texts[::-1], "score": [1.0] * 50}
    task(AbsTaskSTS, "STS", splits(columns), min_score=0, max_score=1)

    def made(name: str) -> list[Record]:
        return records_of(tmp_path / name)[0]

    wanted = made("undisturbed")
    pattern = r"working/staged/\d+\.parquet"
    refused = [
        check_garbled(pattern, damage, partial(made, seed), wanted, seed) for seed in "01234"
    ]
    assert sum(refused) > 3


def test_pairs_that_are_alike(task, tmp_path: Path) -> None:
    whole = {"sentence1": ["a", "c"], "sentence2": ["b", "d"], "labels": [1, 0]}
    task(AbsTaskPairClassification, "PairClassification", splits(whole))
    rows, _ = records_of(tmp_path)
    assert [(r.query, *r.positives) for r in rows] == [("a", "b"), ("b", "a")]
    packed = {name: [values] for name, values in whole.items()}
    task(AbsTaskPairClassification, "PairClassification", splits(packed), {"name": "Packed"})
    packed_rows, _ = records_of(tmp_path / "packed", task="Packed")
    assert [r.id for r in packed_rows] == [r.id for r in rows]
    assert packed_rows[0].origin == ("Packed/train/default#0.0",)


def test_classes_have_their_names(task, tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["sad", "glad"])})
    columns = {"text": [f"t {i}" for i in range(10)], "label": [i % 2 for i in range(10)]}
    task(AbsTaskClassification, "Classification", splits(columns, features))
    records, _ = records_of(tmp_path, label_form="label")
    assert [r.positives[0] for r in records] == ["sad", "glad"] * 5
    assert [r.negatives[0].text for r in records] == ["glad", "sad"] * 5
    examples, _ = records_of(tmp_path, num_negatives=2)
    assert {len(r.negatives) for r in examples} == {2}
    assert [r.label for r in examples] == ["sad", "glad"] * 5


def test_several_labels_of_a_text(task, tmp_path: Path) -> None:
    names = Sequence(ClassLabel(names=["x", "y", "z"]))
    features = Features({"text": Value("string"), "label": names})
    columns = {"text": ["a", "b", "c", "d"], "label": [[0], [0], [1, 2], [2]]}
    task(AbsTaskMultilabelClassification, "MultilabelClassification", splits(columns, features))
    records, manifest = records_of(tmp_path, label_form="label", max_rejected_share=0.3)
    assert [(r.query, r.label) for r in records] == [("a", "x"), ("b", "x"), ("d", "z")]
    assert manifest["rejected"] == {"column 'label' contains a list, not one value": 1}


def test_clusters_by_rows_by_sets_and_by_levels(task, tmp_path: Path) -> None:
    flat = {"sentences": ["a", "b", "c", "d"], "labels": ["x", "y", "x", "y"]}
    task(AbsTaskClustering, "Clustering", splits(flat))
    records, _ = records_of(tmp_path)
    assert [(r.query, *r.positives) for r in records] == [
        ("a", "c"),
        ("b", "d"),
        ("c", "a"),
        ("d", "b"),
    ]
    levels = {"sentences": ["a", "b"], "labels": [["x", "x.1"], ["x", "x.2"]]}
    task(AbsTaskClustering, "Clustering", splits(levels), {"name": "Levels"})
    records, _ = records_of(tmp_path / "levels", task="Levels", label_form="label")
    assert [(r.query, r.label) for r in records] == [("a", "x.1"), ("b", "x.2")]
    sets = {"sentences": [["a", "b"], ["c", "d"]], "labels": [["x", "y"], ["x", "y"]]}
    task(AbsTaskClusteringLegacy, "Clustering", splits(sets), {"name": "Sets"})
    records, _ = records_of(tmp_path / "sets", task="Sets")
    assert [(r.query, *r.positives) for r in records] == [
        ("a", "c"),
        ("b", "d"),
        ("c", "a"),
        ("d", "b"),
    ]
    assert records[3].origin == ("Sets/train/default#1.1",)


def test_translations_by_subsets_and_by_columns(task, tmp_path: Path) -> None:
    langs = {"eval_langs": {"de-en": ["deu-Latn", "eng-Latn"], "fr-en": ["fra-Latn", "eng-Latn"]}}
    data = {
        name: DatasetDict(
            {"train": Dataset.from_dict({"sentence1": [f"{name} 1"], "sentence2": ["one"]})}
        )
        for name in ("de-en", "fr-en")
    }
    task(AbsTaskBitextMining, "BitextMining", data, langs)
    records, _ = records_of(tmp_path)
    assert [(r.query, *r.positives) for r in records] == [
        ("de-en 1", "one"),
        ("one", "de-en 1"),
        ("fr-en 1", "one"),
        ("one", "fr-en 1"),
    ]
    assert [r.language for r in records] == ["deu-eng"] * 2 + ["eng-fra"] * 2
    one, _ = records_of(tmp_path, subset="fr-en")
    assert [r.query for r in one] == ["fr-en 1", "one"]
    with pytest.raises(
        ConfigError, match=r"source.subset = 'xx'.* has only the subsets de-en, fr-en"
    ):
        records_of(tmp_path, subset="xx")
    columns = {"de": ["eins"], "en": ["one"], "fr": ["un"]}
    parallel = DatasetDict({"train": Dataset.from_dict(columns)})
    more = {**langs, "name": "Parallel"}
    task(AbsTaskBitextMining, "BitextMining", parallel, more, parallel_subsets=True)
    records, _ = records_of(tmp_path / "p", task="Parallel")
    assert [r.query for r in records] == ["eins", "one", "un", "one"]


def judged(queries: list[dict[str, Any]], relevant: dict[str, dict[str, int]]) -> dict[str, Any]:
    corpus = [{"id": f"d{i}", "title": "T" if i % 2 else "", "text": f"text {i}"} for i in range(9)]
    return {
        "corpus": Dataset.from_list(corpus),
        "queries": Dataset.from_list(queries),
        "relevant_docs": relevant,
        "top_ranked": None,
    }


def test_judged_documents_are_positives_and_negatives(task, tmp_path: Path) -> None:
    queries = [{"id": "a", "text": "qa"}, {"id": "b", "text": "qb"}, {"id": "c", "text": "qc"}]
    relevant = {"a": {"d3": 1, "d1": 2, "d2": 0}, "b": {"d4": 0}, "c": {"none": 1, "d5": 1}}
    task(AbsTaskRetrieval, "Retrieval", {"default": {"train": judged(queries, relevant)}})
    records, manifest = records_of(tmp_path, max_rejected_share=0.4)
    assert [(r.query, r.positives) for r in records] == [
        ("qa", ("T text 1", "T text 3")),
        ("qc", ("T text 5",)),
    ]
    assert [n.text for n in records[0].negatives] == ["text 2"]
    assert records[0].origin == ("MadeUp/train/default#a",)
    assert manifest["rejected"] == {"no positive": 1}


def test_instructions_of_queries_and_conversations(task, tmp_path: Path) -> None:
    queries = [{"id": "a", "text": "qa", "instruction": "only old ones"}]
    data = {"default": {"train": judged(queries, {"a": {"d0": 1}})}}
    task(AbsTaskRetrieval, "InstructionRetrieval", data)
    assert records_of(tmp_path)[0][0].query == "qa only old ones"
    turns = [{"role": "user", "content": "hi"}, {"role": "system", "content": "yes?"}]
    data = {"default": {"train": judged([{"id": "a", "text": turns}], {"a": {"d0": 1}})}}
    task(AbsTaskRetrieval, "Retrieval", data, {"name": "Talk"})
    assert records_of(tmp_path, task="Talk")[0][0].query == "user: hi; system: yes?"


def test_evaluation_splits_and_splits_that_are_not_there(task, tmp_path: Path) -> None:
    columns = {"sentence1": ["a"], "sentence2": ["b"], "score": [5.0]}
    task(AbsTaskSTS, "STS", splits(columns))
    with pytest.raises(ConfigError, match=r"source.split = 'test': .*evaluates on test"):
        records_of(tmp_path, split="test")
    with pytest.raises(
        ConfigError, match=r"source.split = 'dev': .*'default'\) has the splits train, test"
    ):
        records_of(tmp_path, split="dev")
    task(AbsTaskSTS, "Summarization", splits(columns))
    with pytest.raises(
        ConfigError, match=r"type Summarization and .* text; .*Retrieval, Reranking"
    ):
        records_of(tmp_path)


def test_the_only_split_of_judgements_is_not_taken_for_another(
    task, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda *a, **k: ["default", "corpus"])
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *a, **k: ["test"])
    loader = AbsTaskRetrieval.load_data
    task(AbsTaskRetrieval, "Retrieval", {}, load_data=loader)
    with pytest.raises(ConfigError, match=r"source.split = 'train': .* has the splits test"):
        records_of(tmp_path)


def test_an_unknown_task_is_named_before_anything_starts() -> None:
    pairs = "data.datasets.pairs"
    given = [
        f"{pairs}.source={{kind: mteb, task: SciFactt}}",
        f"{pairs}.held_out=null",
        "evaluation.guard=null",
    ]
    (told,) = [
        problem
        for problem in look_at(override(get_recipe("biencoder"), given)).problems
        if f"{pairs}.source.task" in problem
    ]
    assert "did you mean 'SciFact'?" in told


def test_unknown_tasks_and_tasks_that_cannot_be_loaded(task, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"source.task = 'STS1': .*did you mean 'STS1\d'"):
        made_records(tmp_path, {"kind": "mteb", "task": "STS1"})

    def away(self, **options):
        raise ConnectionError("no route to the hub")

    task(AbsTaskSTS, "STS", {}, load_data=away)
    with pytest.raises(DataError, match=r"cannot load split 'train' .*no route to the hub"):
        records_of(tmp_path)
