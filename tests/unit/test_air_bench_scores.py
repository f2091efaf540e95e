"""Dev scores against figures by hand, and their table."""

import math

import pytest
from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores

from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.evaluation.model_spec import model_meta
from rayembed_extras.air_bench.catalogue import air_bench_datasets
from rayembed_extras.air_bench.results import open_results
from rayembed_extras.air_bench.scores import (
    CUTOFFS,
    dev_csv,
    dev_markdown,
    read_dev_scores,
    retrieval_scores,
)

NEW = "AIR-Bench_24.05"
LABELS = {
    "a": {"x": 1, "y": 1, "z": 0},
    "b": {"x": 1},
    "c": {"w": 1},
}
FOUND = {
    "a": {"z": 0.9, "x": 0.8, "v": 0.7, "y": 0.6},  # relevant at ranks 2 and 4
    "b": {"x": 0.5, "y": 0.5},  # a tie: the greater id goes first, so rank 2
    "c": {"x": 1.0},  # not found
}


def by_hand() -> dict[str, float]:
    gain = {rank: 1 / math.log2(rank + 1) for rank in range(1, 5)}
    ndcg = [(gain[2] + gain[4]) / (gain[1] + gain[2]), gain[2], 0.0]
    return {
        "ndcg_at_10": sum(ndcg) / 3,
        "ndcg_at_1": 0.0,
        "recall_at_10": (1 + 1 + 0) / 3,
        "recall_at_3": (0.5 + 1 + 0) / 3,
        "precision_at_5": (2 / 5 + 1 / 5 + 0) / 3,
        "map_at_10": ((1 / 2 + 2 / 4) / 2 + 1 / 2 + 0) / 3,
    }


def test_scores_are_those_by_hand():
    scores = retrieval_scores(LABELS, FOUND)
    for name, expected in by_hand().items():
        assert scores[name] == pytest.approx(expected, abs=1e-9), name
    # Control: without the tie's rule the second query would have rank 1.
    swapped = FOUND | {"b": {"x": 0.5, "y": 0.4}}
    assert retrieval_scores(LABELS, swapped)["ndcg_at_10"] > scores["ndcg_at_10"] + 0.1


def test_scores_are_those_of_mteb():
    scores = retrieval_scores(LABELS, FOUND)
    theirs = calculate_retrieval_scores(FOUND, LABELS, CUTOFFS)
    for k in CUTOFFS:
        assert scores[f"ndcg_at_{k}"] == pytest.approx(theirs.ndcg[f"NDCG@{k}"], abs=1e-5)
        assert scores[f"recall_at_{k}"] == pytest.approx(theirs.recall[f"Recall@{k}"], abs=1e-5)
        assert scores[f"map_at_{k}"] == pytest.approx(theirs.map[f"MAP@{k}"], abs=1e-5)
        assert scores[f"precision_at_{k}"] == pytest.approx(theirs.precision[f"P@{k}"], abs=1e-5)


def test_a_labelled_query_without_results_is_refused():
    """AIR-Bench would leave it out of the mean."""
    with pytest.raises(
        DataError, match=r"1 labelled queries have no search results, such as \['c'\]"
    ):
        retrieval_scores(LABELS, {query: FOUND[query] for query in "ab"})


def test_results_without_labels_do_not_count():
    more = FOUND | {"d": {"x": 1.0}}
    assert retrieval_scores(LABELS, more) == retrieval_scores(LABELS, FOUND)


@pytest.fixture
def some_scores(tmp_path):
    """The dev scores of all long documents and of one qa data set, with scores made up."""
    results = open_results(str(tmp_path), NEW, model_meta("made/up", "r1"))
    wanted = [
        *air_bench_datasets(NEW, tasks=["long-doc"], splits=["dev"]),
        *air_bench_datasets(NEW, tasks=["qa"], domains=["arxiv"], splits=["dev"]),
    ]
    for number, dataset in enumerate(wanted):
        results.save(
            dataset, "dev", {"q": {"d": 1.0}}, instruction="", dataset_revision="",
            num_documents=1, scores={"ndcg_at_10": 0.5, "recall_at_10": 0.1 * number},
        )  # fmt: skip
    return read_dev_scores(str(tmp_path), NEW, "made__up")


def test_dev_scores_are_read_with_each_tasks_own_score(some_scores):
    assert len(some_scores.scores) == 58
    assert some_scores.scores["qa_arxiv_en_default"] == 0.5
    long_doc = [some_scores.scores[d.label] for d in some_scores.datasets("long-doc")]
    assert long_doc == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert some_scores.mean("long-doc") == pytest.approx(0.15)
    assert some_scores.mean("qa") is None, "no mean while data sets are missing"


def test_the_table_has_a_line_for_each_data_set_and_means(some_scores):
    lines = dev_markdown(some_scores).splitlines()
    assert len(lines) == 2 + 58 + 2
    assert lines[0].endswith("| made__up |")
    assert "| qa | arxiv | en | default | ndcg_at_10 | 50.00 |" in lines
    assert "| **qa** |  |  | **mean** | ndcg_at_10 | – |" in lines
    assert lines[-1] == "| **long-doc** |  |  | **mean** | recall_at_10 | 15.00 |"
    rows = dev_csv(some_scores).splitlines()
    assert rows[0] == "version,task,domain,language,dataset,metric,made__up"
    assert "AIR-Bench_24.05,qa,arxiv,en,default,ndcg_at_10,0.5" in rows
    assert "AIR-Bench_24.05,qa,finance,en,default,ndcg_at_10," in rows


def test_no_table_of_a_version_without_dev_splits_or_without_results(tmp_path):
    with pytest.raises(ConfigError, match="no split 'dev'"):
        read_dev_scores(str(tmp_path), "AIR-Bench_24.04", "made__up")
    with pytest.raises(ArtifactError, match=r"no results of AIR-Bench_24.05 for the retriever 'x'"):
        read_dev_scores(str(tmp_path), NEW, "x")
