import dataclasses
import re
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.pipeline.register.licences import base_licence, data_licences
from rayembed.registry.card_parts import plain_card
from rayembed.registry.model_card import hub_name, model_card
from rayembed.registry.register import DESCRIPTION_CHARACTERS, describe
from rayembed.results.scores import TaskScore

PROVENANCE = {
    "code": {"version": "0.1.0", "commit": "c0ffee", "uncommitted_changes": True},
    "packages": {"torch": "2.13.0"},
    "constraints": {"path": "cluster/constraints.txt", "sha256": "ab12"},
    "python": "3.11.7",
    "hardware": {"cpu": "CPU X", "cpu_cores": 2, "gpus": []},
}
TABLE = "| task | score |\n|---|---|\n| Wiki | 0.7123 |"


RESULTS = tuple(
    TaskScore(
        task=task,
        category=category,
        metric=metric,
        value=value,
        dataset=f"mteb/{task.lower()}",
        dataset_revision="d" * 40,
        scores={("test", part): value for part in parts},
        model_revision="w",
        mteb_version="2.26.24",
    )
    for task, category, metric, value, parts in (
        ("SciFact", "Retrieval", "ndcg_at_10", 0.64321987, ("default",)),
        ("NFCorpus", "Retrieval", "ndcg_at_10", 0.3, ("default",)),
        ("Massive", "Classification", "accuracy", 0.7, ("de", "en")),
        ("Broken", "STS", "cosine_spearman", float("nan"), ("default",)),
    )
)


def make_run(kind="nvembed", backbone="hf://org/base@abc", instruction="Find it"):
    stage = {
        "datasets": {"pairs": 2.0, "topics": 1.0},
        "batch": {"global_pairs": 24, "num_negatives": 5, "in_batch_negatives": True},
        "optimizer": {"learning_rate": 1e-4},
        "steps": 70,
    }
    source = {"kind": "pairs", "path": "p.jsonl", "negatives": "negatives"}
    return parse(
        Run,
        {
            "name": "my-model",
            "seed": 3,
            "model": {"kind": kind, "backbone": {"path": backbone}},
            "data": {
                "datasets": [
                    {"name": "pairs", "source": source, "query_instruction": instruction},
                    {"name": "topics", "source": source, "task": "clustering"},
                ]
            },
            "stages": [
                {**stage, "name": "first"},
                {**stage, "name": "second", "steps": 30, "datasets": {"topics": 1.0}},
            ],
        },
    )


def card(run, **changes):
    arguments = {
        "fingerprint": run.fingerprint,
        "dimensions": 576,
        "scores": TABLE,
        "provenance": PROVENANCE,
        "registered_model": "reg",
        **changes,
    }
    return model_card(run, **arguments)


