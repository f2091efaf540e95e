"""The published runs of NV-Embed against the tables of its paper (arXiv 2405.17428)."""

import pytest

from rayembed.data.mining.rules import PercPos, TopK
from rayembed.data.sources.beir import BeirSource
from rayembed.data.sources.earlier import RecordsSource
from rayembed.recipes.catalogue import get_recipe
from rayembed_papers.mixtures.datasets.nvembed import uniform_over_samples

CLAIM = "Given a claim, retrieve documents that support or refute the claim"
MEDRXIV = "Identify the main category of Medrxiv papers based on the titles and abstracts"


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
