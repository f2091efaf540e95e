"""Clean scores of mteb's own tasks, read from a hub on loopback, and declared training data."""

import json
from functools import partial
from pathlib import Path

import pytest
from mteb_hub import mteb_hub
from planted_texts import Words, plan_of

from rayembed.evaluation.benchmarks import MtebTask, benchmark_tasks
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.score import Store, score
from rayembed.pipeline.evaluate.findings import ScoredModels
from rayembed_extras.clean_scores.declared import declared_tasks
from rayembed_extras.clean_scores.finding import clean_scores
from rayembed_extras.clean_scores.plans import PlansUnknownError, plans_of
from rayembed_extras.clean_scores.scored_texts import task_texts

SCORED = (
    *("FiQA2018", "AskUbuntuDupQuestions", "Banking77Classification", "STSBenchmark"),
    *("SprintDuplicateQuestions", "TwentyNewsgroupsClustering.v2", "SummEvalSummarization.v2"),
)
NO_ITEMS = ("TwentyNewsgroupsClustering.v2", "SummEvalSummarization.v2")
MINILM = "sentence-transformers/all-MiniLM-L6-v2"

pytestmark = pytest.mark.filterwarnings("ignore:The used Evaluator is deprecated")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    tasks = [task.load() for task in benchmark_tasks("MTEB(eng, v2)")]
    with mteb_hub(tasks, tmp_path_factory.mktemp("hub"), 16) as running:
        yield running


def test_the_texts_of_every_task_of_the_benchmark_are_read(hub):
    tasks = benchmark_tasks("MTEB(eng, v2)")
    assert len(tasks) == 41
    for factory in tasks:
        task = factory.load()
        (part,) = task_texts(task)
        assert part.items, factory.name
        assert all(text.strip() for item in part.items for text in item), factory.name
        is_search = task.metadata.type in ("Retrieval", "Reranking")
        assert (part.documents is not None) == is_search
        if is_search:
            blocks = [*part.document_blocks()]
            known = {name for ids, _ in blocks for name in ids}
            assert all(known.issuperset(of_query) for of_query in part.positives)
            assert sum(len(texts) for _, texts in blocks) == len(known)


def test_clean_scores_of_all_kinds_of_tasks_agree_with_mteb(hub, tmp_path):
    tasks = [MtebTask(name) for name in SCORED]
    store = Store(str(tmp_path / "results"))
    scored = score(Words(), tasks, partial(run_here, device="cpu"), store)
    (fiqa,) = task_texts(MtebTask("FiQA2018").load())
    plan = plan_of(tmp_path, [fiqa.items[0][0], next(fiqa.document_blocks())[1][0]])
    subject = ScoredModels({"m": scored}, "m", None, "/m", str(tmp_path), plans={"s": plan})
    finding = clean_scores(subject)
    assert set(finding.metrics["clean"]) == {*SCORED} - {*NO_ITEMS}
    for task in set(SCORED[1:]) - {*NO_ITEMS}:
        assert finding.metrics["clean"][task] == pytest.approx(scored.scores[task], abs=1e-5)
        assert finding.metrics["seen_share"][task] == 0.0
    assert finding.metrics["seen_share"]["FiQA2018"] == pytest.approx(1 / len(fiqa.items))
    assert finding.metrics["clean"]["FiQA2018"] != pytest.approx(scored.scores["FiQA2018"])


def test_a_task_whose_data_cannot_be_had_is_named_and_stops_no_other(hub, tmp_path, monkeypatch):
    store = Store(str(tmp_path / "results"))
    tasks = [MtebTask("STSBenchmark"), MtebTask("SICK-R")]
    scored = score(Words(), tasks, partial(run_here, device="cpu"), store)

    def with_retries(load, name, **_):
        if name == "STSBenchmark":
            raise OSError("gone")
        load()

    monkeypatch.setattr("rayembed.evaluation.jobs.with_retries", with_retries)
    plan = plan_of(tmp_path, [])
    subject = ScoredModels({"m": scored}, "m", None, "/m", str(tmp_path), plans={"s": plan})
    finding = clean_scores(subject)
    assert set(finding.metrics["seen_share"]) == {"SICK-R"}
    assert "Without the texts of 1 tasks: STSBenchmark: " in finding.lines[-1]


