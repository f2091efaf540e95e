"""The recipes, and the published ones against the paper's tables (arXiv 2405.17428)."""

from importlib.metadata import EntryPoint

import pytest

from rayembed.config.data import DatasetConfig
from rayembed.config.document import read_yaml
from rayembed.config.override import override
from rayembed.config.run import Run, of_stages
from rayembed.config.settings import changed, parse
from rayembed.config.stage_data import without_negatives
from rayembed.data.mining.rules import PercPos, TopK
from rayembed.data.sources.beir import BeirSource
from rayembed.data.sources.earlier import RecordsSource
from rayembed.data.sources.pairs import PairsSource
from rayembed.errors import ConfigError
from rayembed.recipes import catalogue, nvembed
from rayembed.recipes.building_blocks import EVALUATION_INSTRUCTIONS
from rayembed.recipes.catalogue import get_recipe, recipe_names
from rayembed.recipes.datasets.nvembed import uniform_over_samples
from rayembed.samples.assets import MINILM, SMOLLM2
from rayembed.samples.references import TASK_NAMES

CLAIM = "Given a claim, retrieve documents that support or refute the claim"
MEDRXIV = "Identify the main category of Medrxiv papers based on the titles and abstracts"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_run_of_its_name_that_comes_back_from_its_text(name):
    run = get_recipe(name)
    again = parse(Run, read_yaml(run.to_yaml()))
    assert again == run
    assert again.fingerprint == run.fingerprint
    assert run.name == name


def test_recipes_differ():
    fingerprints = {get_recipe(name).fingerprint for name in recipe_names()}
    assert len(fingerprints) == len(recipe_names()) == 35


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="no recipe 'nvembed-v3'; did you mean 'nvembed-v"):
        get_recipe("nvembed-v3")
    with pytest.raises(ConfigError, match="allowed: biencoder, biencoder-corpus, biencoder-q"):
        get_recipe("zzz")


def test_the_public_run_leaves_out_what_has_no_public_home():
    whole, public = (get_recipe(name) for name in ("nvembed-v2", "nvembed-v2-public"))
    names, kept = ([d.name for d in run.data.datasets] for run in (whole, public))
    assert set(names) - set(kept) == {"bioasq", "hover", "synthetic"}
    assert all("://" in p for d in public.data.datasets for p in d.source.paths.values())
    for before, stage in zip(whole.stages, public.stages, strict=True):
        assert stage.steps == before.steps
        assert stage.datasets == {n: w for n, w in before.datasets.items() if n in kept}


@pytest.mark.parametrize("name", ["nvembed-v1", "nvembed-v2"])
def test_published_runs_have_the_numbers_of_table_11(name):
    run = get_recipe(name)
    first, second = run.stages
    assert (first.steps, second.steps) == (20_000, 18_000)
    assert (first.optimizer.learning_rate, second.optimizer.learning_rate) == (2e-5, 1.5e-5)
    assert (first.batch.in_batch_negatives, second.batch.in_batch_negatives) == (True, False)
    for stage in run.stages:
        assert (stage.batch.global_pairs, stage.batch.num_negatives) == (128, 7)
        assert (stage.optimizer.warmup_steps, stage.optimizer.schedule.kind) == (50, "linear")
        assert stage.optimizer.weight_decay == 0.03
    model = run.model
    assert (model.lora.rank, model.lora.alpha, model.lora.dropout) == (16, 32, 0.1)
    assert (model.pooling.num_latents, model.pooling.num_heads) == (512, 8)
    assert model.pooling.head_dim is None  # the released checkpoint's: the hidden size
    assert (model.query_max_length, model.document_max_length) == (512, 512)
    assert (model.mask, model.backbone.dtype) == ("bidirectional", "bfloat16")
    assert run.placement.workers == 8


def test_version_2_has_the_samples_of_table_12():
    """Sums over the table's rows, by hand, in thousands."""
    datasets = {dataset.name: dataset for dataset in get_recipe("nvembed-v2").data.datasets}
    samples = {
        task: sum(d.num_samples for d in datasets.values() if d.task == task)
        for task in ("retrieval", "sts", "classification", "clustering")
    }
    retrieval = [16, 270, 500, 500, 87, 80, 100, 170, 140, 5, 2.4, 17, 3.6, 2, 2, 0.9]
    classification = [6, 20, 40, 10, 16, 24, 15, 15, 11, 11, 50, 27]
    clustering = [50, 50, 15, 15, 2.3, 2.3, 50, 40, 50, 40, 1.7]
    assert samples == {
        "retrieval": round(sum(retrieval) * 1000) + 120_000,
        "sts": 4_800,
        "classification": sum(classification) * 1000,
        "clustering": round(sum(clustering) * 1000),
    }
    # NLI and PAQ have two instructions each, and the synthetic set is no row of the table.
    assert len(datasets) == len(retrieval) + 2 + 1 + 3 + len(classification) + len(clustering)
    assert datasets["fever"].query_instruction == CLAIM
    assert datasets["scifact"].query_instruction.startswith("Given a scientific claim, retrieve")
    assert datasets["reddit-examples"].query_instruction == MEDRXIV  # the paper's own slip
    assert datasets["msmarco"].query_instruction.startswith("Given a web search query")
    for name, dataset in datasets.items():
        assert bool(dataset.query_instruction) == (name != "synthetic")
    # Its records bring their own instructions.
    assert isinstance(datasets["synthetic"].source, RecordsSource)


