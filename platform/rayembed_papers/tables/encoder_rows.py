"""Rows of the tables of Nomic Embed v2 and CDE, at both sizes, and the published scores."""

from rayembed.config.backbone import BackboneConfig
from rayembed.config.data import DataConfig, DatasetConfig
from rayembed.config.mining import MiningConfig, Rule
from rayembed.config.override import override
from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.config.run_evaluation import EvaluationConfig
from rayembed.config.settings import changed
from rayembed.config.stage import BatchConfig, StageConfig
from rayembed.data.mining.rules import PercPos, TopK
from rayembed.losses.infonce import InfoNCE
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.cde.config import CDEConfig
from rayembed.models.nomic_moe.config import ExpertsConfig, NomicMoeConfig
from rayembed.optim.adamw import AdamW
from rayembed.recipes import biencoder, cde, nomic
from rayembed.recipes.sample import MINILM, Wikipedia
from rayembed_papers.ablations import cde_filtered, cde_random
from rayembed_papers.mixtures.cde import NOMIC_BERT, small_unsupervised
from rayembed_papers.mixtures.datasets.nomic import finetuning_entries
from rayembed_papers.mixtures.nomic import v2_moe
from rayembed_papers.tables.llm_rows import PrintedFigures

_BATCHES = (1, 2, 4)


def _nomic_7_row(every: int, times: int) -> str:
    layers = "every layer" if every == 1 else "every other layer"
    return f"{layers}, batch × {times}"


def printed_nomic_7() -> PrintedFigures:
    """Published scores of Nomic's Table 7: experts in 6 or 12 of 12 layers, batches of 2,048, 4,096
    and 8,192.
    """
    figures = {2: (44.13, 45.36, 45.89), 1: (44.28, 44.89, 45.48)}
    return {
        _nomic_7_row(every, times): {"BEIR": score}
        for every, scores in figures.items()
        for times, score in zip(_BATCHES, scores, strict=True)
    }


def nomic_7() -> dict[str, Run]:
    """Runs of Nomic's Table 7: a NomicBert with experts and Switch routing, on one epoch of the
    English pairs.

    Texts have 128 tokens. The paper does not say the optimiser's settings; they are those of
    pretraining.
    """
    dense, pretrained = small_unsupervised(), v2_moe()
    datasets = tuple(changed(dataset, clusters=None) for dataset in dense.data.datasets)
    pairs = dense.stages[0].steps * dense.stages[0].batch.global_pairs // 3  # it has three epochs
    stage = changed(
        pretrained.stages[0],
        datasets={dataset.name: 1.0 for dataset in datasets},
        query_max_length=None,
        document_max_length=None,
    )
    whole = Run(
        name="nomic-table7",
        model=NomicMoeConfig(
            backbone=BackboneConfig(path=NOMIC_BERT),
            experts=ExpertsConfig(start="released"),
            rotary_base=1000.0,
            query_max_length=128,
            document_max_length=128,
        ),
        data=DataConfig(datasets=datasets),
        stages=(stage,),
        placement=pretrained.placement,
    )
    return _nomic_7_rows(whole, pairs, 2048)


def nomic_7_small() -> dict[str, Run]:
    """Runs of Nomic's Table 7 at small size: the quickstart's first stage, with experts in 3 or 6
    of 6 layers.

    Batches of 32, 64 and 128 pairs, and as many pairs in all.
    """
    whole = nomic.quickstart()
    first = whole.stages[0]
    stage = changed(first, optimizer=changed(first.optimizer, warmup_steps=10))
    pairs = first.steps * first.batch.global_pairs // 2
    return _nomic_7_rows(changed(whole, stages=(stage,)), pairs, 32)


def _nomic_7_rows(whole: Run, pairs: int, smallest: int) -> dict[str, Run]:
    """Build a run for each of two numbers of expert layers and three batch sizes.

    Args:
        pairs: of the training.
        smallest: pairs of the smallest batch.
    """
    (stage,) = whole.stages
    rows = {}
    for every in (2, 1):
        for times in _BATCHES:
            batch = changed(stage.batch, global_pairs=smallest * times)
            steps = pairs // batch.global_pairs
            run = changed(whole, stages=(changed(stage, batch=batch, steps=steps),))
            experts = [f"model.experts.every={every}", "model.experts.top_k=1"]
            rows[_nomic_7_row(every, times)] = override(run, experts)
    return rows


