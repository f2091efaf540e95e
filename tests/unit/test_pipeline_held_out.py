"""Own pairs end with scores of their held-out part, by the one road, in every caller."""

import io
from pathlib import Path

import pytest
from own_pairs import own_run
from run_scoring import evaluate_reference, tasks_of
from tiny_folders import save_biencoder

from rayembed.config.data_run import data_of
from rayembed.config.override import override
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.prepare import prepare, prepare_datasets
from rayembed.errors import ConfigError, DataError
from rayembed.evaluation import validation
from rayembed.evaluation.validation import validation_factories
from rayembed.pipeline.checks.files import AtHand
from rayembed.pipeline.data.tables import print_data_run, print_prepared
from rayembed.pipeline.register.licences import task_facts
from rayembed.pipeline.run.dry_run import print_dry_run
from rayembed.pipeline.run.held_out import held_out_sets, with_sets
from rayembed.pipeline.run.validation import check_validated
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.gates import decide, parse_requirement
from rayembed.results.files import read_results

NULL = "data.datasets.pairs.held_out=null"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


def test_base_and_baselines_are_scored_on_the_held_out_part(folder: Path, tmp_path: Path) -> None:
    run = own_run(folder, "data.datasets.pairs.query_instruction=Find the answer")
    plans = prepare(run, PipelineContext(str(tmp_path / "out"), run.seed))
    (held_out,) = held_out_sets(run, plans)
    assert held_out.documents == 20
    assert f"{held_out.queries} queries over 20 documents" in held_out.summary
    assert "small differences say little" in held_out.summary
    scored = with_sets(run, [held_out])
    (own,) = scored.scores.own_sets
    assert (own.name, own.instruction) == ("pairs-held-out", "Find the answer")
    assert scored.fingerprint == run.fingerprint
    (task,) = tasks_of(scored)
    task.load_data()
    data = task.dataset["default"]["test"]
    assert (len(data["queries"]), len(data["corpus"])) == (held_out.queries, held_out.documents)
    save_biencoder(tmp_path / "other")
    scores = {
        name: evaluate_reference(name, scored, name="m", results_folder=tmp_path / name[-5:])
        for name in ("bm25", str(tmp_path / "other"))
    }
    assert [list(found) for found in scores.values()] == [["pairs-held-out"]] * 2
    assert scores["bm25"]["pairs-held-out"] > 0.5  # queries share words with their documents
    # What no catalogue of tasks knows stands beside the results, so that gates can name it.
    (results,) = (tmp_path / "other" / "results").glob("*/*")
    measured = read_results(results, task_facts)
    (score,) = measured
    assert (score.category, score.metric) == ("Retrieval", "ndcg_at_10")
    assert score.dataset == "own/pairs-held-out"
    assert decide("m/1", measured, [parse_requirement("Retrieval>=0")], None).holds
    off = override(run, [NULL])
    none = prepare(off, PipelineContext(str(tmp_path / "out"), run.seed))
    assert held_out_sets(off, none) == []


def test_training_is_scored_on_the_held_out_part_if_it_is_small(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = own_run(folder, "evaluation.validation={data: {kind: held_out}, every_steps: 1}")
    assert validation_factories(run) == []  # before it is made there is nothing to look at
    held_out = held_out_sets(run, prepare(run, PipelineContext(str(tmp_path), run.seed)))
    check_validated(run, held_out)
    (factory,) = validation_factories(with_sets(run, held_out))
    assert (factory.name, factory.size) == ("pairs-held-out", (20, "documents"))
    monkeypatch.setattr(validation, "MAX_SIZE", 19)
    told = r"pairs-held-out has 20 documents, more than 19.*hold fewer out"
    with pytest.raises(DataError, match=told):
        check_validated(run, held_out)


def test_a_run_ends_with_scores_unless_it_says_otherwise(folder: Path) -> None:
    run = own_run(folder)
    off = override(run, [NULL])
    named = override(off, ["evaluation.own_sets=[{name: judged, path: judged}]"])
    both = override(run, ["evaluation.benchmarks=[NanoBEIR]"])
    assert [r.takes_scores for r in (run, off, named, both)] == [True, False, True, True]
    assert [len(r.held_out_datasets) for r in (run, off, named, both)] == [1, 0, 0, 1]
    assert len({r.fingerprint for r in (run, off)}) == 2
    other = override(run, ["data.datasets.pairs.held_out.share=0.2"])
    assert other.fingerprint != run.fingerprint
    with pytest.raises(ConfigError, match="'pairs-held-out' is reserved for the held-out part"):
        override(run, ["evaluation.own_sets=[{name: pairs-held-out, path: judged}]"])


@pytest.mark.parametrize(
    ("recipe", "scored"),
    [
        ("biencoder", "of untrained, finetune, 3 mixtures, bm25 on wikipedia, pairs-held-out"),
        ("cde", "of untrained, finetune, bm25 on pairs-held-out"),
    ],
)
def test_the_recipes_of_own_pairs_hold_a_part_out_and_a_dry_run_says_so(
    recipe: str, scored: str
) -> None:
    run = get_recipe(recipe)
    shown = {}
    nothing = [NULL, "evaluation.guard=null", "evaluation.benchmarks=[]"]
    for name, assignments in {"on": [], "off": nothing}.items():
        out, tables = io.StringIO(), io.StringIO()
        changed_run = override(run, assignments)
        print_dry_run(changed_run, AtHand(changed_run), out=out, tables=tables)
        shown[name] = tables.getvalue()
    assert scored in shown["on"]
    assert "10% of documents, at most 1,000" in shown["on"]
    assert "none: no tasks are named, and nothing is held out" in shown["off"]
    assert "of documents" not in shown["off"]


def test_a_data_job_tells_where_the_held_out_part_lies(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = data_of(own_run(folder))
    out = io.StringIO()
    print_data_run(run, ["pairs"], out)
    assert "10% of" in out.getvalue()
    done = prepare_datasets(run, PipelineContext(str(tmp_path), run.seed))
    print_prepared(run, done)
    printed = capsys.readouterr().out.replace("\n", "")
    folder_out = done["pairs"][0].held_out_folder
    assert folder_out is not None
    assert "held out  pairs-held-out: " in printed
    assert f"{folder_out}/beir" in printed