def test_only_sts_puts_the_instruction_before_documents():
    """Sections 4 and 4.2."""
    for dataset in get_recipe("nvembed-v2").data.datasets:
        expected = dataset.query_instruction if dataset.task == "sts" else ""
        assert dataset.document_instruction == expected


def test_version_2_mines_retrieval_and_sts_with_the_positive_aware_rule():
    for dataset in get_recipe("nvembed-v2").data.datasets:
        mined = dataset.task in ("retrieval", "sts") and dataset.name != "synthetic"
        assert (dataset.mining is not None) == mined
        if mined:
            assert dataset.mining.teacher.startswith("hf://intfloat/e5-mistral-7b-instruct")
            assert dataset.mining.rule == PercPos(max_relative_score=0.95)
            assert dataset.mining.num_negatives == 7
            prefix = f"Instruct: {dataset.query_instruction}\nQuery: "
            assert dataset.mining.query_prefix == prefix
            # Similar sentences are asked for from both sides (section 4.2).
            assert dataset.mining.document_prefix == (prefix if dataset.task == "sts" else "")
            # A benchmark's own corpus is searched, not only the documents that are relevant.
            corpus = dataset.mining.corpus
            assert (corpus is not None) == isinstance(dataset.source, BeirSource)
            assert corpus is None or corpus.path == dataset.source.corpus


def test_version_1_is_version_2_without_mining_added_and_synthetic_data_and_examples():
    """Table 4: "Label-based approach + [S0]"; section 5.2.5 names what was added."""
    v1 = {dataset.name: dataset for dataset in get_recipe("nvembed-v1").data.datasets}
    v2 = {dataset.name: dataset for dataset in get_recipe("nvembed-v2").data.datasets}
    # Nothing positive-aware: negatives come with the rows, or are the teacher's first ones.
    assert all(dataset.has_negatives for dataset in v1.values())
    searched = {name for name, dataset in v1.items() if dataset.mining is not None}
    assert all(isinstance(v1[name].mining.rule, TopK) for name in searched)
    sts = {"sts12", "sts22", "stsbenchmark"}
    assert searched == {"paq-passages", "paq-documents", "stackexchange", "bioasq", *sts}
    gone = {name for name in v2 if not name.endswith("-examples")} - set(v1)
    assert gone == {"hover", "scifact", "nfcorpus", "miracl", "mr-tydi", "synthetic"}
    examples = {name.removesuffix("-examples") for name in v2 if name.endswith("-examples")}
    assert len(examples) == 5 + 11  # "5 multi-class classification", "all 11 clustering"
    assert {f"{name}-labels" for name in examples} == set(v1) - set(v2)


def test_classes_are_read_in_the_form_that_their_name_tells():
    """Section 5.2.4: examples in version 2, names of classes in version 1; seven always names."""
    always = 0
    for name in ("nvembed-v1", "nvembed-v2"):
        for dataset in get_recipe(name).data.datasets:
            form = getattr(dataset.source, "label_form", None)
            if form is not None:
                assert dataset.name.endswith(f"-{form}s")
            else:
                assert not dataset.name.endswith("-labels")
            always += name == "nvembed-v2" and dataset.name.endswith("-labels")
    assert always == 7


def test_what_is_evaluated_is_taken_out_of_what_is_trained_on():
    """Section 4.2: equal texts of all clustering data sets, similar ones of two others."""
    told = 0
    for dataset in get_recipe("nvembed-v2").data.datasets:
        overlap = dataset.cleaning.overlap
        if dataset.name.startswith(("emotion-", "amazon-counterfactual-")):
            assert overlap.max_similarity is not None
        elif dataset.task == "clustering":
            assert overlap.max_similarity is None
        else:
            assert overlap is None
        # Drawn examples are never of a benchmark; negatives in the rows are looked at if asked.
        if overlap is not None:
            brings = getattr(dataset.source, "negatives", None) is not None
            assert overlap.negatives == brings
            told += brings
    assert told == 3


