"""The recipes by name, those for a laptop, and recipes of other packages."""

from importlib.metadata import EntryPoint

import pytest

from rayembed.config.data import DatasetConfig
from rayembed.config.document import read_yaml
from rayembed.config.override import override
from rayembed.config.run import Run, of_stages
from rayembed.config.settings import changed, parse
from rayembed.config.stage_data import without_negatives
from rayembed.config.table import entry_points
from rayembed.data.sources.pairs import PairsSource
from rayembed.errors import ConfigError
from rayembed.recipes import catalogue
from rayembed.recipes.catalogue import get_recipe, recipe_names
from rayembed.recipes.sample import EVALUATION_INSTRUCTIONS, MINILM, SMOLLM2, TASK_NAMES


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_run_of_its_name_that_comes_back_from_its_text(name):
    run = get_recipe(name)
    again = parse(Run, read_yaml(run.to_yaml()))
    assert again == run
    assert again.fingerprint == run.fingerprint
    assert run.name == name


def test_recipes_differ():
    fingerprints = {get_recipe(name).fingerprint for name in recipe_names()}
    assert len(fingerprints) == len(recipe_names()) >= 8


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="no recipe 'nvembed-quick'; did you mean 'nvembed-qu"):
        get_recipe("nvembed-quick")
    with pytest.raises(ConfigError, match="allowed: biencoder, biencoder-corpus, biencoder-q"):
        get_recipe("zzz")


def test_the_eight_cells_of_tables_2_and_3_are_settings():
    run = get_recipe("nvembed-quickstart")
    cells = {
        override(run, [f"model.pooling.kind={pooling}", f"model.mask={mask}"]).fingerprint
        for pooling in ("eos", "mean", "latent_attention", "self_attention")
        for mask in ("bidirectional", "causal")
    }
    assert len(cells) == 8
    assert run.fingerprint in cells


def test_the_quickstart_evaluates_with_the_instructions_of_training():
    run = get_recipe("nvembed-quickstart")
    trained = {dataset.query_instruction for dataset in run.data.datasets}
    assert set(run.evaluation.instructions.values()) == trained
    assert run.model.backbone.path == SMOLLM2
    assert run.evaluation.baselines == ("bm25", MINILM)
    files = [dataset.source.path for dataset in run.data.datasets]
    names = ("description", "sentence", "topics", "topics")
    assert files == [f"sample://wikipedia/{name}.jsonl" for name in names]


def test_instructions_are_for_tasks_that_the_sample_has():
    assert set(EVALUATION_INSTRUCTIONS) <= set(TASK_NAMES)


def test_own_pairs_need_one_setting():
    run = override(
        get_recipe("biencoder"), ["data.datasets.pairs.source.path=s3://bucket/pairs.jsonl"]
    )
    assert run.data.datasets[0].source.path == "s3://bucket/pairs.jsonl"
    assert run.model.backbone.path == MINILM
    assert [dataset.name for dataset in run.held_out_datasets] == ["pairs"]


def test_a_corpus_needs_one_setting_and_its_teacher_is_distilled():
    run = override(get_recipe("biencoder-corpus"), ["data.datasets.corpus.source.path=a.jsonl"])
    (dataset,), (stage,) = run.data.datasets, run.stages
    assert dataset.source.kind == "structure"
    assert dataset.held_out == run.held_out_datasets[0].held_out
    assert stage.loss.kind == "listwise_kl"
    assert stage.batch.num_negatives == dataset.mining.num_negatives
    reranked = override(run, ["data.datasets.corpus.mining.rescoring.model=reranker"])
    assert reranked.data.datasets[0].mining.rescoring.model == "reranker"


def test_every_recipe_ends_with_scores():
    """Fine-tunes on a user's own data end with a guard; a CDE's start and the one of an optional
    query encoder, whose linear layer is random, have nothing to lose.
    """
    recipes = [get_recipe(name) for name in recipe_names()]
    # A reranker's job scores it behind an embedder.
    assert all(recipe.takes_scores == recipe.model.embeds for recipe in recipes)
    guarded = {name for name in recipe_names() if get_recipe(name).evaluation.guard is not None}
    assert guarded == {"biencoder", "biencoder-corpus"}
    unnamed = {name for name in recipe_names() if not get_recipe(name).evaluation.any_tasks}
    assert unnamed - guarded - {"query-encoder", "reranker"} == {"cde"}


def test_every_stage_runs_alone_without_the_negatives_that_only_others_take():
    runs = [run for run in map(get_recipe, recipe_names()) if len(run.stages) > 1]
    alone = [of_stages(run, [stage.name]) for run in runs for stage in run.stages]
    assert len(alone) >= 4
    quickstart = get_recipe("nvembed-quickstart")
    retrieval, blend = (of_stages(quickstart, [stage.name]) for stage in quickstart.stages)
    mined = [dataset.name for dataset in quickstart.data.datasets if dataset.mining is not None]
    assert mined == ["wiki-description", "wiki-sentence"]
    assert all(dataset.mining is None for dataset in retrieval.data.datasets)
    assert blend.data == quickstart.data
    given = PairsSource(path="pairs.jsonl", negatives="wrong")
    assert without_negatives(DatasetConfig(name="p", source=given)).source.negatives is None


def test_a_stage_runs_alone_without_the_clusters_that_only_others_take():
    run = get_recipe("cde")
    (stage,) = run.stages
    blended = changed(stage, name="first", batch=changed(stage.batch, policy="blended"))
    run = changed(run, stages=(blended, stage))
    first, last = (of_stages(run, [one.name]) for one in run.stages)
    assert first.data.datasets[0].clusters is None
    assert last.data == run.data == of_stages(run, []).data


def renamed() -> Run:
    """A recipe of another package."""
    return get_recipe("biencoder").model_copy(update={"name": "renamed"})


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (f"{__name__}:renamed", None),
        (
            "no_such_package:recipe",
            "'renamed' to .*, but no_such_package:recipe cannot be",
        ),
        ("builtins:dict", "builtins:dict does not return a run"),
    ],
)
def test_another_package_adds_a_recipe(
    point: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = catalogue.recipe_names()
    found = [*entry_points("rayembed.recipes"), EntryPoint("renamed", point, "rayembed.recipes")]
    monkeypatch.setattr(catalogue, "entry_points", lambda group: found)
    catalogue._outside.cache_clear()
    try:
        assert set(catalogue.recipe_names()) == {*known, "renamed"}
        assert get_recipe("biencoder").name == "biencoder"
        if words is None:
            assert get_recipe("renamed").name == "renamed"
        else:
            with pytest.raises(ConfigError, match=words):
                get_recipe("renamed")
    finally:
        catalogue._outside.cache_clear()
