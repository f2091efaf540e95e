"""The mining step: adds hard negatives from one or several teachers to records."""

import logging
from collections.abc import Sequence

from rayembed.assets.storage import file_name
from rayembed.config.data import DatasetConfig
from rayembed.config.mining import MiningConfig, Teacher
from rayembed.data.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.mining.corpus import MOST_SHARED, CorpusFiles
from rayembed.data.mining.counts import add_up_mining
from rayembed.data.mining.documents import EmbedDocuments, corpus_of, make_documents
from rayembed.data.mining.queries import EmbedGiven
from rayembed.data.mining.tasks import MinePart, MiningTeacher
from rayembed.data.parts import Part
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.vectors.embed import PartItem, Vectors, embed_parts
from rayembed.data.work_items import Needs, run_resumable, run_tasks

log = logging.getLogger(__name__)

CODE_VERSION = 5
"""Code version of mining; bump when the same inputs yield other negatives."""

_RESCORING_VERSION = 6
"""Code version of mining with a cross-encoder, whose scores of positives are kept since."""


def make_mined(
    context: PipelineContext, dataset: DatasetConfig, parent: DatasetArtifact, held_out: HeldOut
) -> DatasetArtifact:
    """Mine a data set: folder of the records with their hard negatives.

    Args:
        held_out: what documents of `mining.corpus` may not be; the records were checked before.

    The manifest has, beside what all steps write: `teachers`, the numbers `mined`,
    `without_negatives`, `short` (rows with fewer than `num_negatives`), `vague` (rows whose query
    has more than `MOST_SHARED` positives in several rows, of which only the row's own count),
    `candidates` (looked at), `refused` by reason, `histograms` of each teacher, `mining_examples`.

    Raises:
        DataError: the corpus to mine from has no documents, or too many bad rows.
    """
    config = dataset.mining
    assert config is not None
    weights = [context.teacher_loader.fingerprint(one.teacher) for one in _teachers(config)]
    rescoring = config.rescoring
    cross_encoder = (
        None if rescoring is None else context.teacher_loader.fingerprint(rescoring.model)
    )
    corpus = corpus_of(context, config.corpus, held_out) if config.corpus is not None else None
    inputs = _inputs(config, parent, context.seed) | {
        "teachers": weights,
        "cross_encoder": cross_encoder,
        "corpus": corpus and dict(corpus[0].inputs),
    }
    writer = ArtifactWriter(context.storage, "mined", dataset.name, inputs, parent)

    def mine() -> DatasetArtifact:
        documents: list[Part] = []
        if config.corpus is not None and corpus is not None:
            documents = make_documents(context, config.corpus, *corpus, held_out).parts
        return _mine(context, dataset, parent.parts, documents, writer, weights, cross_encoder)

    return writer.get_or_make(mine)


def _mine(
    context: PipelineContext,
    dataset: DatasetConfig,
    records: Sequence[Part],
    documents: Sequence[Part],
    writer: ArtifactWriter,
    weights: Sequence[str],
    cross_encoder: str | None,
) -> DatasetArtifact:
    """Run the mining; `weights` and `cross_encoder` are fingerprints."""
    config = dataset.mining
    assert config is not None
    teachers = [writer.settled(context, teacher) for teacher in _teachers(config)]
    vectors = [_embedded(context, dataset, records, documents, teacher) for teacher in teachers]
    working = writer.working_folder
    task = MinePart(
        writer.parts_folder,
        working,
        CorpusFiles(tuple(records), tuple(documents), vectors[0]),
        tuple(MiningTeacher(*one) for one in zip(vectors, weights, strict=True)),
        config,
        context.seed,
        cross_encoder or "",
    )
    items = [PartItem(part) for part in records]
    # A cross-encoder uses all CPUs of its machine, the search alone one.
    needs: Needs = "gpu or cpu" if config.rescoring is None else "gpu or machine"
    # Results stay beside the examples that they tell of, and go with them.
    results = run_resumable(working, f"mine {dataset.name}", task, items, context.execute, needs)
    made = writer.finish(
        results,
        [part for result in results for part in result["parts"]],
        teachers=[
            {"teacher": teacher.teacher, "weights": one, "dtype": teacher.dtype}
            for teacher, one in zip(teachers, weights, strict=True)
        ],
        **add_up_mining(results, working),
    )
    _tell(made)
    return made


def _tell(made: DatasetArtifact) -> None:
    """Log the outcome; too few negatives are reported, not an error."""
    told = made.manifest
    rows, none, candidates = told["rows_in"], told["without_negatives"], told["candidates"]
    log.info(
        "mine %s: %s negatives; %s of %s rows short, %s with none; the rule refused %.0f %% of "
        "%s candidates",
        told["dataset"],
        *(f"{count:,}" for count in (told["mined"], told["short"], rows, none)),
        100 * told["refused"].get("by the rule", 0) / max(candidates, 1),
        f"{candidates:,}",
    )
    if 2 * none > rows:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in told["refused"].items())
        log.warning(
            "mine %s: more than half of the rows have no negative (refused: %s); loosen "
            "mining.rule, raise mining.candidates or take another teacher",
            told["dataset"],
            reasons or "nothing, there were too few candidates",
        )


def _inputs(config: MiningConfig, parent: DatasetArtifact, seed: int) -> dict[str, object]:
    """Inputs of the folder's fingerprint other than models and document files."""
    return {
        "code": CODE_VERSION if config.rescoring is None else _RESCORING_VERSION,
        "most_shared": MOST_SHARED,
        "settings": _settings(config),
        "records": parent.fingerprint,
        "seed": None if config.sampling == "best" else seed,
    }


def _teachers(config: MiningConfig) -> tuple[Teacher, ...]:
    """Teachers in the order in which they take turns."""
    return (config, *config.further_teachers)


def _settings(config: MiningConfig) -> dict[str, object]:
    """Settings that decide the selection; models and files count by their content instead."""
    return config.model_dump(
        mode="json",
        exclude={
            "teacher": True,
            "further_teachers": {"__all__": {"teacher"}},
            "corpus": {"path"},
            "rescoring": {"model"},
        },
    )


def _embedded(
    context: PipelineContext,
    dataset: DatasetConfig,
    records: Sequence[Part],
    documents: Sequence[Part],
    teacher: Teacher,
) -> Vectors:
    """Teacher's vectors of everything to be scored."""
    vectors = embed_parts(context, dataset.name, records, teacher)
    digits = file_name(vectors.folder)
    load, execute = context.teacher_loader.load, context.execute
    if documents:
        items = vectors.missing(documents)
        task = EmbedDocuments(vectors, teacher, load)
        run_tasks(f"embed documents {digits}", task, items, execute, "gpu or machine")
    if dataset.mining is not None and dataset.mining.pool == "given":
        items = vectors.missing_given(records)
        given = EmbedGiven(vectors, teacher, load)
        run_tasks(f"embed given {digits}", given, items, execute, "gpu or machine")
    return vectors