_TEACHERS = {
    "Arctic Embed Large": (
        "hf://Snowflake/snowflake-arctic-embed-l@main",
        "Represent this sentence for searching relevant passages: ",
    ),
    "NVEmbed v1": (
        "hf://nvidia/NV-Embed-v1@main",
        "Instruct: Given a question, retrieve passages that answer the question\nQuery: ",
    ),
    "Stella 1.5B": (
        "hf://dunzhang/stella_en_1.5B_v5@main",
        "Instruct: Given a web search query, retrieve relevant passages that answer the query.\n"
        "Query: ",
    ),
}
"""References of the teachers, and their authors' query prompts; the paper does not say."""

_NOMIC_8: tuple[tuple[str, float | None, int, tuple[float, float, float, float]], ...] = (
    ("Arctic Embed Large", None, 4, (52.87, 42.68, 59.47, 56.45)),
    ("Arctic Embed Large", 0.95, 4, (55.20, 44.98, 62.75, 57.88)),
    ("NVEmbed v1", 0.95, 4, (54.94, 45.00, 58.29, 61.56)),
    ("Stella 1.5B", 0.95, 4, (57.22, 45.18, 64.06, 62.42)),
    ("Stella 1.5B", 0.98, 4, (57.20, 45.67, 63.65, 62.29)),
    ("Stella 1.5B", 0.95, 7, (57.31, 45.10, 64.27, 62.58)),
    ("Stella 1.5B", 0.95, 10, (57.45, 45.17, 64.48, 62.69)),
)
"""Teacher, margin, negatives; scores by column."""

_NOMIC_8_COLUMNS = ("Average", "FiQA", "HotpotQA", "NQ")


def _nomic_8_row(teacher: str, margin: float | None, number: int) -> str:
    return f"{teacher}, margin {'none' if margin is None else margin}, {number} negatives"


def printed_nomic_8() -> PrintedFigures:
    """Published scores of all rows of Nomic's Table 8."""
    return {
        _nomic_8_row(teacher, margin, number): dict(zip(_NOMIC_8_COLUMNS, scores, strict=True))
        for teacher, margin, number, scores in _NOMIC_8
    }


def printed_nomic_8_small() -> PrintedFigures:
    """Published scores by margin and number of negatives, in one column for each teacher, as scores
    of different teachers are not comparable.
    """
    found: dict[str, dict[str, float]] = {}
    for teacher, margin, number, (average, *_) in _NOMIC_8:
        if teacher != "NVEmbed v1":
            row = found.setdefault(_nomic_8_row("all-MiniLM", margin, number), {})
            row[f"Average, {teacher}"] = average
    return found


def nomic_8() -> dict[str, Run]:
    """Runs of Nomic's Table 8: unsupervised E5-Large on Stack Exchange, SQuAD and NQ, with newly
    mined negatives (section 7.3).

    The paper states about 500,000 pairs and no settings of the training; batch, optimiser and
    data are those of its own finetuning (section 4.5), whose three sets have 395,264 pairs, for one
    epoch.
    """
    wanted = ("finetuning-stack", "finetuning-squad", "finetuning-nq")
    entries = [e.config for e in finetuning_entries() if e.config.name in wanted]
    samples = sum(config.num_samples or 0 for config in entries)
    rows = {}
    for teacher, margin, number, _ in _NOMIC_8:
        path, prefix = _TEACHERS[teacher]
        mining = changed(_mining(path, margin, number, max_length=512), query_prefix=prefix)
        datasets = tuple(
            changed(config, mining=mining, query_instruction="", document_instruction="")
            for config in entries
        )
        rows[_nomic_8_row(teacher, margin, number)] = Run(
            name="nomic-table8",
            model=BiEncoderConfig(
                backbone=BackboneConfig(path="hf://intfloat/e5-large-unsupervised@main"),
                query_prefix="query: ",
                document_prefix="passage: ",
            ),
            data=DataConfig(datasets=datasets),
            stages=(
                StageConfig(
                    name="finetune",
                    datasets={dataset.name: 1.0 for dataset in datasets},
                    batch=BatchConfig(
                        policy="homogeneous",
                        temperature=1.0,
                        global_pairs=256,
                        num_negatives=number,
                        in_batch_negatives=True,
                    ),
                    loss=InfoNCE(temperature=0.02),
                    optimizer=AdamW(learning_rate=2e-5, weight_decay=0.01, warmup_steps=400),
                    steps=samples // 256,
                    checkpoint_every_steps=500,
                ),
            ),
            evaluation=EvaluationConfig(),
            placement=Placement(
                workers=8,
                use_gpu=True,
                cpus_per_worker=8.0,
                zero_stage=1,
                micro_batch_tokens=32_768,
            ),
        )
    return rows


