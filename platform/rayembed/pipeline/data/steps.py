"""The work of a data job: check, do the steps, tell where the results are."""

from collections.abc import Collection

from rayembed.assets.storage import check_writable
from rayembed.config.data_run import DataRun
from rayembed.data.engine.artifacts import DatasetArtifact
from rayembed.data.prepare import prepare_datasets
from rayembed.data.sources.check import check_sources
from rayembed.pipeline.checks.model import check_teachers
from rayembed.pipeline.checks.network import check_asked
from rayembed.pipeline.data.tables import print_prepared
from rayembed.pipeline.run.runtime import runtime_of
from rayembed.pipeline.storage import placed


def do_steps(run: DataRun, names: Collection[str], until: str) -> dict[str, list[DatasetArtifact]]:
    """Data set → its finished folders, after a table of them was printed.

    Everything that a user can get wrong is checked before a worker starts.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    run = placed(run)
    check_writable(run.placement.storage_path)
    named = [dataset for dataset in run.data.datasets if dataset.name in names]
    check_asked(named, run.placement.storage_path)
    if until != "records":
        check_teachers(named)
    sources = check_sources(run, names)
    runtime = runtime_of(run.placement)
    runtime.start()
    done = prepare_datasets(run, runtime.data_context(run), names, until, sources)
    print_prepared(run, done)
    return done
