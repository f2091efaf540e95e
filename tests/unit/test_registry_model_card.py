import re

import pytest
import yaml

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.registry.model_card import model_card

PROVENANCE = {
    "code": {"version": "0.1.0", "commit": "c0ffee", "uncommitted_changes": True},
    "packages": {"torch": "2.13.0"},
    "constraints": {"path": "cluster/constraints.txt", "sha256": "ab12"},
    "python": "3.11.7",
    "hardware": {"cpu": "CPU X", "cpu_cores": 2, "gpus": []},
}
TABLE = "| task | score |\n|---|---|\n| Wiki | 0.7123 |"


def make_run(kind="nvembed", backbone="hf://org/base@abc", instruction="Find it"):
    stage = {
        "datasets": {"pairs": 2.0, "topics": 1.0},
        "batch": {"global_pairs": 24, "num_negatives": 5, "in_batch_negatives": True},
        "optimizer": {"learning_rate": 1e-4},
        "steps": 70,
    }
    source = {"kind": "pairs", "path": "p.jsonl"}
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


@pytest.mark.parametrize("kind", ["nvembed", "biencoder"])
def test_code_in_the_card_is_python(kind):
    text = card(make_run(kind))
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        compile(block, "card", "exec")
    assert ("trust_remote_code" in text) == (kind == "nvembed")
    # The prompt of sentence-transformers is what the instruction becomes in the model.
    head = "Instruct: Find it\nQuery: " if kind == "nvembed" else "Find it "
    assert f"prompt={head!r}" in blocks[1]
    assert "Find it" in blocks[0]
    assert "Find it" in blocks[2]
    assert ("as_sentence_transformer" in blocks[1]) == (kind == "nvembed")


def test_what_is_not_known_is_not_said():
    run = make_run(backbone="/home/someone/models/base", instruction="")
    text = card(run, scores="", provenance={}, registered_model=None)
    assert "base_model" not in front_matter(text)
    assert "someone" not in text
    assert "Not scored." in text
    assert "models:/" not in text
    assert "commit unknown" in text
    assert "hardware unknown" in text