def test_the_first_stage_is_retrieval_and_the_second_everything_by_number_of_samples():
    run = get_recipe("nvembed-v2")
    first, second = run.stages
    datasets = {dataset.name: dataset for dataset in run.data.datasets}
    assert set(first.datasets) == {n for n, d in datasets.items() if d.task == "retrieval"}
    assert set(second.datasets) == set(datasets)
    for stage in run.stages:
        for name, weight in stage.datasets.items():
            assert weight == datasets[name].num_samples
    # As many passes as the reading of "uniformly sampled" rests on.
    assert 20_000 * 128 / sum(first.datasets.values()) == pytest.approx(1.27, abs=0.01)
    assert 18_000 * 128 / sum(second.datasets.values()) == pytest.approx(0.89, abs=0.01)
    with pytest.raises(ValueError, match="no num_samples"):
        uniform_over_samples(get_recipe("biencoder").data.datasets)


@pytest.mark.parametrize("base", ["nvembed-quickstart", "nvembed-v2"])
def test_single_stages_of_table_4(base):
    two = get_recipe(base)
    for suffix, in_batch in (("single-stage", False), ("single-stage-in-batch", True)):
        run = get_recipe(f"{base}-{suffix}")
        (stage,) = run.stages
        assert stage.datasets == two.stages[1].datasets
        assert stage.batch.in_batch_negatives is in_batch
        assert stage.steps == two.stages[0].steps + two.stages[1].steps
        assert (run.model, run.data) == (two.model, two.data)


@pytest.mark.parametrize("base", ["nvembed-quickstart", "nvembed-v2"])
def test_reversed_stages_of_table_4(base):
    two, run = get_recipe(base), get_recipe(f"{base}-reversed")
    blend, retrieval = run.stages
    assert (blend.name, retrieval.name) == ("blend", "retrieval")
    assert (blend.batch, retrieval.batch) == (two.stages[1].batch, two.stages[0].batch)
    assert (blend.datasets, retrieval.datasets) == (two.stages[1].datasets, two.stages[0].datasets)
    assert [s.optimizer for s in run.stages] == [s.optimizer for s in two.stages]
    assert (run.model, run.data, run.evaluation) == (two.model, two.data, two.evaluation)
    with pytest.raises(ConfigError, match="only two stages can be reversed"):
        nvembed.reversed_stages(get_recipe("biencoder"), "x")


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
    assert run.evaluation.benchmarks == ("wikipedia",)
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
    """Fine-tunes on a user's own data end with a guard; a CDE's start has nothing to lose."""
    assert all(get_recipe(name).takes_scores for name in recipe_names())
    guarded = {name for name in recipe_names() if get_recipe(name).evaluation.guard is not None}
    assert guarded == {"biencoder", "biencoder-corpus"}
    unnamed = {name for name in recipe_names() if not get_recipe(name).evaluation.any_tasks}
    assert unnamed == {"cde"}
    public = get_recipe("nvembed-v2-public")
    assert public.evaluation.benchmarks == ("NanoBEIR",)
    assert public.scores.benchmarks == ("NanoBEIR",)


def test_every_stage_runs_alone_without_the_negatives_that_only_others_take():
    runs = [run for run in map(get_recipe, recipe_names()) if len(run.stages) > 1]
    alone = [of_stages(run, [stage.name]) for run in runs for stage in run.stages]
    assert len(alone) == 28
    quickstart = get_recipe("nvembed-quickstart")
    retrieval, blend = (of_stages(quickstart, [stage.name]) for stage in quickstart.stages)
    mined = [dataset.name for dataset in quickstart.data.datasets if dataset.mining is not None]
    assert mined == ["wiki-description", "wiki-sentence"]
    assert all(dataset.mining is None for dataset in retrieval.data.datasets)
    assert blend.data == quickstart.data
    given = PairsSource(path="pairs.jsonl", negatives="wrong")
    dataset = DatasetConfig(
        name="p", source=given, repair={"judge": {"kind": "cross_encoder", "model": "m"}}
    )
    assert without_negatives(dataset).source.negatives is None
    assert without_negatives(dataset).repair is None


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
        ("no_such_package:recipe", "'renamed' is no_such_package:recipe, which cannot be imported"),
        ("builtins:dict", "builtins:dict returns no run"),
    ],
)
def test_another_package_adds_a_recipe(
    point: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = catalogue.recipe_names()
    found = [EntryPoint("renamed", point, "rayembed.recipes")]
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