def nomic_8_small() -> dict[str, Run]:
    """Runs of Nomic's Table 8 at small size: the bi-encoder's quickstart with negatives mined by
    all-MiniLM.
    """
    whole = biencoder.quickstart()
    rows = {}
    for margin, number in ((None, 4), (0.95, 4), (0.98, 4), (0.95, 7), (0.95, 10)):
        dataset = DatasetConfig(
            name="wiki-sentence",
            source=Wikipedia().pairs("sentence"),
            num_samples=1500,
            mining=_mining(MINILM, margin, number, max_length=128),
        )
        first = whole.stages[0]
        stage = changed(
            first,
            datasets={dataset.name: 1.0},
            batch=changed(first.batch, global_pairs=16, num_negatives=number),
            steps=60,
        )
        data = changed(whole.data, datasets=(dataset,))
        rows[_nomic_8_row("all-MiniLM", margin, number)] = changed(
            whole, data=data, stages=(stage,)
        )
    return rows


def _mining(teacher: str, margin: float | None, number: int, *, max_length: int) -> MiningConfig:
    rule: Rule = TopK() if margin is None else PercPos(max_relative_score=margin)
    return MiningConfig(teacher=teacher, rule=rule, num_negatives=number, max_length=max_length)


_CDE_1 = ("neither", "contextual batches", "contextual architecture", "both")


def printed_cde_1() -> PrintedFigures:
    """Published scores of CDE's Table 1, for batches of 16,384 pairs, or 512 for contextual
    ones.
    """
    figures = (59.9, 61.7, 62.4, 63.1)
    return {row: {"NDCG@10": score} for row, score in zip(_CDE_1, figures, strict=True)}


def cde_1() -> dict[str, Run]:
    """Runs of CDE's Table 1: the first phase with and without contextual batches and
    architecture.

    The paper's small models have 6 layers, 64 tokens and 64 documents of context (section 5);
    these have the whole backbone, because no encoder of 6 layers is published with it.
    """
    small = ("query_max_length", "document_max_length", "num_context")
    both = override(small_unsupervised(), [f"model.{name}=64" for name in small])
    without = plain(both)
    return {
        "neither": random_batches(without, 16_384),
        "contextual batches": without,
        "contextual architecture": random_batches(both, 16_384),
        "both": both,
    }


def cde_1_small() -> dict[str, Run]:
    """Runs of CDE's Table 1 at small size: the quickstart and its ablations, all with batches of 64
    pairs.
    """
    both = cde.quickstart()
    pairs = both.stages[0].batch.global_pairs
    return {
        "neither": cde_random(),
        "contextual batches": cde_filtered(),
        "contextual architecture": random_batches(both, pairs),
        "both": both,
    }


def plain(run: Run) -> Run:
    """Copy a run with a bi-encoder of the same backbone as model."""
    model = run.model
    assert isinstance(model, BiEncoderConfig | CDEConfig)
    plain = BiEncoderConfig(
        backbone=model.backbone,
        query_prefix=model.query_prefix,
        document_prefix=model.document_prefix,
        query_max_length=model.query_max_length,
        document_max_length=model.document_max_length,
    )
    return changed(run, model=plain)


def random_batches(run: Run, global_pairs: int) -> Run:
    """Copy a run with random batches, each from one data set, and the same total number of
    pairs.
    """
    datasets = tuple(changed(dataset, clusters=None) for dataset in run.data.datasets)
    stages = tuple(
        changed(
            stage,
            batch=changed(stage.batch, policy="homogeneous", global_pairs=global_pairs),
            steps=stage.steps * stage.batch.global_pairs // global_pairs,
        )
        for stage in run.stages
    )
    data = changed(run.data, datasets=datasets)
    return changed(run, data=data, stages=stages)
