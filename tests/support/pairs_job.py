"""Small data jobs over a file of pairs, with a tiny teacher."""

import json
from pathlib import Path

from tiny_models import save_encoder

WORDS = "cats dogs live fox jumps river ancient world Paris capital France bridge"
BATCH = 8


def text(number: int) -> str:
    """A text of its own: the words stand in an order that only this number has."""
    words = WORDS.split()
    return " ".join(words[(number * (place + 3)) % len(words)] for place in range(5))


def write_inputs(folder: Path) -> Path:
    """The folder with a teacher and a file of pairs."""
    save_encoder(folder / "teacher")
    rows = [
        {"query": f"question {i} {text(i)}", "positive": f"answer {i} {text(i)} {text(i + 1)}"}
        for i in range(100)
    ]
    lines = [json.dumps(row) for row in [*rows, rows[5], {"query": "has none"}]]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder


def arguments(folder: Path) -> list[str]:
    """Of a data job with every step that needs a teacher."""
    pairs = "data.datasets.pairs"
    teacher = folder / "teacher"
    assignments = [
        f"placement.storage_path={folder / 'out'}",
        f"{pairs}.source.path={folder / 'pairs.jsonl'}",
        f"{pairs}.source.max_rejected_share=0.05",
        f"{pairs}.mining.teacher={teacher}",
        f"{pairs}.mining.num_negatives=2",
        f"{pairs}.mining.rule.kind=top_k",
        f"{pairs}.clusters.teacher={teacher}",
        f"{pairs}.clusters.batch_pairs={BATCH}",
    ]
    return [f"--set={assignment}" for assignment in assignments]
