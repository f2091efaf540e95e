"""The papers' tables as sweeps: their rows as runs, and the figures that the papers print.

Each is there at the size of its paper (`nvembed-table2`), compared by NanoBEIR after the last step,
and at the quickstart's size with three seeds (`nvembed-table2-quickstart`), compared by held-out
articles. The papers' own benchmarks are scored with `rayembed evaluate` on the model that a
trial leaves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayembed.config.run import Run
from rayembed.config.run_evaluation import MtebValidation, ValidationConfig
from rayembed.config.settings import changed
from rayembed.recipes.sample import TASK_NAMES
from rayembed_extras.sweeps.job import PrintedSweep, Sweeps, named_sweep, sweep_job
from rayembed_extras.sweeps.settings import MetricConfig, Sweep
from rayembed_papers.tables import encoder_rows, llm_rows

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
    weights=dict.fromkeys(
        TASK_NAMES,
        1.0,
    ),
)
"""Metric of tables whose column is an average over kinds of tasks."""

_RETRIEVAL = MetricConfig(of="evaluation")


@dataclass(frozen=True)
class _Table:
    about: str
    source: str
    printed: Callable[[], Mapping[str, Mapping[str, float]]]
    runs: Callable[[], Mapping[str, Run]]
    space: Mapping[str, tuple[str, ...]]
    metric: MetricConfig
    tasks: tuple[str, ...] = ()
    """Tasks of NanoBEIR, at the size of the paper."""


def get_table(name: str) -> PrintedSweep:
    """The table of that name.

    Raises:
        ConfigError: no such table; the message names the nearest one.
    """
    return named_sweep(name, table_sweeps())


def table_sweeps() -> Sweeps:
    """Sweeps of all tables, by name."""
    return {name: partial(_sweep, name, table) for name, table in _tables().items()}


def _sweep(name: str, table: _Table) -> PrintedSweep:
    runs = table.runs()
    if table.tasks:
        runs = {label: _validated(run, table.tasks) for label, run in runs.items()}
    space: dict[str, Any] = dict(table.space)
    if name.endswith(QUICKSTART):
        space.update(SEEDS)
    elif not space:
        space["seed"] = (str(next(iter(runs.values())).seed),)
    sweep = Sweep(name=name, runs=dict(runs), space=space, metric=table.metric)
    return PrintedSweep(sweep, table.printed(), table.source, table.about)


def _validated(run: Run, tasks: tuple[str, ...]) -> Run:
    """The run with its last weights scored, which it hands on."""
    validation = ValidationConfig(
        data=MtebValidation(tasks=tasks),
        every_steps=max(stage.steps for stage in run.stages),
        keep="last",
    )
    evaluation = changed(run.evaluation, validation=validation)
    return changed(run, evaluation=evaluation)


def _tables() -> dict[str, _Table]:
    published = MetricConfig(of="validation")
    found: dict[str, _Table] = {}

    def add(
        name: str,
        about: str,
        source: str,
        printed: Callable[[], Mapping[str, Mapping[str, float]]],
        large: Callable[[], Mapping[str, Run]],
        small: Callable[[], Mapping[str, Run]],
        *,
        space: Mapping[str, tuple[str, ...]] | None = None,
        metric: MetricConfig = _RETRIEVAL,
        tasks: tuple[str, ...] = _NANO,
        printed_small: Callable[[], Mapping[str, Mapping[str, float]]] | None = None,
    ) -> None:
        values = space or {}
        found[name] = _Table(about, source, printed, large, values, published, tasks)
        small_figures = printed_small or printed
        found[name + QUICKSTART] = _Table(about, source, small_figures, small, values, metric)

    add(
        "nvembed-table2",
        "pooling × attention mask",
        "NV-Embed, Table 2",
        llm_rows.printed_nvembed_2,
        llm_rows.nvembed_2,
        llm_rows.nvembed_2_small,
        space=llm_rows.NVEMBED_2,
        metric=_ALL_TASKS,
    )
    add(
        "nvembed-table4",
        "stages, labels, mining and data",
        "NV-Embed, Table 4",
        llm_rows.printed_nvembed_4,
        llm_rows.nvembed_4,
        llm_rows.nvembed_4_small,
        metric=_ALL_TASKS,
        printed_small=llm_rows.printed_nvembed_4_small,
    )
    add(
        "nomic-table7",
        "MoE layers × batch",
        "Nomic Embed v2 MoE, Table 7",
        encoder_rows.printed_nomic_7,
        encoder_rows.nomic_7,
        encoder_rows.nomic_7_small,
    )
    add(
        "nomic-table8",
        "teacher, margin and number of negatives in mining",
        "Nomic Embed v2 MoE, Table 8",
        encoder_rows.printed_nomic_8,
        encoder_rows.nomic_8,
        encoder_rows.nomic_8_small,
        tasks=("NanoFiQA2018Retrieval", "NanoHotpotQARetrieval", "NanoNQRetrieval"),
        printed_small=encoder_rows.printed_nomic_8_small,
    )
    add(
        "causal2vec-table2",
        "Contextual token and concatenation",
        "Causal2Vec, Table 2",
        lambda: llm_rows.by_backbone(llm_rows.CAUSAL2VEC_2),
        llm_rows.causal2vec_2,
        llm_rows.causal2vec_2_small,
        metric=_ALL_TASKS,
        printed_small=lambda: llm_rows.CAUSAL2VEC_2,
    )
    add(
        "causal2vec-table5",
        "number of Contextual tokens",
        "Causal2Vec, Table 5",
        lambda: llm_rows.by_backbone(llm_rows.CAUSAL2VEC_5),
        llm_rows.causal2vec_bases,
        llm_rows.causal2vec_small,
        space=llm_rows.CONTEXTUAL_TOKENS,
        metric=_ALL_TASKS,
        printed_small=lambda: llm_rows.CAUSAL2VEC_5,
    )
    add(
        "causal2vec-table12",
        "which vectors are the embedding",
        "Causal2Vec, Table 12",
        lambda: llm_rows.by_backbone(llm_rows.CAUSAL2VEC_12),
        llm_rows.causal2vec_bases,
        llm_rows.causal2vec_small,
        space=llm_rows.REPRESENTATIONS,
        metric=_ALL_TASKS,
        printed_small=lambda: llm_rows.CAUSAL2VEC_12,
    )
    add(
        "cde-table1",
        "contextual batches × contextual architecture",
        "CDE, Table 1",
        encoder_rows.printed_cde_1,
        encoder_rows.cde_1,
        encoder_rows.cde_1_small,
    )
    return found


run_table_sweeps = sweep_job(table_sweeps())
"""The job that measures a table of a paper."""
