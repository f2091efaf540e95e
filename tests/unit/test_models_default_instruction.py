"""A model that learnt one instruction uses it where nobody names one."""

import json
from pathlib import Path
from types import SimpleNamespace

import mteb
import numpy as np
import pytest
from made_up_articles import run_over
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer
from tiny_models import save_encoder

from rayembed.config.evaluation import Prompts
from rayembed.config.override import override
from rayembed.evaluation.prompts import ModelPrompts, folder_prompts
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.passes.encoding import encode
from rayembed.registry.openai_schema import read_encode_options
from rayembed.registry.pyfunc_model import OpenAIEmbeddings, _own_prefixes
from rayembed.training.checkpoints.export import export

TEXTS = ["own3 place", "the sentence number 2"]
TOLD = "data.datasets.wiki.query_instruction=Find it"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("instructed")
    return override(
        run_over(folder / "none.json"),
        [
            f"model.backbone={{path: {save_encoder(folder / 'base')}, dtype: float32}}",
            "model.query_max_length=32",
            "model.document_max_length=32",
            "model.query_prefix=q ",
        ],
    )


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    place = tmp_path_factory.mktemp("told") / "model"
    export(override(run, [TOLD]), None, str(place))
    return place


def prompts_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]


def test_only_one_instruction_of_the_whole_last_stage_is_a_default(run):
    assert run.default_instructions() == {}
    told = override(run, [TOLD])
    assert told.default_instructions() == {"query": "Find it"}
    both = override(told, ["data.datasets.wiki.document_instruction=Read it"])
    assert both.default_instructions() == {"query": "Find it", "document": "Read it"}

    def beside(**changes):
        values = told.model_dump(mode="json")
        first = values["data"]["datasets"][0]
        values["data"]["datasets"].append({**first, "name": "other", **changes})
        values["stages"][0]["datasets"]["other"] = 1.0
        return type(told).model_validate(values)

    assert beside().default_instructions() == {"query": "Find it"}
    assert beside(query_instruction="Find that").default_instructions() == {}
    assert beside(query_instruction="").default_instructions() == {}
    rows = {"kind": "pairs", "path": "p", "instruction": "task"}
    assert beside(source=rows).default_instructions() == {}
    # Of the last stage alone.
    values = beside(query_instruction="Find that").model_dump(mode="json")
    values["stages"].append({**values["stages"][0], "name": "two", "datasets": {"other": 1.0}})
    later = type(told).model_validate(values)
    assert later.default_instructions() == {"query": "Find that"}


def test_every_way_to_the_vectors_uses_it(folder, tmp_path):
    named = {name: prompts_of(folder)[name] for name in ("query", "document", "wiki", "STS")}
    assert named == {"query": "q Find it ", "document": "", "wiki": "q Find it ", "STS": "q "}
    model = load_model(folder)
    told = encode(model, TEXTS, role="query", instruction="Find it")
    bare = encode(model, TEXTS, role="query", instruction="")
    assert np.abs(told - bare).max() > 1e-3
    np.testing.assert_allclose(encode(model, TEXTS, role="query"), told, atol=1e-6)
    plain = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(plain.encode_query(TEXTS), told, atol=1e-5)
    documents = encode(model, TEXTS, role="document")
    np.testing.assert_allclose(documents, plain.encode_document(TEXTS), atol=1e-5)
    # It stays with the model when that is saved anew.
    model.save(tmp_path / "again")
    assert prompts_of(tmp_path / "again")["query"] == "q Find it "
    again = encode(load_model(tmp_path / "again"), TEXTS, role="query")
    np.testing.assert_allclose(again, told, atol=1e-6)


def test_the_registered_model_uses_it_and_never_twice(folder):
    served = object.__new__(OpenAIEmbeddings)
    served.template, served.prefixes = None, _own_prefixes(folder)
    served.model = SimpleNamespace(prompts=prompts_of(folder))

    def prompt(**request):
        return served._prompt(read_encode_options({"role": "query", **request}, [32]))

    assert prompt() == "q Find it "
    assert prompt(instruction="Find that") == "q Find that "
    assert prompt(instruction="") == "q "
    served.prefixes = _own_prefixes(folder / "nowhere")  # of others: what its prompts say
    served.model = SimpleNamespace(prompts={"query": "ask: "})
    assert (prompt(), prompt(instruction="Find")) == ("ask: ", "ask: Find ")


def test_an_evaluation_uses_it_as_plain_mteb_does(run, folder, tmp_path):
    """Before queries of tasks that nobody names an instruction of; symmetric tasks have none."""
    export(run, None, str(tmp_path / "bare"))
    retrieval, sts = (mteb.get_task(name).metadata for name in ("SciFact", "STS12"))
    for place, expected in ((folder, "q Find it "), (tmp_path / "bare", "q ")):
        prompts = ModelPrompts(Prompts(), folder_prompts(place, check_loadable(place)))
        assert prompts.instruction(retrieval, PromptType.query) == expected
        assert prompts.instruction(retrieval, PromptType.document) == ""
        assert prompts.instruction(sts, None) == "q "
        named = ModelPrompts(Prompts(instructions={"SciFact": ""}), prompts.folder)
        assert named.instruction(retrieval, PromptType.query) == "q "
    bare = prompts_of(tmp_path / "bare")
    assert (bare["query"], bare["document"], "wiki" in bare) == ("q ", "", False)
    settings = json.loads((tmp_path / "bare" / "rayembed.json").read_text())
    assert "default_instructions" not in settings
