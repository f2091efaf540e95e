"""List the papers' tables as sweeps: each row is a run, with the scores that the paper
prints.

Each is there at the size of its paper (`nvembed-table2`), compared by NanoBEIR after the last step,
and at the quickstart's size with three seeds (`nvembed-table2-quickstart`), compared by held-out
articles. The papers' own benchmarks are scored with `rayembed evaluate` on the model that a
trial leaves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rayembed.config.run import Run
from rayembed.config.run_evaluation import MtebValidation, ValidationConfig
from rayembed.config.settings import changed
from rayembed.recipes.sample import TASK_NAMES
from rayembed_extras.sweeps.job import PrintedSweep, Sweeps, sweep_job
from rayembed_extras.sweeps.settings import MetricConfig, Sweep
from rayembed_papers.tables import encoder_rows, llm_rows
from rayembed_papers.tables.llm_rows import PrintedFigures

SEEDS = {"seed": ("0", "1", "2")}
"""Seeds of every table at the quickstart's size."""

QUICKSTART = "-quickstart"

_NANO = (
    *("NanoArguAnaRetrieval", "NanoClimateFeverRetrieval", "NanoDBPediaRetrieval"),
    *("NanoFEVERRetrieval", "NanoFiQA2018Retrieval", "NanoHotpotQARetrieval"),
    *("NanoMSMARCORetrieval", "NanoNFCorpusRetrieval", "NanoNQRetrieval"),
    *("NanoQuoraRetrieval", "NanoSCIDOCSRetrieval", "NanoSciFactRetrieval"),
    "NanoTouche2020Retrieval",
)

_ALL_TASKS = MetricConfig(
    of="evaluation",
    weights=dict.fromkeys(TASK_NAMES, 1.0),
)
"""Metric of tables whose column is an average over kinds of tasks."""

_RETRIEVAL = MetricConfig(of="evaluation")


@dataclass(frozen=True)
class _Table:
    about: str
    source: str
    printed: Callable[[], PrintedFigures]
    large: Callable[[], Mapping[str, Run]]
    """Runs of published size, by row."""
    small: Callable[[], Mapping[str, Run]]
    space: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metric: MetricConfig = _RETRIEVAL
    """Metric at the quickstart's size."""
    tasks: tuple[str, ...] = _NANO
    """Tasks of NanoBEIR, for runs of published size."""
    printed_small: Callable[[], PrintedFigures] | None = None
    """Published scores next to the quickstart's rows; None: the same ones."""


def _causal2vec(
    about: str,
    number: int,
    printed: PrintedFigures,
    large: Callable[[], Mapping[str, Run]] = llm_rows.causal2vec_bases,
    small: Callable[[], Mapping[str, Run]] = llm_rows.causal2vec_small,
    **space: Any,
) -> _Table:
    """Describe a table of Causal2Vec, which has scores of two LLMs."""
    return _Table(
        about,
        f"Causal2Vec, Table {number}",
        lambda: llm_rows.by_backbone(printed),
        large,
        small,
        metric=_ALL_TASKS,
        printed_small=lambda: printed,
        **space,
    )


_TABLES = {
    "nvembed-table2": _Table(
        "pooling × attention mask",
        "NV-Embed, Table 2",
        llm_rows.printed_nvembed_2,
        llm_rows.nvembed_2,
        llm_rows.nvembed_2_small,
        space=llm_rows.NVEMBED_2,
        metric=_ALL_TASKS,
    ),
    "nvembed-table4": _Table(
        "stages, labels, mining and data",
        "NV-Embed, Table 4",
        llm_rows.printed_nvembed_4,
        llm_rows.nvembed_4,
        llm_rows.nvembed_4_small,
        metric=_ALL_TASKS,
        printed_small=llm_rows.printed_nvembed_4_small,
    ),
    "nomic-table7": _Table(
        "MoE layers × batch",
        "Nomic Embed v2 MoE, Table 7",
        encoder_rows.printed_nomic_7,
        encoder_rows.nomic_7,
        encoder_rows.nomic_7_small,
    ),
    "nomic-table8": _Table(
        "teacher, margin and number of negatives in mining",
        "Nomic Embed v2 MoE, Table 8",
        encoder_rows.printed_nomic_8,
        encoder_rows.nomic_8,
        encoder_rows.nomic_8_small,
        tasks=("NanoFiQA2018Retrieval", "NanoHotpotQARetrieval", "NanoNQRetrieval"),
        printed_small=encoder_rows.printed_nomic_8_small,
    ),
    "causal2vec-table2": _causal2vec(
        "Contextual token and concatenation",
        2,
        llm_rows.CAUSAL2VEC_2,
        llm_rows.causal2vec_2,
        llm_rows.causal2vec_2_small,
    ),
    "causal2vec-table5": _causal2vec(
        "number of Contextual tokens",
        5,
        llm_rows.CAUSAL2VEC_5,
        space=llm_rows.CONTEXTUAL_TOKENS,
    ),
    "causal2vec-table12": _causal2vec(
        "which vectors are the embedding",
        12,
        llm_rows.CAUSAL2VEC_12,
        space=llm_rows.REPRESENTATIONS,
    ),
    "cde-table1": _Table(
        "contextual batches × contextual architecture",
        "CDE, Table 1",
        encoder_rows.printed_cde_1,
        encoder_rows.cde_1,
        encoder_rows.cde_1_small,
    ),
}


def table_sweeps() -> Sweeps:
    """Build the sweeps of all tables, by name."""
    return {
        f"{name}{size}": partial(_sweep, f"{name}{size}", table)
        for name, table in _TABLES.items()
        for size in ("", QUICKSTART)
    }


def _sweep(name: str, table: _Table) -> PrintedSweep:
    space: dict[str, Any] = dict(table.space)
    if name.endswith(QUICKSTART):
        runs, printed, metric = table.small(), table.printed_small or table.printed, table.metric
        space.update(SEEDS)
    else:
        runs = {label: _validated(run, table.tasks) for label, run in table.large().items()}
        printed, metric = table.printed, MetricConfig(of="validation")
        space = space or {"seed": (str(next(iter(runs.values())).seed),)}
    sweep = Sweep(name=name, runs=dict(runs), space=space, metric=metric)
    return PrintedSweep(sweep, printed(), table.source, table.about)


def _validated(run: Run, tasks: tuple[str, ...]) -> Run:
    """Copy a run so that it scores the final weights on the tasks and exports them."""
    validation = ValidationConfig(
        data=MtebValidation(tasks=tasks),
        every_steps=max(stage.steps for stage in run.stages),
        keep="last",
    )
    evaluation = changed(run.evaluation, validation=validation)
    return changed(run, evaluation=evaluation)


run_table_sweeps = sweep_job(table_sweeps())
"""The job that measures a table of a paper."""
