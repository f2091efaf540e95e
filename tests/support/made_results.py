"""mteb result files with made-up scores."""

import json
from datetime import UTC, datetime
from pathlib import Path

import mteb

DATE = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def write_result(
    folder, model, revision, task, scores, *, dataset_revision=None, version="2.26.24", date=DATE
):
    """The path of a result file; `scores` is (split, subset) → main score from 0 to 1."""
    splits = {}
    for (split, subset), score in scores.items():
        row = {"main_score": score, "hf_subset": subset, "languages": ["eng-Latn"]}
        splits.setdefault(split, []).append(row)
    content = {
        "dataset_revision": dataset_revision or _revision(task),
        "task_name": task,
        "mteb_version": version,
        "scores": splits,
        "evaluation_time": 1.0,
        "kg_co2_emissions": None,
        "date": None if date is None else date.timestamp(),
    }
    place = Path(folder) / "results" / model.replace("/", "__") / revision
    place.mkdir(parents=True, exist_ok=True)
    (place / "model_meta.json").write_text("{}")
    path = place / f"{task}.json"
    path.write_text(json.dumps(content))
    return path


def write_benchmark(folder, model, revision, lines, score, *, date=DATE):
    """Result files of all lines: `score` is a number or a function of the task's name."""
    for line in lines:
        for leaf in line.parts or (line,):
            value = score(leaf.task) if callable(score) else score
            write_result(
                folder, model, revision, leaf.task, dict.fromkeys(leaf.places, value), date=date
            )


def _revision(task):
    try:
        return mteb.get_task(task).metadata.dataset["revision"]
    except KeyError:
        return "own"


def two_models(folder, lines):
    """The folder with `rayembed/whole`, and `rayembed/part` without NQ and one of CQADupstack's
    forums.
    """
    write_benchmark(folder, "rayembed/whole", "abc123", lines, 0.5)
    write_benchmark(folder, "rayembed/part", "def456", lines, 0.25)
    place = folder / "results" / "rayembed__part" / "def456"
    for task in ("NQ", "CQADupstackTexRetrieval"):
        (place / f"{task}.json").unlink()
    return folder