def test_declared_tasks_have_their_reason():
    meta = model_meta("m", "r", training_datasets={"SciFact"}, adapted_from=MINILM)
    told = declared_tasks(meta, ["SciFact", "NQ", "ArguAna"])
    assert told == {
        "SciFact": "its data are among the training data of rayembed/m",
        "NQ": f"its data are among the declared training data of the base {MINILM}",
    }
    unknown = model_meta("m", "r", adapted_from=MINILM)
    assert set(declared_tasks(unknown, ["SciFact", "NQ"])) == {"NQ"}
    assert declared_tasks(model_meta("m", "r"), ["SciFact", "NQ"]) == {}


class Scored:
    """Scores of one task, of which only names are read."""

    model = None

    def __init__(self, **known):
        self.meta = model_meta("m", "r", **known)
        self.tasks = [type("Scoring", (), {"name": "NQ", "score": 0.5})()]


def test_without_a_plan_declared_data_alone_are_reported(tmp_path):
    subject = ScoredModels({"m": Scored(adapted_from=MINILM)}, "m", None, "/m", str(tmp_path))
    finding = clean_scores(subject)
    assert [row[0] for row in finding.table.rows] == ["NQ"]
    assert finding.lines == ("1 of 1 tasks are not zero-shot; no batch plan is known.",)
    unknown = ScoredModels({"m": Scored()}, "m", None, "hf://nobody/nothing", str(tmp_path))
    assert clean_scores(unknown) is None


def judged(reference, folder, **known):
    scored = Scored()
    scored.model = type("Spec", (), {"reference": reference, **known})()
    return ScoredModels({"m": scored}, "m", None, reference, str(folder))


def test_the_plans_of_a_model_in_the_folder_of_its_run_are_known(tmp_path):
    run = tmp_path / "runs" / "r"
    model = run / "models" / "finetune"
    model.mkdir(parents=True)
    (run / "plans.json").write_text('{"finetune": "abc-1"}')
    assert plans_of(judged(str(model), tmp_path)) == [str(tmp_path / "plans" / "abc-1")]
    elsewhere = tmp_path / "elsewhere" / "models" / "m"
    elsewhere.mkdir(parents=True)
    (line,) = clean_scores(judged(str(elsewhere), tmp_path)).lines
    assert line == (f"Clean scores are not known: {elsewhere} does not lie in the folder of a run.")
    assert plans_of(judged("hf://org/name@main", tmp_path)) == []


class Client:
    """MLflow with one version, whose run has a record."""

    def __init__(self, record):
        self.record = record

    def get_model_version_by_alias(self, name, alias):
        return type("Version", (), {"run_id": "run", "version": "3"})()

    def list_artifacts(self, run_id):
        return [type("File", (), {"path": "provenance.json"})()] if self.record else []

    def download_artifacts(self, run_id, name, folder):
        path = Path(folder) / name
        path.write_text(json.dumps(self.record))
        return str(path)


def test_the_plans_of_a_registered_version_are_those_of_its_run(tmp_path, monkeypatch):
    """In the storage of the evaluation, or beside MLflow's SQLite file."""
    client = Client({"plans": {"finetune": "abc-1"}})
    monkeypatch.setattr("rayembed_extras.clean_scores.plans.connect", lambda uri: client)
    uri = f"sqlite:///{tmp_path}/trained/mlflow.db"
    subject = judged("models:/m@champion", tmp_path / "storage", tracking_uri=uri)
    with pytest.raises(
        PlansUnknownError, match=r"abc-1 of models:/m@champion is not in .*storage or"
    ):
        plans_of(subject)
    for place in ("trained", "storage"):
        plan = tmp_path / place / "plans" / "abc-1"
        plan.mkdir(parents=True)
        (plan / "manifest.json").write_text("{}")
        assert plans_of(subject) == [str(plan)]
    for record in (None, {"data": {}}):
        client.record = record
        (line,) = clean_scores(subject).lines
        assert line == (
            "Clean scores are not known: the MLflow run of models:/m@champion names no batch plan."
        )
