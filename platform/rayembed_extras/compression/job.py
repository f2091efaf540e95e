"""Run the compression job: make variants of a model as the arguments say, and compare them."""

import argparse
from typing import Any

from rayembed.errors import ConfigError
from rayembed.pipeline.evaluate.job import check_task_names, score_options
from rayembed.pipeline.job import Job, JobContext, Reader, option
from rayembed_extras.compression.run_settings import CompressionRun
from rayembed_extras.compression.settings import COMPRESSIONS, settings_in


def _way(text: str) -> dict[str, Any]:
    try:
        return settings_in(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _compress(run: CompressionRun, context: JobContext) -> int:
    check_task_names(run)
    # torch, mteb and MLflow; the rest of the job needs none of them.
    from rayembed.registry.tracking_uri import reachable_tracking_uri
    from rayembed_extras.compression.compress import compress, ready
    from rayembed_extras.compression.report import open_tracker, print_report, track, write_report

    placement = run.placement
    tracking_uri = reachable_tracking_uri(placement.tracking_uri, placement.storage_path)
    known = ready(run)
    # Before any work: MLflow may have another run of this name.
    with open_tracker(known.run, tracking_uri) as tracker:
        result = compress(known)
        folder = write_report(result)
        versions = track(result, tracker)
    print_report(result, context.out, folder=folder, tracking_uri=tracking_uri, versions=versions)
    if not tracker.complete:
        context.out.write(
            "MLflow     lacks some data: run the same command again to send the rest\n"
        )
    return 0


def _show(run: CompressionRun, context: JobContext) -> None:
    """Print the settings of the compression after all checks that need no computation."""
    check_task_names(run)
    from rayembed_extras.compression.compress import ready

    known = ready(run)
    context.out.write(f"# compression, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    context.out.flush()
    texts = f"{len(known.texts)} calibration texts"
    context.err.write(f"model {known.folder}, {len(run.ways)} ways, {texts}\n")


def _list(context: JobContext) -> None:
    for kind, way in COMPRESSIONS.classes().items():
        context.out.write(f"{kind:<12} {(way.__doc__ or '').splitlines()[0]}\n")


_READER = Reader(
    kind=CompressionRun,
    base=CompressionRun.read,
    examples="calibration.number=512, speed=null, placement.registered_model=NAME",
    named=True,
    own=(
        option(
            "--model REFERENCE",
            "a folder, hf://…, s3://…, pypi://… or models:/name@alias",
            sets="model.reference",
            missing="no model: give --model, a folder, hf://… or models:/name@alias",
        ),
        option(
            "--way KIND[,SETTING=VALUE…]",
            "a way to compress it, see --list: int8 or layers,share=0.5",
            sets="ways",
            missing="no way to compress the model: give --way, see --list",
            often=True,
            type=_way,
        ),
        option(
            "--texts PATH",
            "calibration texts, Parquet, JSONL, CSV or TSV with a column `text`; default: what "
            "the model was trained on, where its run is known",
            sets="calibration.path",
        ),
        *score_options("a benchmark that scores every variant, as wikipedia or NanoBEIR"),
    ),
)

run_compression_job = Job(
    options=_READER.options,
    read=_READER,
    run=_compress,
    lists=("the ways", _list),
    shows=("the compression", "what it reads", _show),
)
"""The job that compresses a model."""
