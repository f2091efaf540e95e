"""A user's own pairs and a tiny bi-encoder that is trained on them by the recipe's own settings."""

import json
from pathlib import Path

from tiny_models import save_encoder

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.recipes.catalogue import get_recipe

UNGUARDED = {"evaluation.guard": None, "evaluation.benchmarks": []}
"""Settings of runs that take no scores but those of the held-out part."""

WORDS = "cats dogs live fox jumps river ancient world Paris capital France bridge"


def write_pairs(path: Path, number: int = 200) -> list[dict[str, str]]:
    """Pairs with words in common, every tenth of them twice, every seventh asked in another way."""
    rows, known = [], WORDS.split()
    for i in range(number):
        words = [known[(i * (place + 3)) % len(known)] for place in range(5)]
        row = {"query": f"number {i} {words[0]} {words[1]}", "positive": f"{i} {' '.join(words)}"}
        rows += [row] * (2 if i % 10 == 0 else 1)
        if i % 7 == 0:
            rows.append({**row, "query": f"what of {i} {words[2]}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def own_run(folder: Path, *assignments: str) -> Run:
    """The recipe for own pairs without general tasks, with a tiny encoder and few steps; writes
    both beforehand.
    """
    if not (folder / "encoder").exists():
        save_encoder(folder / "encoder")
        write_pairs(folder / "pairs.jsonl")
    settings = {
        "data.datasets.pairs.source.path": folder / "pairs.jsonl",
        "model.backbone.path": folder / "encoder",
        "model.backbone.dtype": "float32",
        "model.query_max_length": 32,
        "model.document_max_length": 32,
        "stages.finetune.batch.global_pairs": 8,
        "stages.finetune.optimizer.warmup_steps": 1,
        "stages.finetune.optimizer.learning_rate": 0.01,
        "stages.finetune.steps": 4,
        **UNGUARDED,
        "placement.storage_path": folder / "outputs",
    }
    given = [f"{path}={'null' if value is None else value}" for path, value in settings.items()]
    return override(override(get_recipe("biencoder"), ["name=own", *given]), assignments)
