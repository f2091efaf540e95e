"""How much of a fine-tune's own gain the guard delivers, on five sets.

The whole all-MiniLM-L6-v2 is trained for 100 steps of 32 of 2,000 pairs, without mined negatives,
and judged by 400 held-out queries and general tasks of 200 documents. Four sets are those of
`backbone.py`; `code` is made of the packages installed here: the first sentence of a function's
docstring finds its source, without the docstring. Functions of other packages are searched too, as
the set `judged`, which decides nothing in the table. The set `shuffled` is `en-sentence` with each
query beside the answer of another one, so that training harms its own task.

    python benchmarks/guard.py --results docs/measured/guard.jsonl

prints which model the guard keeps in each, and its own gain beside the trained model's. Results are
lines of a file; what is in it is not run again.
"""

import argparse
import ast
import json
import random
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from backbone import SETS, pairs

HELD_OUT, ROWS = 400, 2000
GENERAL = "wikipedia?documents=200&queries=200"
JUDGED_DOCUMENTS, JUDGED_QUERIES = 1000, 200
LEARNT = ("scipy", "sklearn", "torch", "transformers", "numpy", "mlflow", "ray", "matplotlib")
SEARCHED = ("pandas", "networkx", "sympy", "polars", "optuna", "moto", "peft", "mteb")
"""Packages whose functions are trained on, and searched."""
OWN, JUDGED = "pairs-held-out", "judged"

MODELS = {
    "start": "untrained",
    "trained": "finetune",
    "75 %": "finetune-merged-0.75",
    "50 %": "finetune-merged-0.5",
    "25 %": "finetune-merged-0.25",
}
"""Name in the tables here → name among a run's results."""


def functions(packages, count):
    """(first sentence of the docstring, source without it) of functions, drawn of all that have
    a sentence of five words and at most 1,500 characters of source.
    """
    found = {}
    for package in packages:
        root = Path(find_spec(package).origin).parent
        for path in sorted(root.rglob("*.py")):
            if "test" in path.relative_to(root).as_posix():
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
            for node in ast.walk(tree):
                if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
                    continue
                first = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
                sentence = first.partition(". ")[0].rstrip(".")
                node.body = node.body[1:] or [ast.Pass()]
                source = ast.unparse(node)
                if len(sentence.split()) >= 5 and len(source) <= 1500:
                    found.setdefault(sentence, source)
    rows = sorted(found.items())
    random.Random(0).shuffle(rows)
    return rows[:count]


def judged(folder):
    """An own set in BEIR's layout, of functions of the packages that are searched."""
    rows = functions(SEARCHED, JUDGED_DOCUMENTS)
    (folder / "qrels").mkdir(parents=True)
    lines = {
        "corpus.jsonl": [{"_id": f"d{i}", "text": source} for i, (_, source) in enumerate(rows)],
        "queries.jsonl": [
            {"_id": f"q{i}", "text": sentence}
            for i, (sentence, _) in enumerate(rows[:JUDGED_QUERIES])
        ],
    }
    for name, values in lines.items():
        (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    answers = "".join(f"q{i}\td{i}\t1\n" for i in range(JUDGED_QUERIES))
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + answers)
    return [{"name": JUDGED, "path": str(folder)}]


def trained(name, output):
    """Train on a set, with all candidates of the guard scored."""
    import rayembed
    from rayembed.recipes.sample import MINILM

    given = {"model.query_max_length": 32, "model.document_max_length": 32}
    rate = 2e-4
    if name == "code":
        rows, rate = functions(LEARNT, HELD_OUT + ROWS), 2e-5
        given = {
            "model.query_max_length": 128,
            "model.document_max_length": 128,
            "evaluation.own_sets": judged(output / "judged"),
        }
    else:
        rows = pairs("en-sentence" if name == "shuffled" else name, ROWS)[: HELD_OUT + ROWS]
    rows = [{"query": query, "positive": answer, "part": "train"} for query, answer in rows]
    held, learnt = rows[:HELD_OUT], rows[HELD_OUT:]
    for row in held:
        row["part"] = "held"
    if name == "shuffled":
        answers = [row["positive"] for row in learnt]
        for row, other in zip(learnt, answers[1:] + answers[:1], strict=True):
            row["positive"] = other
    return rayembed.train(
        MINILM,
        rows,
        name=name,
        steps=100,
        batch_size=32,
        learning_rate=rate,
        output=output,
        settings={
            "data.datasets.pairs.held_out": {
                "kind": "groups",
                "column": "part",
                "values": ["held"],
            },
            "placement.threads_per_worker": 1,
            "evaluation.baselines": [],
            "evaluation.benchmarks": [GENERAL],
            **given,
        },
    )


