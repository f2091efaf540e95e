"""rayembed in Python: train, evaluate, mine, load, encode.

Each of them builds the settings that a job would build, and does what the job does: the same
folders, the same weights, the same scores.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayembed.assets.storage import exists, join, write_atomic
from rayembed.config.data_run import DataRun
from rayembed.config.evaluation_run import EvaluationRun
from rayembed.config.loss import LossConfig
from rayembed.config.override import overridden, override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.config.types import Role
from rayembed.data.given_rows import Rows, rows_file
from rayembed.errors import ConfigError, DataError
from rayembed.recipes.catalogue import OWN_PAIRS, get_recipe
from rayembed.samples.assets import MINILM

if TYPE_CHECKING:
    import numpy as np

    from rayembed.pipeline.report import Outcome
    from rayembed.training.trainer import Callback

MODELS = {"all-MiniLM-L6-v2": MINILM}
"""Models by short name, which the package index has where there is no hub."""

_DATASET = "data.datasets.pairs"
_HELD_OUT = 10
"""Documents that are held out at least; fewer would say nothing of retrieval."""


class Embedder:
    """A model that turns texts into vectors."""

    def __init__(self, model: Any, reference: str) -> None:
        self.model = model
        """The model as rayembed's rooms use it, a `models.contract.EmbeddingModel`."""
        self.reference = reference

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        role: Role = "document",
        instruction: str | None = None,
        tokens_per_batch: int | None = None,
    ) -> "np.ndarray":
        """Float32 unit vectors: (D,) of one text, (N, D) of a sequence of them.

        Args:
            role: `query` or `document`, which decides prefixes and lengths.
            instruction: task definition before each text; None: the one that the model learnt for
                the role, if it is a single one; "": none.
            tokens_per_batch: padded tokens of a forward pass; None: by hardware.

        Raises:
            ConfigError: no such role.
            DataError: what is given is no text, or a text has no tokens of its own.
        """
        from rayembed.models.encoding import encode

        given: dict[str, Any] = {"role": role, "instruction": instruction}
        return encode(self.model, texts, tokens_per_batch=tokens_per_batch, **given)

    def encode_query(self, texts: str | Sequence[str], **options: Any) -> "np.ndarray":
        """Vectors of queries; see `encode`."""
        return self.encode(texts, role="query", **options)

    def encode_document(self, texts: str | Sequence[str], **options: Any) -> "np.ndarray":
        """Vectors of documents; see `encode`."""
        return self.encode(texts, role="document", **options)

    def similarity(
        self, queries: str | Sequence[str], documents: str | Sequence[str]
    ) -> "np.ndarray":
        """Cosines of each query (row) with each document (column); one text has no axis."""
        found: np.ndarray = self.encode_query(queries) @ self.encode_document(documents).T
        return found

    def __repr__(self) -> str:
        return f"Embedder({self.reference!r}, width {self.model.dimensions[0]})"


def load(model: str | Path) -> Embedder:
    """Load a model for encoding.

    Args:
        model: folder of an export, an asset reference (`hf://org/name@revision`, `s3://…`), a
            registered model (`models:/name@alias`), or a short name of `MODELS`.

    Raises:
        RayembedError: there is no such model, or it is not supported.
    """
    from rayembed.assets.resolver import resolve_model
    from rayembed.models.load import load_model

    reference = _reference(model)
    if reference.startswith("models:/"):
        from rayembed.registry import registered_model as registry
        from rayembed.registry.tracking_uri import resolve_tracking_uri

        uri = resolve_tracking_uri(None, str(Path("outputs").absolute()), make_folder=False)
        client = registry.connect(uri)
        version = registry.get_version(client, registry.parse_reference(reference))
        return Embedder(load_model(registry.download(client, version, tracking_uri=uri)), reference)
    return Embedder(load_model(resolve_model(reference)), reference)


def encode(model: "Embedder | str | Path", texts: str | Sequence[str], **options: Any) -> Any:
    """Vectors of texts by a model or a reference to one; see `Embedder.encode`."""
    return (model if isinstance(model, Embedder) else load(model)).encode(texts, **options)


