"""Instructions of a run are read alike from its settings, its folder, by mteb and by others."""

import json
from itertools import product

import mteb
import numpy as np
import pytest
from mteb.models import SentenceTransformerEncoderWrapper
from mteb.models.abs_encoder import get_prompt
from mteb.types import PromptType
from pydantic import ValidationError
from sentence_transformers import SentenceTransformer
from tiny_folders import ARCHITECTURES, tiny_parts, tiny_settings
from word_articles import run_over_words, write_word_articles

from rayembed.config.evaluation import ModelUnderTest, Prompts
from rayembed.config.override import override
from rayembed.config.settings import changed, parse
from rayembed.errors import ConfigError
from rayembed.evaluation.prompts import ModelPrompts, folder_prompts, unsaved_prompts
from rayembed.evaluation.run_scores import make_spec, prompts_for, run_prompts
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.loading.saved_prompts import saved_instructions
from rayembed.models.sentence_module import as_sentence_transformer

INSTRUCTIONS = {"WikiSentenceRetrieval": "find the lazy dog", "WikiTopicClustering": ""}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_in_memory_has_the_prompts_of_its_folder(kind, tmp_path):
    """The heads of the model's own tokenizer, of its folder and of its settings are the same."""
    folder = ARCHITECTURES[kind](tmp_path / kind)
    model = load_model(folder)
    model.save(folder, instructions={"SciFact": "check it", "pairs": "find it: ", "NQ": ""})
    read = folder_prompts(folder, check_loadable(folder))
    made = unsaved_prompts(model.config, {"SciFact": "check it", "pairs": "find it: ", "NQ": ""})
    assert made == read
    for role in ("query", "document"):
        for instruction in ("", "check it", "find it: "):
            assert read.head(instruction, role) == model.tokenizer.prompt(instruction, role)
    assert read.named["SciFact"] == model.tokenizer.prompt("check it", "query")


NAMED = {
    "STS": "compare",
    "Classification": "sort",
    "Retrieval": "find the world",
    "SciFact": "check it",
    "ImdbClassification": "",
}
"""Instructions of a run, by task and by type of task."""
SIDES = (PromptType.query, PromptType.document)
READ = {
    ("STSBenchmark", None): "compare",
    ("Banking77Classification", None): "sort",
    ("ImdbClassification", None): "",
    ("TwentyNewsgroupsClustering", None): "the lazy dog",
    ("NFCorpus", PromptType.query): "find the world",
    ("SciFact", PromptType.query): "check it",
    ("FiQA2018", PromptType.query): "over it",
}
"""What a task's texts have of them, and of data sets whose names mteb knows."""
DOCUMENTS = [("SciFact", SIDES[1]), ("NFCorpus", SIDES[1]), ("AskUbuntuDupQuestions", SIDES[1])]


INSTRUCTED = ("nvembed", "causal2vec")


def with_datasets(run, instructions):
    """The run with further data sets of these names, like its first, each with an instruction."""
    first, *others = run.data.datasets
    more = [changed(first, name=n, query_instruction=text) for n, text in instructions.items()]
    return changed(run, data=changed(run.data, datasets=(first, *others, *more)))


@pytest.fixture
def named(request, tmp_path):
    """A run with instructions under all names that mteb reads, and the folder of its model."""
    kind = request.param
    run = run_over_words(write_word_articles(tmp_path / "articles.json"), instructions=NAMED)
    run = with_datasets(run, {"Clustering": "the lazy dog", "FiQA2018-query": "over it"})
    run = override(
        run,
        [
            "data.datasets.wiki.query_instruction=find 7",
            "data.datasets.wiki.document_instruction=a dog",
        ],
    )
    lengths = {"query_max_length": 96} if kind in INSTRUCTED else {}
    run = run.model_copy(update={"model": tiny_settings(kind, **lengths)})
    model = build_model(run.model, tiny_parts(kind, tmp_path / "parts"), seed=3).eval()
    model.default_instructions = run.default_instructions()
    model.save(tmp_path / "model", instructions=run.instructions)
    return run, tmp_path / "model"


def loaded(run, folder):
    """The folder's model in sentence-transformers, which needs rayembed for all but one kind."""
    load = SentenceTransformer if run.model.has_plain_format else as_sentence_transformer
    return load(str(folder), device="cpu")


def heads(prompts, asked):
    """Literal text before the texts of each task and side."""
    found = {}
    for name, side in asked:
        metadata = mteb.get_task(name).metadata
        found[name, side] = prompts.shown(prompts.instruction(metadata, side))
    return found