def measured(file, name):
    """The line of a set in the file, which is made and added where it is missing."""
    lines = [json.loads(line) for line in file.open()] if file.exists() else []
    for line in lines:
        if line["set"] == name:
            return line
    from rayembed.registry.provenance import cpu_summary

    with tempfile.TemporaryDirectory() as output:
        run = trained(name, Path(output))
        scores = dict(zip(MODELS, run.scores.values(), strict=True))
        line = {"set": name, "machine": cpu_summary(), "scores": scores, "queries": {}}
        results = Path(run.outcome.run_folder) / "evaluation" / "results"
        for model, named in MODELS.items():
            (folder,) = results.glob(f"rayembed__{name}-{named}/*")
            line["queries"][model] = {
                task: _of_queries(folder / f"{task}.json")
                for task in (OWN, JUDGED)
                if task in scores["start"]
            }
    with file.open("a") as sink:
        sink.write(json.dumps(line) + "\n")
    return line


def _of_queries(file):
    from rayembed.results.scores import OF_QUERIES

    (row,) = json.loads(file.read_text())["scores"]["test"]
    return [round(score, 5) for score in row[OF_QUERIES]]


def verdict_of(line):
    """What the guard finds in a line's scores, where the set `judged` decides nothing."""
    from rayembed.config.run_evaluation import GuardConfig
    from rayembed.evaluation.tables import UNTRAINED, ScoreKey
    from rayembed.pipeline.evaluate.guard import verdict

    shares = {"trained": None, "75 %": 0.75, "50 %": 0.5, "25 %": 0.25}
    keys = {"start": UNTRAINED, **{n: ScoreKey("finetune", share=s) for n, s in shares.items()}}
    models = {
        keys[model]: SimpleNamespace(
            scores={task: score for task, score in scores.items() if task != JUDGED},
            queries={OWN: [line["queries"][model][OWN]]},
        )
        for model, scores in line["scores"].items()
    }
    found = verdict(models, keys["trained"], [OWN], GuardConfig())
    (kept,) = (model for model, key in keys.items() if key == found.kept)
    return kept, found


def table(lines):
    """Own gain of the trained model and of the kept one, and their general gains, as Markdown."""
    columns = ("set", "start", "trained", "general", "kept", "own gain", "general", "delivered")
    rows = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for line in lines:
        kept, found = verdict_of(line)
        scores = line["scores"]
        general = [task for task in scores["start"] if task not in (OWN, JUDGED)]

        def gain(model, tasks, scores=scores):
            return statistics.mean(scores[model][t] - scores["start"][t] for t in tasks)

        for own in (OWN, JUDGED):
            if own not in scores["start"]:
                continue
            trained, delivered = gain("trained", [own]), gain(kept, [own])
            share = f"{delivered / trained:.0%}" if trained > 0 else ""
            cells = [
                line["set"] + (", judged" if own == JUDGED else ""),
                f"{scores['start'][own]:.4f}",
                f"{trained:+.4f}",
                f"{gain('trained', general):+.4f}",
                kept,
                f"{delivered:+.4f}",
                f"{gain(kept, general):+.4f}",
                share,
            ]
            rows.append("| " + " | ".join(cells) + " |")
        print(f"{line['set']}: {found.summary}")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*SETS, "code", "shuffled"]
    parser.add_argument("--sets", nargs="+", choices=names, default=names)
    parser.add_argument("--results", type=Path, default=Path("outputs/guard.jsonl"))
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    print(f"\n{table([measured(given.results, name) for name in given.sets])}")


if __name__ == "__main__":
    main()
