"""Scores of a model, and hard negatives by one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayembed.api.calls import assignments_of, check_addresses, reference_of, shown
from rayembed.api.embedder import Embedder
from rayembed.api.training import Trained
from rayembed.assets.storage import exists, join, write_atomic
from rayembed.config.data_run import DataRun
from rayembed.config.evaluation_run import EvaluationRun
from rayembed.config.override import overridden, override
from rayembed.config.settings import parse
from rayembed.data.given_rows import Rows, rows_file
from rayembed.errors import DataError


def evaluate(
    model: "Embedder | Trained | str | Path",
    tasks: str | Path | Sequence[str] | Mapping[str, Any],
    *,
    output: str | Path = "outputs",
    settings: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Main score by task; what was scored before is read.

    Args:
        model: a result of `train` or `load`, or whatever `jobs/evaluate_model.py --model` takes.
        tasks: a benchmark or task of mteb by name, several of them, the folder of a set in BEIR's
            layout, or a set in memory: `{"queries": {id: text}, "corpus": {id: text}, "qrels":
            {query id: {document id: grade}}}`, whose score is nDCG@10.
        output: folder or address of object storage for results and embeddings.
        settings: further settings by path, as those of the job's `--set`.

    Raises:
        RayembedError: what is wrong and what to do; also when a task cannot be scored.
    """
    from rayembed.pipeline.evaluate import evaluate as evaluate_run
    from rayembed.pipeline.storage import absolute_storage

    in_memory = isinstance(tasks, Mapping)
    check_addresses(
        model=model, tasks=None if in_memory else tasks, output=output, settings=settings
    )
    storage = absolute_storage(str(output))
    reference = model if isinstance(model, str | Path) else _place(model)
    asked: dict[str, Any] = {
        "model": {"reference": reference_of(reference)},
        "placement": {"storage_path": storage},
        **_asked(tasks, storage),
    }
    run = overridden(EvaluationRun, asked, assignments_of(settings or {}))
    with shown():
        result = evaluate_run(run)
    for _, error in result.failed:
        raise error
    return result.scored.scores


def _asked(tasks: Any, storage: str) -> dict[str, Any]:
    """Settings that name the tasks."""
    if isinstance(tasks, Mapping):
        folder = _beir_folder(tasks, storage)
        return {"own_sets": [{"name": Path(folder).name, "path": folder}]}
    if isinstance(tasks, str | Path) and (Path(tasks) / "qrels").is_dir():
        folder = str(Path(tasks).absolute())
        return {"own_sets": [{"name": Path(folder).name, "path": folder}]}
    from rayembed.evaluation.benchmarks import benchmark_names

    names = [str(tasks)] if isinstance(tasks, str | Path) else [str(task) for task in tasks]
    known = set(benchmark_names())
    return {
        "benchmarks": [name for name in names if name in known],
        "tasks": [name for name in names if name not in known],
    }


def _beir_folder(given: Mapping[str, Any], storage: str) -> str:
    """Folder in BEIR's layout of a set in memory, named by what it holds."""
    from rayembed.config.document import fingerprint

    wanted = {"queries", "corpus", "qrels"}
    if set(given) != wanted:
        raise DataError(
            f"a set in memory has {', '.join(sorted(wanted))}, not {', '.join(map(str, given))}"
        )
    folder = join(storage, "data", "given", f"set-{fingerprint(dict(given))}")
    if not exists(join(folder, "qrels/test.tsv")):
        for name in ("corpus", "queries"):
            lines = [json.dumps({"_id": i, "text": text}) for i, text in given[name].items()]
            write_atomic(join(folder, f"{name}.jsonl"), "\n".join(lines).encode())
        judged = given["qrels"].items()
        rows = [f"{q}\t{d}\t{grade}" for q, of in judged for d, grade in of.items()]
        text = "\n".join(["query-id\tcorpus-id\tscore", *rows])
        write_atomic(join(folder, "qrels/test.tsv"), text.encode())
    return folder


def mine(
    pairs: Rows,
    *,
    teacher: str | Path = "all-MiniLM-L6-v2",
    num_negatives: int = 7,
    output: str | Path = "outputs",
    settings: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The pairs with hard negatives that a teacher finds among all positives.

    Rows of `query`, `positive` and `negatives`, the hardest first, which `train` takes; a query for
    which the rule (positive-aware, arXiv 2407.15831) accepts fewer has fewer.

    Args:
        pairs: as in `train`, without scores.
        teacher: an embedding model, as `model` in `train`.
        settings: further settings by path below `mining`, such as `{"rule.kind": "…"}`.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    from rayembed.data.parts import read_records
    from rayembed.pipeline.data_steps import do_steps
    from rayembed.pipeline.storage import absolute_storage

    check_addresses(teacher=teacher, output=output, settings=settings)
    storage = absolute_storage(str(output))
    mining = {"teacher": reference_of(teacher), "num_negatives": num_negatives}
    source = {"kind": "pairs", "path": rows_file(pairs, storage)}
    values = {
        "name": "mine",
        "data": {"datasets": [{"name": "pairs", "source": source, "mining": mining}]},
        "placement": {"storage_path": storage},
    }
    further = {
        f"data.datasets.pairs.mining.{name}": value for name, value in (settings or {}).items()
    }
    run = override(parse(DataRun, values), assignments_of(further))
    with shown():
        done = do_steps(run, ["pairs"], "mined")["pairs"][-1]
    return [
        {
            "query": record.query,
            "positive": positive,
            "negatives": [n.text for n in record.negatives],
        }
        for part in done.parts
        for record in read_records(part.path)
        for positive in record.positives[:1]
    ]


def _place(model: "Embedder | Trained") -> str:
    return model.folder if isinstance(model, Trained) else model.reference