def front_matter(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_card_says_what_the_run_says():
    run = make_run()
    text = card(run)
    front = front_matter(text)
    assert front["base_model"] == "org/base"
    assert {"sentence-transformers", "feature-extraction"} <= set(front["tags"])
    assert TABLE in text
    assert "| first | 70 | 24 | 5 | yes | pairs (2), topics (1) |" in text
    assert "| second | 30 | 24 | 5 | yes | topics (1) |" in text
    assert run.fingerprint in text
    assert "commit c0ffee, with uncommitted changes" in text
    assert "torch 2.13.0" in text
    assert "models:/reg@candidate" in text
    assert "vector of 576 numbers" in text
    assert "None" not in text


def test_the_card_of_a_start_or_a_mixture_says_what_it_is():
    run = override(make_run(), ["data.datasets.pairs.source.path=hf://datasets/org/own@abc"])
    trained, mixture, start = (card(run, share=share) for share in (1.0, 0.25, 0.0))
    origin = "Trained from `hf://org/base@abc"
    assert origin in trained
    assert origin not in mixture + start
    assert "25% of a model trained from `hf://org/base@abc" in mixture
    assert "and 75% of what it was trained from" in mixture
    assert "These stages trained the 25% of the mixture." in mixture
    assert "Not trained: it is `hf://org/base@abc" in start
    assert "These stages trained a model that was not kept" in start
    assert "These stages" not in trained
    assert "datasets" not in front_matter(start)
    assert front_matter(trained)["datasets"] == front_matter(mixture)["datasets"] == ["org/own"]
    assert "It was trained" not in start


def test_the_card_names_the_teachers_whose_vectors_a_stage_reads():
    teachers = "[{teacher: hf://org/large@abc}, {teacher: /home/somebody/own}]"
    loss = "{kind: vector_distillation}"
    run = override(make_run(), [f"stages.first.teachers={teachers}", f"stages.first.loss={loss}"])
    told = re.findall(r"Stage .*", card(run))
    assert told == [
        "Stage first reads vectors of `hf://org/large@abc`, `own` (loss `vector_distillation`)."
    ]
    states = override(make_run(), ["stages.second.hidden_states={teacher: /home/somebody/whole}"])
    assert re.findall(r"Stage .*", card(states)) == [
        "Stage second learns hidden states of `whole`."
    ]


@pytest.mark.parametrize("kind", ["nvembed", "biencoder"])
def test_code_in_the_card_is_python(kind):
    text = card(make_run(kind))
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 4  # three ways of use, and the check of a copy
    for block in blocks:
        compile(block, "card", "exec")
    assert "trust_remote_code" not in text
    # The prompt of sentence-transformers is what the instruction becomes in the model.
    head = "Instruct: Find it\nQuery: " if kind == "nvembed" else "Find it "
    assert f"prompt={head!r}" in blocks[1]
    assert "Find it" in blocks[0]
    assert "Find it" in blocks[2]
    assert ("as_sentence_transformer" in blocks[1]) == (kind == "nvembed")


def test_one_instruction_of_the_last_stage_needs_no_prompt():
    values = make_run("biencoder").model_dump(mode="json")
    values["stages"][1]["datasets"] = {"pairs": 1.0}
    text = card(parse(Run, values))
    assert "one instruction before its queries, `Find it`, which stands before" in text
    use = text.partition("## Check of a copy")[0]
    for block in re.findall(r"```python\n(.*?)```", use, flags=re.DOTALL):
        assert "prompt=" not in block
        assert "instruction=" not in block
    assert "`query_instruction='Find it '` and `text_instruction=''`" in text
    assert "with different instructions" not in text


def test_different_instructions_are_named():
    values = make_run("biencoder").model_dump(mode="json")
    values["stages"][1]["datasets"] = {"pairs": 1.0, "topics": 1.0}
    run = parse(Run, values)
    assert run.query_choices == {"pairs": "Find it"}
    text = card(run)
    assert "none stands before them by default" in " ".join(text.split())
    assert "- `pairs`: `Find it`" in text
    assert "query_instruction=''" in text


def test_two_lengths_of_a_plain_model_are_told():
    values = make_run("biencoder").model_dump(mode="json")
    assert "tokens of queries and documents alike" not in card(parse(Run, values))
    values["model"] |= {"query_max_length": 32, "document_max_length": 128}
    text = card(parse(Run, values))
    assert "It reads 128 tokens of queries and documents alike; rayembed reads 32 and 128" in text
    assert "computes in float32" in text


def test_what_is_not_known_is_not_said():
    run = make_run(backbone="/home/someone/models/base", instruction="")
    text = card(run, scores="", provenance={}, registered_model=None)
    assert "base_model" not in front_matter(text)
    assert "someone" not in text
    assert "Not scored." in text
    assert "models:/" not in text
    assert "commit unknown" in text
    assert "hardware unknown" in text
    assert "| `pairs` | retrieval | unknown | unknown | – |" in text
    assert front_matter(text)["license"] == "unknown"
    assert "datasets" not in front_matter(text)
    assert "model-index" not in front_matter(text)
    assert "is not known" in text


def test_front_matter_is_what_hubs_read():
    """Read back by huggingface_hub, which refuses results that do not hold."""
    run = make_run()
    source = {"kind": "pairs", "path": "hf://datasets/org/pairs@main/train.jsonl"}
    pairs = run.data.datasets[0].model_dump(mode="json") | {"source": source}
    values = run.model_dump(mode="json")
    values["data"]["datasets"][0] = pairs
    text = card(parse(Run, values), results=RESULTS, base_licence="apache-2.0")
    data = ModelCard(text).data
    assert isinstance(data, ModelCardData)
    assert (data.license, data.base_model, data.datasets) == (
        "apache-2.0",
        "org/base",
        ["org/pairs"],
    )
    assert "mteb" in data.tags
    assert data.model_name == "my-model"
    found = {result.dataset_name: result for result in data.eval_results}
    assert set(found) == {"MTEB SciFact", "MTEB NFCorpus", "MTEB Massive"}  # NaN is no number there
    scifact, massive = found["MTEB SciFact"], found["MTEB Massive"]
    assert scifact.metric_value == 0.64322
    assert (scifact.task_type, scifact.metric_type) == ("Retrieval", "ndcg_at_10")
    assert (scifact.dataset_type, scifact.dataset_revision) == ("mteb/scifact", "d" * 40)
    assert (scifact.dataset_split, scifact.dataset_config) == ("test", "default")
    assert (massive.dataset_split, massive.dataset_config) == ("test", None)
    own = dataclasses.replace(RESULTS[0], task="Tickets", dataset="own/Tickets")
    (result,) = ModelCard(card(parse(Run, values), results=[own])).data.eval_results
    assert result.dataset_name == "Tickets"  # mteb has no such task
    both = card(parse(Run, values), results=[*RESULTS[:1], own])
    assert "| own data | 1 |" in both
    assert "| general | 1 |" in both
    # Written again from what was read, nothing is lost.
    assert yaml.safe_load(data.to_yaml()) == front_matter(text)


@pytest.mark.parametrize(
    ("licence", "stated"),
    [
        ("mit", {"license": "mit"}),
        (
            "CC BY-NC 4.0 (see file)",
            {"license": "other", "license_name": "CC BY-NC 4.0 (see file)"},
        ),
        ("", {"license": "unknown"}),
    ],
)
def test_licences_are_stated_in_the_words_that_hubs_know(licence, stated):
    front = front_matter(card(make_run(), base_licence=licence))
    assert {key: front[key] for key in ("license", "license_name") if key in front} == stated


def test_data_is_told_with_counts_and_licences_and_scores_with_categories():
    found = {
        **PROVENANCE,
        "data": {
            "first": {
                "pairs": [
                    {"kind": "records", "fingerprint": "a", "rows_out": 5000},
                    {"kind": "mined", "fingerprint": "b", "rows_out": 4321},
                ]
            }
        },
    }
    text = card(
        make_run(),
        scores="",
        results=RESULTS[:3],
        provenance=found,
        base_licence="mit",
        data_licences={"pairs": "cc-by-4.0"},
    )
    assert "| `pairs` | retrieval | 4,321 | cc-by-4.0 | – |" in text
    assert "| `topics` | clustering | unknown | unknown | – |" in text
    assert "that of `topics` is not known" in text
    assert "The licence of the base model (`hf://org/base@abc`) is mit;" in text
    assert f"| SciFact | Retrieval | ndcg_at_10 | 0.6432 | `{'d' * 40}` |" in text
    assert "| Retrieval | 2 | 0.4716 |" in text
    assert "| all | 3 | 0.5477 |" in text
    assert "mteb 2.26.24" in text
    assert "rayembed serve --model models:/reg@candidate" in text


@pytest.mark.parametrize("proved", [True, False])
def test_the_check_of_a_copy_is_in_cards_of_models_with_a_proof(proved):
    text = card(make_run(), proved=proved)
    assert ("## Check of a copy" in text) == ("rayembed verify" in text) == proved


@pytest.mark.parametrize("proved", [True, False])
def test_card_of_a_model_that_others_trained(proved):
    text = plain_card(
        "minilm",
        reference="hf://org/minilm@main",
        hub_name=hub_name("hf://org/minilm@main"),
        licence="apache-2.0",
        dimensions=384,
        registered_model="minilm",
        results=RESULTS[:2],
        proved=proved,
    )
    assert ("## Check of a copy" in text) == ("rayembed verify" in text) == proved
    data = ModelCard(text).data
    assert (data.license, data.base_model) == ("apache-2.0", "org/minilm")
    assert len(data.eval_results) == 2
    assert "was not trained here" in text
    assert "models:/minilm@candidate" in text


def test_names_on_the_hub():
    assert hub_name("hf://org/name@main") == "org/name"
    assert hub_name("hf://org/name/inside@main") == "org/name"
    assert hub_name("hf://org/name@main/inside") == "org/name"
    assert hub_name("/data/org/name") is None


def test_licences_come_from_cards(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# A model\n")
    assert base_licence(str(tmp_path)) == "cc-by-nc-4.0"
    assert base_licence("pypi://some==1/x", tmp_path) == "cc-by-nc-4.0"
    (tmp_path / "README.md").write_text("# No front matter\n")
    assert base_licence(str(tmp_path)) == ""
    assert base_licence(str(tmp_path / "nothing")) == ""
    assert data_licences(make_run()) == {}


class Registry:
    """Remembers descriptions."""

    def get_model_version(self, name, version):
        return SimpleNamespace(tags={})

    def update_model_version(self, name, version, description):
        self.text = description


def test_the_description_is_the_card_cut_to_what_mlflow_takes():
    registry = Registry()
    text = card(make_run(), results=RESULTS)
    describe(registry, "reg", 1, text)
    assert registry.text == text.partition("\n---\n")[2].strip()
    assert "model-index" not in registry.text
    describe(registry, "reg", 1, text + "a line\n" * 2000)
    assert DESCRIPTION_CHARACTERS - 200 < len(registry.text) <= DESCRIPTION_CHARACTERS
    assert registry.text.endswith("stands in the README.md of the model's folder.\n")


def test_causal2vec_names_both_parts_and_what_its_embedding_is():
    encoder = {"path": "hf://org/reader@abc"}
    values = make_run().model_dump(mode="json")
    backbone = values["model"]["backbone"]
    values["model"] = {"kind": "causal2vec", "backbone": backbone, "encoder": encoder}
    text = card(parse(Run, values))
    assert "A causal LLM beside a bidirectional encoder (Causal2Vec, arXiv 2507.23386" in text
    assert "last states of Contextual token and EOS" in text
    assert "from `hf://org/base@abc` and `hf://org/reader@abc`" in text
    assert "the encoder left as it was" in text
    assert "prompt='Instruct: Find it\\nQuery:'" in text
    values["model"] |= {"encoder": None, "representation": "eos"}
    assert "A causal LLM whose last token is the embedding" in card(parse(Run, values))


def test_cde_says_how_a_corpus_is_set():
    values = make_run().model_dump(mode="json")
    backbone = values["model"]["backbone"]
    values["model"] = {"kind": "cde", "backbone": backbone, "encoder": {"path": "hf://org/first@a"}}
    text = card(parse(Run, values))
    assert "vectors of 512 documents of its corpus (contextual document embeddings" in text
    assert "from `hf://org/base@abc` and `hf://org/first@a`" in text
    assert "model.set_corpus(corpus_context(model, corpus))" in text
    assert "model[0].set_corpus(corpus)" in text
    assert "the null token stands in its place" in text
    assert "set_corpus" not in card(make_run())