@pytest.mark.parametrize("named", ARCHITECTURES, indirect=True)
@pytest.mark.filterwarnings("ignore:Some prompts are not", "ignore:Task name wiki")
def test_names_that_mteb_reads_are_read_by_all(named):
    """Tasks, their types, one side of a task, roles."""
    run, folder = named
    assert run.default_instructions() == {"query": "find 7", "document": "a dog"}
    asked = [*READ, *DOCUMENTS]
    alone = heads(ModelPrompts(Prompts(), folder_prompts(folder, check_loadable(folder))), asked)
    assert heads(prompts_for(folder, run), asked) == alone
    assert heads(run_prompts(run), asked) == alone, "as in validation"
    wrapped = SentenceTransformerEncoderWrapper(loaded(run, folder))
    by_mteb = {
        (name, side): get_prompt(wrapped.model_prompts, mteb.get_task(name).metadata, side) or ""
        for name, side in asked
    }
    assert by_mteb == alone
    for key, instruction in READ.items():
        assert alone[key] == run.model.prompt(instruction), key
    for key in DOCUMENTS:
        assert alone[key] == run.model.prompt("a dog", "document"), key
    # Other queries have the default of the folder, or what is published of their task.
    other = ("AskUbuntuDupQuestions", SIDES[0])
    (shown,) = heads(run_prompts(run), [other]).values()
    assert heads(prompts_for(folder, run), [other]) == {other: shown}
    published = run.model.prompt("Retrieve duplicate questions from AskUbuntu forum")
    assert shown == (published if run.model.kind in INSTRUCTED else run.model.prompt("find 7"))


@pytest.mark.parametrize("named", ARCHITECTURES, indirect=True)
@pytest.mark.filterwarnings("ignore:Some prompts are not", "ignore:Task name wiki")
def test_vectors_under_those_names_are_sentence_transformers_own(named):
    run, folder = named
    texts = ["the lazy dog", "7 over the world"]
    asked = {"reference": str(folder), "dtype": "float32", "context": "none"}
    spec = make_spec(parse(ModelUnderTest, asked))
    embed, plain = spec.load("cpu"), loaded(run, folder)
    for task, name in (("STSBenchmark", "STS"), ("NFCorpus", "Retrieval"), ("SciFact", "SciFact")):
        side = None if name == "STS" else SIDES[0]
        encoded = spec.encode_spec(mteb.get_task(task).metadata, side)
        theirs = plain.encode_query(texts, prompt_name=name)
        np.testing.assert_allclose(embed(texts, encoded), theirs, atol=1e-6)
        # Control: without its name the role's stands there.
        assert np.abs(plain.encode_query(texts) - theirs).max() > 1e-4


@pytest.mark.parametrize("named", ARCHITECTURES, indirect=True)
def test_a_model_that_is_saved_again_keeps_its_prompts(named, tmp_path):
    _, folder = named
    model = load_model(folder)
    model.save(tmp_path / "again", instructions=saved_instructions(folder, model.config))
    first, again = (
        json.loads((place / "config_sentence_transformers.json").read_text())["prompts"]
        for place in (folder, tmp_path / "again")
    )
    assert again == first


def test_names_that_cannot_be_read_alike_are_refused(tmp_path):
    run = run_over_words(write_word_articles(tmp_path / "articles.json"))
    for task, side in product(("SciFact", "STS"), ("query", "document")):
        with pytest.raises(
            ConfigError, match=rf"names '{task}-{side}', which is one side of the task '{task}'"
        ):
            override(run, [f"evaluation.instructions={{{task}-{side}: check it}}"])
    for role in ("query", "document"):
        with_datasets(run, {role: ""})  # without an instruction it may
        with pytest.raises(ValidationError, match=f"cannot be saved under the name '{role}'"):
            with_datasets(run, {role: "find it"})
    model = load_model(ARCHITECTURES["biencoder"](tmp_path / "model"))
    with pytest.raises(ConfigError, match="cannot be saved under the name 'query'"):
        model.save(tmp_path / "model", instructions={"query": "find it"})


def test_a_run_without_a_folder_has_the_instructions_of_its_data(tmp_path):
    run = run_over_words(write_word_articles(tmp_path / "articles.json"), instructions=INSTRUCTIONS)
    run = override(run, ["data.datasets.wiki.query_instruction=told"])
    assert run.instructions == {"wiki": "told", **INSTRUCTIONS}
    assert run_prompts(run).folder.named["wiki"] == "told "
