"""Run the synthesis job, from its command-line arguments to a finished folder of records."""

import math
import shlex
from typing import TYPE_CHECKING, TextIO

from rayembed.assets.storage import check_writable, join
from rayembed.display.tables import Table, console
from rayembed.pipeline.job import Job, JobContext, Reader
from rayembed.pipeline.storage import placed
from rayembed_extras.synthesis.settings import SynthesisRun

if TYPE_CHECKING:
    from rayembed.data.engine.artifacts import DatasetArtifact


def _synthesize(run: SynthesisRun, context: JobContext) -> None:
    """Write the records; print a table of them and the next command."""
    run = placed(run)
    storage = run.placement.storage_path
    check_writable(storage)
    from rayembed_extras.synthesis.synthesize import synthesize

    prepared = synthesize(run)
    _print_outcome(prepared, storage, out=context.out)


def _print_outcome(prepared: "DatasetArtifact", storage: str, *, out: TextIO) -> None:
    """Print the number of records of each kind, the folder, and the next command."""
    from rayembed.data.audit import AUDIT
    from rayembed_extras.synthesis.synthesize import REJECTED

    found = prepared.manifest
    state = "was there" if prepared.reused else f"took {found['seconds']:.1f} s"
    rows = []
    for kind, asked in found["asked"].items():
        repeated, records = (found[what].get(kind, 0) for what in ("duplicates", "records"))
        numbers = (found["tasks"][kind], asked, asked - repeated - records, repeated, records)
        rows.append([kind, *(f"{number:,}" for number in numbers)])
    heads = ["kind", "tasks", "asked", "rejected", "repeated", "records"]
    title = f"Synthetic pairs {found['dataset']}, {state}"
    printer = console(out, soft_wrap=True)
    printer.print(Table(heads, rows, title=title, align="lr"))
    source = f"{{kind: records, path: {prepared.folder}}}"
    printer.print(f"Records   {prepared.folder}")
    printer.print(f"Audit     {join(prepared.folder, AUDIT)}")
    if found["rejected"]:
        printer.print(f"Rejected  {join(prepared.folder, REJECTED)}")
    printer.print(f"Use       source: {source}")
    printer.print(
        "Next      rayembed prepare --set "
        f"{shlex.quote(f'data.datasets.pairs.source={source}')} "
        f"--set {shlex.quote(f'placement.storage_path={storage}')}"
    )


def _show(run: SynthesisRun, context: JobContext) -> None:
    """Print the resolved settings and the minimum number of requests."""
    context.out.write(f"# synthesis {run.name}, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    context.out.flush()
    config = run.synthesis
    rows = []
    for kind, examples in config.examples.items():
        tasks = math.ceil(examples / config.examples_per_task)
        asked = math.ceil(tasks / config.tasks_per_request)
        rows.append([kind, f"{tasks:,}", f"{asked:,} or more", f"{examples:,}"])
    heads = ["kind", "tasks", "requests for tasks", "examples"]
    title = f"Synthesis {run.name} by {config.llm.model}"
    console(context.err, soft_wrap=True).print(Table(heads, rows, title=title, align="lr"))


_READER = Reader(
    kind=SynthesisRun,
    base=SynthesisRun.read,
    recipe="a file that --dry-run printed; default: NV-Embed's 120,000 examples, from a server on "
    "this machine",
    examples="synthesis.examples.short-long=1000 synthesis.llm.url=https://host/v1 "
    "synthesis.llm.api_key_env=OPENAI_API_KEY",
)

run_synthesis_job = Job(
    options=_READER.options,
    read=_READER,
    run=_synthesize,
    shows=("the resolved run", "what it asks for", _show),
)
"""The job that lets a language model write training pairs."""
