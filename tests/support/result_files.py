"""mteb's result files with scores that are set by hand."""

import json
from collections.abc import Mapping
from pathlib import Path

from rayembed.config.document import write_yaml

METRICS = {"Retrieval": "ndcg_at_10", "Classification": "accuracy"}


def write_results(folder: Path, scores: Mapping[str, float], *, revision: str = "r1") -> Path:
    """Result files of one model revision: task → main score; the task's name ends with its type,
    and that stands beside them as an evaluation writes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for task, value in scores.items():
        entry = {"main_score": value, "hf_subset": "default", "languages": ["eng-Latn"]}
        result = {
            "dataset_revision": revision,
            "task_name": task,
            "mteb_version": "2.26.24",
            "scores": {"test": [entry | {"map_at_10": value / 2}]},
            "evaluation_time": 1.0,
            "kg_co2_emissions": None,
        }
        (folder / f"{task}.json").write_text(json.dumps(result))
    (folder / "model_meta.json").write_text("{}")
    record = {"conditions": {}, "prompts": [_facts(task) for task in scores]}
    (folder / "prompts.yaml").write_text(write_yaml(record))
    return folder


def _facts(task: str) -> dict[str, str]:
    (kind,) = (kind for kind in METRICS if task.endswith(kind))
    facts = {"task": task, "type": kind, "metric": METRICS[kind], "dataset": f"own/{task}"}
    return {**facts, "side": "text", "prompt": ""}
