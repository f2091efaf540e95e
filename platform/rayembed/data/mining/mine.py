"""The mining step: adds hard negatives from one or several teachers to records."""

import logging
from collections.abc import Sequence
from typing import Any

import xxhash

from rayembed.assets.array_files import save_array
from rayembed.assets.storage import file_name, join
from rayembed.config.data import DatasetConfig
from rayembed.config.mining import MiningConfig, Teacher
from rayembed.data.cleaning.overlap import find_in_documents, overlap_identity
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import Part
from rayembed.data.engine.work_items import Execute, Needs, run_resumable, run_tasks
from rayembed.data.mining.candidate_search import (
    CorpusSearch,
    IndexItem,
    IndexShard,
    MeasureRecall,
    MineUnit,
    SearchItem,
    SearchShard,
    cut_mining,
)
from rayembed.data.mining.corpus import MOST_SHARED, CorpusFiles
from rayembed.data.mining.counts import add_up_mining
from rayembed.data.mining.documents import corpus_of, make_documents
from rayembed.data.mining.tasks import MineParts
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.vectors.embed import EmbedPart, Texts, Vectors, embed_parts
from rayembed.models.versions import VECTORS

log = logging.getLogger(__name__)

CODE_VERSION = 1
"""Code version of mining; raise it when the same inputs yield other negatives or scores."""

_LOW_RECALL = 0.9
"""Recall below which mining warns."""


def make_mined(
    context: PipelineContext, dataset: DatasetConfig, parent: DatasetArtifact, held_out: HeldOut
) -> DatasetArtifact:
    """Mine a data set into a folder of its records with hard negatives.

    Args:
        held_out: what documents of `mining.corpus` may not be; the records were checked before.

    The manifest has, beside what all steps write: `teachers`, the numbers `mined`,
    `without_negatives`, `short` (rows with fewer than `num_negatives`), `vague` (rows whose query
    has more than `MOST_SHARED` positives in several rows, of which only the row's own count),
    `candidates` (looked at), `refused` by reason, `histograms` of each teacher, `mining_examples`,
    `search` where it is approximate, with the recall of each teacher's candidates, and where texts
    of benchmarks are not mined, `documents_overlap` by reason and examples of them, `removed`.

    Raises:
        ConfigError: the search needs FAISS, which is not installed.
        AssetError, ConfigError, DataError: evaluation texts cannot be had.
        DataError: the corpus to mine from has no documents, or too many bad rows.
    """
    config = dataset.mining
    assert config is not None
    config.search.check()
    fingerprint, rescoring = context.teacher_loader.fingerprint, config.rescoring
    cross_encoder = None if rescoring is None else fingerprint(rescoring.model)
    corpus = corpus_of(context, config.corpus, held_out) if config.corpus is not None else None
    inputs = {
        "code": CODE_VERSION,
        "most_shared": MOST_SHARED,
        # Those that decide the selection; models and files count by their content instead.
        "settings": config.model_dump(
            mode="json",
            exclude={
                "teacher": True,
                "further_teachers": {"__all__": {"teacher"}},
                "corpus": {"path"},
                "rescoring": {"model"},
            },
        ),
        "records": parent.fingerprint,
        "seed": context.seed if config.draws_by_seed else None,
        "teachers": [fingerprint(one.teacher) for one in _teachers(config)],
        "vectors": VECTORS,
        "cross_encoder": cross_encoder,
        "corpus": corpus and dict(corpus[0].inputs),
    }
    if corpus is not None and dataset.cleaning.overlap is not None:
        # What finds them, beside their names and versions, is an input of the records.
        inputs["overlap"] = overlap_identity(dataset.cleaning.overlap, context.root)
    writer = ArtifactWriter(context.storage, "mined", dataset.name, inputs, parent)

    def mine() -> DatasetArtifact:
        documents: list[Part] = []
        if config.corpus is not None and corpus is not None:
            documents = make_documents(context, config.corpus, *corpus, held_out).parts
        return _mine(context, dataset, parent.parts, documents, writer, cross_encoder)

    return writer.get_or_make(mine)


def _mine(
    context: PipelineContext,
    dataset: DatasetConfig,
    records: Sequence[Part],
    documents: Sequence[Part],
    writer: ArtifactWriter,
    cross_encoder: str | None,
) -> DatasetArtifact:
    """Run all mining tasks and write the folder's manifest."""
    config = dataset.mining
    assert config is not None
    teachers = [writer.settled(context, teacher) for teacher in _teachers(config)]
    if config.rescoring is not None and cross_encoder is not None:
        rescoring = writer.settled(context, config.rescoring)
        config = config.model_copy(update={"rescoring": rescoring})
    # Before texts are embedded, as evaluation texts may fail to load.
    excluded, not_mined = _texts_of_benchmarks(context, dataset, documents, writer)
    vectors = [_embedded(context, dataset, records, documents, teacher) for teacher in teachers]
    working, execute = writer.working_folder, context.execute
    rows, given = [part.rows for part in records], config.pool == "given"
    count = sum(rows) + sum(part.rows for part in documents)
    approximate = config.search.approximate
    cut = cut_mining(rows, 0 if given else count, indexed=approximate)
    search = CorpusSearch(
        working,
        CorpusFiles(tuple(records), tuple(documents), vectors[0], excluded),
        cut.shards,
        config.search,
        config.candidates,
        context.seed,
    )
    units = [MineUnit(tuple(records[n] for n in numbers)) for numbers in cut.units]
    if given:  # nothing is searched for
        units = [MineUnit((part,)) for part in records]
    found = _search(search, units, vectors, dataset.name, execute)
    task = MineParts(
        writer.parts_folder,
        search,
        tuple(vectors),
        config,
        cross_encoder or "",
    )
    # A cross-encoder uses all CPUs of its machine, the search alone one, and an index no GPU.
    needs: Needs = "gpu or cpu" if config.rescoring is None else "gpu or machine"
    if config.rescoring is None and (approximate or search.in_shards):
        needs = "cpu"
    # Results stay beside the examples that they tell of, and go with them.
    results = run_resumable(working, f"mine {dataset.name}", task, units, execute, needs)
    made = writer.finish(
        results,
        [part for result in results for part in result["parts"]],
        teachers=[
            {"teacher": teacher.teacher, "weights": one.weights, "dtype": teacher.dtype}
            for teacher, one in zip(teachers, vectors, strict=True)
        ],
        cross_encoder=config.rescoring
        and {
            "model": config.rescoring.model,
            "weights": cross_encoder,
            "dtype": config.rescoring.dtype,
        },
        **add_up_mining(results, working),
        **not_mined,
        **found,
    )
    _tell(made)
    return made