@dataclass(frozen=True)
class Trained:
    """Result of a training."""

    outcome: "Outcome" = field(repr=False)

    @property
    def folder(self) -> str:
        """Folder of the model, which sentence-transformers loads too (docs/python.md)."""
        return self.outcome.model_folder

    @cached_property
    def model(self) -> Embedder:
        """The trained model, loaded when it is first used."""
        return load(self.folder)

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Model → task → main score: the start, each stage, baselines; empty without any."""
        table = self.outcome.table
        return {} if table is None else {name: dict(row) for name, row in table.rows.items()}

    @property
    def run(self) -> Run:
        """All settings; `run.to_yaml()` is what a job takes as `--recipe`."""
        return self.outcome.run

    @property
    def version(self) -> str:
        """The registered model, `models:/name/number`."""
        return self.outcome.version.uri

    def _repr_markdown_(self) -> str:
        from rayembed.evaluation.tables import score_table
        from rayembed.tables import show

        table = self.outcome.table
        told = "" if table is None else show(score_table(table, with_mean=True), "markdown")
        return f"{told}\n\nModel `{self.folder}`, registered as `{self.version}`"


def train(
    model: str | Path,
    pairs: Rows,
    *,
    loss: LossConfig | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    query_instruction: str | None = None,
    name: str | None = None,
    output: str | Path = "outputs",
    workers: int = 1,
    callbacks: "Sequence[Callback]" = (),
    settings: Mapping[str, Any] | None = None,
) -> Trained:
    """Fine-tune an encoder on pairs, score it beside its start, register it.

    The run is the recipe for own pairs with what is given here. The same call goes on where a
    former one stopped, and does nothing twice. One worker trains in this process, several on Ray.

    Args:
        model: what to start from: a folder of transformers or sentence-transformers, an asset
            reference (`hf://org/name@revision`) or a short name of `MODELS`.
        pairs: a path of files (JSONL, CSV, Parquet), a DataFrame, a `datasets.Dataset`, or a list
            of tuples (query, positive), (query, positive, negatives), (text, text, score) or of
            dicts. Columns are `query`, `positive` and, if there are any, `negatives`; others are
            named by `settings`, as in `{"data.datasets.pairs.source.query": "anchor"}`.
        loss: a loss of `rayembed.losses`, such as `InfoNCE(temperature=0.02)`, or, for graded
            pairs, `CoSENT()`, which is theirs without any.
        steps: weight updates; None: by `epochs`.
        epochs: passes over the rows that are left to train on; one without `steps`.
        batch_size: pairs in a step, over all workers; None: 64, or fewer where rows are few.
        learning_rate: its highest; None: the recipe's.
        query_instruction: text before every query, learnt and kept in the model.
        name: of the run and of the registered model; None: by the settings.
        output: folder or address of object storage for all results.
        workers: data-parallel processes.
        callbacks: of the trainer, on every worker; with several workers they are pickled.
        settings: further settings by path, as those of a job's `--set`.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    from rayembed.pipeline.storage import absolute_storage
    from rayembed.pipeline.train import train as train_run

    storage = absolute_storage(str(output))
    run = training_run(
        _reference(model),
        rows_file(pairs, storage),
        loss=loss,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        query_instruction=query_instruction,
        name=name,
        storage=storage,
        workers=workers,
        settings=settings or {},
    )
    with _told():
        return Trained(train_run(run, callbacks=callbacks))


