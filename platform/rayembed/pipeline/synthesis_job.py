"""The synthesis job from its arguments to a finished folder of records."""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TextIO

from rayembed.assets.storage import check_writable, join
from rayembed.config.override import override
from rayembed.config.synthesis import OpenAICompatible, SynthesisRun
from rayembed.data.artifacts import DatasetArtifact
from rayembed.data.audit import AUDIT
from rayembed.data.synthesis.synthesize import REJECTED
from rayembed.pipeline.command_line import exit_code, log_to_stderr
from rayembed.pipeline.storage import absolute_storage
from rayembed.tables import Table, console


def run_synthesis_job(argv: Sequence[str], *, about: str | None) -> int:
    """The exit code of the job: 0, 1 when it failed, 2 when it was asked wrongly.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
    """

    def work() -> None:
        args = _parser(about).parse_args(list(argv))
        base = SynthesisRun() if args.recipe is None else SynthesisRun.read(args.recipe)
        run = override(base, args.assignments)
        if args.dry_run:
            _print_dry_run(run, out=sys.stdout, tables=sys.stderr)
        else:
            log_to_stderr()
            _synthesize(run)

    return exit_code(work)


def _synthesize(run: SynthesisRun) -> DatasetArtifact:
    """The folder of records, after a table of it and what to run next were printed."""
    storage = absolute_storage(run.placement.storage_path)
    placement = run.placement.model_copy(update={"storage_path": storage})
    run = run.model_copy(update={"placement": placement})
    check_writable(storage)
    # Ray; a dry run needs none.
    from rayembed.data.synthesis.on_ray import read_key, synthesize
    from rayembed.pipeline.on_ray import connect

    if isinstance(run.synthesis.llm, OpenAICompatible):
        read_key(run.synthesis.llm)  # a cluster that waits for nothing is dear
    connect()
    prepared = synthesize(run)
    _print_outcome(prepared, storage, out=sys.stdout)
    return prepared


def _print_outcome(prepared: DatasetArtifact, storage: str, *, out: TextIO) -> None:
    """Write what came of each kind, where it lies, and what to run next."""
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
        f"Next      python jobs/prepare_pairs.py --set 'data.datasets.pairs.source={source}' "
        f"--set 'placement.storage_path={storage}'"
    )


def _print_dry_run(run: SynthesisRun, *, out: TextIO, tables: TextIO) -> None:
    """Write the resolved run, and beside it what it asks for at least."""
    out.write(f"# synthesis {run.name}, fingerprint {run.fingerprint}\n")
    out.write(run.to_yaml())
    out.flush()
    config = run.synthesis
    rows = []
    for kind, examples in config.examples.items():
        tasks = math.ceil(examples / config.examples_per_task)
        asked = math.ceil(tasks / config.tasks_per_request)
        rows.append([kind, f"{tasks:,}", f"{asked:,} or more", f"{examples:,}"])
    heads = ["kind", "tasks", "requests for tasks", "examples"]
    title = f"Synthesis {run.name} by {config.llm.model}"
    console(tables, soft_wrap=True).print(Table(heads, rows, title=title, align="lr"))


def _parser(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument(
        "--recipe",
        metavar="run.yaml",
        help="a file that --dry-run printed; default: NV-Embed's 120,000 examples, from a server "
        "on this machine",
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="path.to.setting=value",
        help="change a setting; may be given often: synthesis.examples.short-long=1000 "
        "synthesis.llm.url=https://host/v1 synthesis.llm.api_key_env=OPENAI_API_KEY",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved run (stdout) and what it asks for (stderr); start nothing",
    )
    return parser