def _texts_of_benchmarks(
    context: PipelineContext,
    dataset: DatasetConfig,
    documents: Sequence[Part],
    writer: ArtifactWriter,
) -> tuple[str, dict[str, Any]]:
    """Return the path of a file with hashes of excluded documents (empty if there are none), and
    manifest entries about them.

    Documents keep their parts, and so their vectors, whatever the evaluation texts are.
    """
    overlap = dataset.cleaning.overlap
    if overlap is None or not documents:
        return "", {}
    working = writer.working_folder
    where = context.root, documents, context.execute
    found = find_in_documents(writer.folder, working, dataset.name, overlap, *where)
    told = {"documents_overlap": found.counts, "removed": found.examples}
    if not len(found.hashes):
        return "", told
    named = xxhash.xxh3_128_hexdigest(found.hashes.tobytes())
    path = join(working, f"excluded-{named}.npy")
    save_array(path, found.hashes)
    return path, told


def _search(
    search: CorpusSearch,
    units: Sequence[MineUnit],
    vectors: Sequence[Vectors],
    dataset: str,
    execute: Execute,
) -> dict[str, Any]:
    """Build the indexes or search the shards for all units before mining; return manifest entries
    about the recall.
    """
    working, teachers = search.folder, tuple(vectors)
    shards = range(len(search.shards))
    if search.in_shards:
        task = SearchShard(search, teachers)
        items = [SearchItem(unit, number) for unit in units for number in shards]
        run_resumable(working, f"search {dataset}", task, items, execute, "gpu or cpu")
    if not search.search.approximate:
        return {}
    indexes = [IndexItem(one, number) for one in dict.fromkeys(teachers) for number in shards]
    run_resumable(working, f"index {dataset}", IndexShard(search), indexes, execute)
    measured = MeasureRecall(search, teachers)
    every = [MineUnit(tuple(part for unit in units for part in unit.parts))]
    (result,) = run_resumable(working, f"recall {dataset}", measured, every, execute, "gpu or cpu")
    return {"search": {**search.search.model_dump(mode="json"), "measured": result["recall"]}}


def _tell(made: DatasetArtifact) -> None:
    """Log the outcome of mining; too few negatives cause a warning, not an error."""
    told = made.manifest
    for measured in told.get("search", {}).get("measured", ()):
        much = measured["recall"] < _LOW_RECALL
        log.log(
            logging.WARNING if much else logging.INFO,
            "data set %s: the search by %s finds %.1f %% of the %d best candidates of %d queries%s",
            *(told["dataset"], told["search"]["kind"], 100 * measured["recall"]),
            *(measured["candidates"], measured["queries"]),
            "; raise mining.search.probes or mining.search.ef_search" if much else "",
        )
    rows, none, candidates = told["rows_in"], told["without_negatives"], told["candidates"]
    log.info(
        "data set %s: mined %s hard negatives; %s of %s rows have fewer negatives than requested "
        "and %s rows have none; the mining rule refused %.0f %% of %s candidates",
        told["dataset"],
        *(f"{count:,}" for count in (told["mined"], told["short"], rows, none)),
        100 * told["refused"].get("by the rule", 0) / max(candidates, 1),
        f"{candidates:,}",
    )
    if 2 * none > rows:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in told["refused"].items())
        log.warning(
            "data set %s: more than half of the rows have no mined negative (refused candidates: "
            "%s); loosen mining.rule, raise mining.candidates or choose another teacher",
            told["dataset"],
            reasons or "none, because there were too few candidates",
        )


def _teachers(config: MiningConfig) -> tuple[Teacher, ...]:
    """All teachers, in the order in which they take turns to propose negatives."""
    return (config, *config.further_teachers)


def _embedded(
    context: PipelineContext,
    dataset: DatasetConfig,
    records: Sequence[Part],
    documents: Sequence[Part],
    teacher: Teacher,
) -> Vectors:
    """Embed all texts that this teacher scores: rows, corpus documents, and given negatives."""
    vectors = embed_parts(context, dataset.name, records, teacher)
    further: list[tuple[Texts, Sequence[Part]]] = [("documents", documents)]
    if dataset.mining is not None and dataset.mining.pool == "given":
        further.append(("given", records))
    for texts, parts in further:
        task = EmbedPart(vectors, teacher, context.teacher_loader.load, texts)
        name = f"embed {texts} {file_name(vectors.folder)}"
        missing = vectors.missing(parts, texts)
        run_tasks(name, task, missing, context.execute, "gpu or machine")
    return vectors
