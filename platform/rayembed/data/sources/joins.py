"""Sources that join distant rows: premises of NLI, judgements with their texts.

Rows are scattered into buckets by their join key, and each bucket is converted separately.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.config.sources import BeirSource
from rayembed.data.artifacts import ArtifactWriter, PipelineContext
from rayembed.data.shuffle import Bucket, number_of_buckets
from rayembed.data.sources.beir import (
    BYTES_OF_JUDGEMENTS_PER_BUCKET,
    IDS,
    ConvertJudged,
    Scattering,
    ScatterJudgements,
    ScatterTexts,
    merge_needed,
)
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.nli import ConvertPremises, ScatterPremises
from rayembed.data.sources.rows import check_columns
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.work_items import Result, run_resumable
from rayembed.errors import ConfigError

log = logging.getLogger(__name__)


def convert_premises(
    context: PipelineContext,
    dataset: DatasetConfig,
    pieces: Sequence[FilePiece],
    held_out: HeldOut,
    writer: ArtifactWriter,
) -> list[Result]:
    """Results of the conversion tasks for natural-language inference."""
    folder = join(writer.working_folder, "scattered")
    buckets = number_of_buckets(sum(piece.size for piece in pieces))
    scatter = ScatterPremises(writer.parts_folder, folder, dataset, buckets)
    run = partial(run_resumable, execute=context.execute)
    sent = run(writer.working_folder, f"scatter {dataset.name}", scatter, pieces)
    task = ConvertPremises(writer.parts_folder, folder, _files(sent), buckets, dataset, held_out)
    numbers = [Bucket(number) for number in range(buckets)]
    made = run(writer.folder, f"records {dataset.name}", task, numbers)
    return [*sent, *made]


def convert_judged(
    context: PipelineContext,
    dataset: DatasetConfig,
    files: Mapping[str, Sequence[FilePiece]],
    held_out: HeldOut,
    writer: ArtifactWriter,
) -> list[Result]:
    """Results of the conversion tasks for judgements with queries and documents."""
    source = dataset.source
    assert isinstance(source, BeirSource)
    folder = join(writer.working_folder, "scattered")
    size = sum(piece.size for piece in files["path"])
    buckets = number_of_buckets(size, BYTES_OF_JUDGEMENTS_PER_BUCKET)
    shared = Scattering(writer.parts_folder, folder, dataset, buckets)
    run = partial(run_resumable, execute=context.execute)
    send = partial(run, writer.working_folder)
    judged = send(f"judgements {dataset.name}", ScatterJudgements(shared), files["path"])
    needed = merge_needed(folder, [result["needed"] for result in judged])
    queries = send(f"queries {dataset.name}", ScatterTexts(shared, source.query), files["queries"])
    documents = send(
        f"documents {dataset.name}",
        ScatterTexts(shared, source.document, needed),
        files["corpus"],
    )
    task = ConvertJudged(shared, _files(judged), _files(queries), _files(documents), held_out)
    numbers = [Bucket(number) for number in range(buckets)]
    made = run(writer.folder, f"records {dataset.name}", task, numbers)
    unread = sum(result["unread"] for result in (*queries, *documents))
    if unread:
        log.warning(
            "data set %s: %d rows of its corpus and queries could not be read; judgements that "
            "need them are rejected",
            *(dataset.name, unread),
        )
    return [*judged, *made]


def check_texts(source: BeirSource, corpus: FilePiece, queries: FilePiece) -> None:
    """Check that documents and queries have ids and their text columns.

    The title may be missing if the settings do not name it explicitly.

    Raises:
        ConfigError: they do not; the message names the nearest column.
    """
    for setting, piece in (("corpus", corpus), ("queries", queries)):
        try:
            check_columns(piece, {f"source.{setting}: the id": IDS[1]})
        except ConfigError:
            check_columns(piece, {f"source.{setting}: the id": IDS[0]})
    lenient = [] if "document" in source.model_fields_set else ["source.document"]
    check_columns(corpus, {"source.document": source.document}, lenient)
    told = {"source.query": source.query, "source.language": source.language}
    check_columns(queries, {name: column for name, column in told.items() if column is not None})


def _files(results: Sequence[Result]) -> tuple[str, ...]:
    return tuple(name for result in results for name in result["scattered"])
