"""GLUE's eight tasks of Nomic Embed v2 (section 5.1, Tables 3 and 6), scored on their dev sets.

Table 6 has epochs, lengths, batches, rates, warm-up and clipping; AdamW's settings are those of
Nomic's released configuration. The paper names no metrics. Here they are: Matthews' correlation for
CoLA, Spearman's for STS-B, accuracy else. That MRPC's is accuracy shows in Table 3: 87.50 and 89.71
are 357 and 366 of the 408 rows. For MNLI it is that of the matched half; the other stands beside.
"""

from rayembed_papers.backbone.settings import FinetuneProtocol
from rayembed_papers.backbone.tasks import Finetuning, Kind, ScoredRows, Task, TaskRows

BENCHMARK = "glue"

REPOSITORY = "nyu-mll/glue"

PROTOCOL = FinetuneProtocol(
    epochs=3,
    learning_rates=(1e-5, 2e-5, 3e-5),
    batch_sizes=(16, 32),
    seeds=(0, 1, 2, 3, 4),
    max_length=128,
    warmup_share=0.0,
    max_grad_norm=0.0,
    weight_decay=1e-6,
    adam_betas=(0.9, 0.98),
    adam_epsilon=1e-6,
)

_NO_YES = ("no", "yes")
_ENTAILED = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")

MNLI = "MNLI"

FROM_MNLI = ("RTE", "STS-B", "MRPC")
"""Tasks that start from the model finetuned on MNLI."""


def _rows(name: str, split: str, columns: tuple[str, ...]) -> TaskRows:
    return TaskRows(REPOSITORY, f"{name}/{split}/*.parquet", (*columns, "label"))


def _task(
    task: str,
    name: str,
    columns: tuple[str, ...],
    labels: tuple[str, ...],
    splits: tuple[str, ...] = ("validation",),
) -> Finetuning:
    kind: Kind = "classes" if labels else "score"
    return Finetuning(
        name=task,
        kind=kind,
        train=_rows(name, "train", columns),
        protocol=PROTOCOL,
        scored=tuple(ScoredRows(task, split, _rows(name, split, columns)) for split in splits),
        labels=labels,
        start=MNLI if task in FROM_MNLI else None,
    )


FINETUNINGS = (
    _task("CoLA", "cola", ("sentence",), ("unacceptable", "acceptable")),
    _task("SST-2", "sst2", ("sentence",), ("negative", "positive")),
    _task("MRPC", "mrpc", ("sentence1", "sentence2"), _NO_YES),
    _task("STS-B", "stsb", ("sentence1", "sentence2"), ()),
    _task("QQP", "qqp", ("question1", "question2"), _NO_YES),
    _task(
        MNLI,
        "mnli",
        ("premise", "hypothesis"),
        _NLI,
        ("validation_matched", "validation_mismatched"),
    ),
    _task("QNLI", "qnli", ("question", "sentence"), _ENTAILED),
    _task("RTE", "rte", ("sentence1", "sentence2"), _ENTAILED),
)

_METRICS = {"CoLA": "matthews", "STS-B": "spearman"}

TASKS = tuple(
    Task(
        one.name,
        BENCHMARK,
        one.name,
        _METRICS.get(one.name, "accuracy"),
        ("validation_matched",) if one.name == MNLI else (),
    )
    for one in FINETUNINGS
)