def training_run(
    model: str,
    path: str,
    *,
    loss: LossConfig | None,
    steps: int | None,
    epochs: float | None,
    batch_size: int | None,
    learning_rate: float | None,
    query_instruction: str | None,
    name: str | None,
    storage: str,
    workers: int,
    settings: Mapping[str, Any],
) -> Run:
    """The run of `train`, whose arguments these are, over the rows at `path`.

    Raises:
        RayembedError: as `train`.
    """
    if steps is not None and epochs is not None:
        raise ConfigError(f"steps={steps} and epochs={epochs:g} are given; one of them is enough")
    form = {name: settings.get(f"{_DATASET}.source.{name}") for name in ("delimiter", "encoding")}
    look = _look_at(path, **form)
    rows, columns, negatives = look.rows, look.columns, look.negatives
    graded = {"sentence1", "sentence2", "score"} <= columns
    found: dict[str, Any] = {
        "model.backbone.path": model,
        f"{_DATASET}.source.kind": "graded" if graded else "pairs",
        f"{_DATASET}.source.path": path,
        f"{_DATASET}.source.max_rejected_share": 0.05,
        "placement.storage_path": storage,
        "placement.workers": workers,
    }
    share = None if graded else _share(look.documents)
    held_out = {} if share == 0.1 else {f"{_DATASET}.held_out.share": share}
    found |= held_out if share else {f"{_DATASET}.held_out": None}
    if graded:
        found |= {"stages.finetune.batch.in_batch_negatives": False}
        found |= {"stages.finetune.loss": {"kind": "cosent"}}
    elif negatives:
        found |= {f"{_DATASET}.source.negatives": "negatives"}
        found |= {"stages.finetune.batch.num_negatives": negatives}
    if loss is not None:
        found |= {"stages.finetune.loss": loss.model_dump(mode="json")}
    if query_instruction is not None:
        found |= {f"{_DATASET}.query_instruction": query_instruction}
    left = max(1, rows - min(int(rows * (share or 0)), 1000))
    # A power of two, of which any usual number of workers has an equal share.
    size = batch_size or min(64, 1 << max(1, left // 2).bit_length() - 1)
    number = steps or max(1, round((1.0 if epochs is None else epochs) * left / size))
    found |= {"stages.finetune.batch.global_pairs": size, "stages.finetune.steps": number}
    found |= {"stages.finetune.optimizer.warmup_steps": min(100, number // 10)}
    if learning_rate is not None:
        found |= {"stages.finetune.optimizer.learning_rate": learning_rate}
    run = override(get_recipe(OWN_PAIRS), _assignments({**found, **settings}))
    return run.model_copy(update={"name": name or f"pairs-{run.fingerprint}"})


@dataclass
class _Look:
    """What files hold."""

    rows: int = 0
    columns: set[str] = field(default_factory=set)
    """Of the first row."""
    negatives: int = 0
    """Most negatives of one of the first thousand rows, in a column `negatives`."""
    documents: int = 0
    """Distinct cells of the column `positive`; rows, where there is none."""


def _look_at(path: str, *, delimiter: str | None, encoding: str | None) -> _Look:
    """Read the rows once, for what follows from their number.

    Raises:
        DataError: there are no rows.
    """
    from rayembed.data.sources.files import list_pieces
    from rayembed.data.sources.rows import Row, read_rows

    look, seen = _Look(), set[int]()
    for piece in list_pieces(path, delimiter=delimiter, encoding=encoding):
        for row in read_rows(piece):
            look.rows += 1
            if not isinstance(row, Row):
                continue
            look.columns = look.columns or set(row.values)
            seen.add(hash(str(row.values.get("positive", look.rows))))
            given = row.values.get("negatives")
            if look.rows <= 1000 and isinstance(given, list):
                look.negatives = max(look.negatives, min(len(given), 7))
    if not look.rows:
        raise DataError(f"there are no rows at {path!r}")
    look.documents = len(seen)
    return look


def _share(documents: int) -> float | None:
    """Share of documents that are held out: a tenth, more of few, and none of very few."""
    if documents < 4 * _HELD_OUT:
        return None
    return max(0.1, math.ceil(100 * (_HELD_OUT + 1) / documents) / 100)


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

    storage = absolute_storage(str(output))
    reference = model if isinstance(model, str | Path) else _place(model)
    asked: dict[str, Any] = {
        "model": {"reference": _reference(reference)},
        "placement": {"storage_path": storage},
        **_asked(tasks, storage),
    }
    run = overridden(EvaluationRun, asked, _assignments(settings or {}))
    with _told():
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

    storage = absolute_storage(str(output))
    mining = {"teacher": _reference(teacher), "num_negatives": num_negatives}
    source = {"kind": "pairs", "path": rows_file(pairs, storage)}
    values = {
        "name": "mine",
        "data": {"datasets": [{"name": "pairs", "source": source, "mining": mining}]},
        "placement": {"storage_path": storage},
    }
    further = {f"{_DATASET}.mining.{name}": value for name, value in (settings or {}).items()}
    run = override(parse(DataRun, values), _assignments(further))
    with _told():
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


def _reference(model: str | Path) -> str:
    text = str(model)
    if text in MODELS and not Path(text).exists():
        return MODELS[text]
    return text if "://" in text or ":/" in text else str(Path(text).expanduser())


def _assignments(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of `--set`."""
    return [
        f"{path}={value if isinstance(value, str) else json.dumps(value)}"
        for path, value in settings.items()
    ]


@contextmanager
def _told() -> Iterator[None]:
    """Show rayembed's log inside the block, where the caller has set up no logging."""
    logger = logging.getLogger("rayembed")
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
