"""The fault drill: one small training job, once undisturbed and then once for each fault.

    make drill
    make drill ARGS="--only 'worker killed'"

Prints a table in Markdown and ends with 1 if a fault lost rows, ended in other weights than the
undisturbed run or left half-written files. Takes about half an hour on two cores.
"""

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import number_faults
import process_faults
import storage_faults
import surrounding_faults
import user_faults
from networks import SkippedError
from outcome import (
    NotThrown,
    Outcome,
    Trained,
    compare,
    half_written,
    markdown_table,
    read_trained,
)
from scene import PLASMA, WORKERS, Scene, UnexpectedError, scene, write_inputs

import rayembed
from rayembed.pipeline.run.on_ray import RAY_SETTINGS


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str
    throw: Callable[[Scene], tuple[str, str]]
    """Runs the job with the fault to its end; what the user sees, and what the user does."""
    cpus: Sequence[int] = (WORKERS,)
    """Of the cluster's nodes."""
    plasma_bytes: int = PLASMA
    cables: bool = False
    """Whether each node has an address of its own and can be cut off."""
    free_bytes: int | None = None
    """Memory that may be taken before Ray kills a worker; None: Ray's own limit."""
    expected: Callable[[Path, Path], Trained] | None = None
    """What the run should leave, of a folder and the run's file; None: what it leaves when nothing
    disturbs it."""


FAULTS = (
    Fault("worker killed", process_faults.worker_killed),
    Fault("controller killed", process_faults.controller_killed),
    Fault("worker stopped", process_faults.worker_stopped),
    Fault("all workers stopped", process_faults.all_workers_stopped),
    Fault("head lost", process_faults.head_lost),
    Fault("node removed", process_faults.node_removed, cpus=(1,) * (WORKERS + 1)),
    Fault("node cut off", process_faults.node_cut_off, cpus=(1,) * (WORKERS + 1), cables=True),
    Fault(
        "memory full",
        surrounding_faults.memory_full,
        free_bytes=surrounding_faults.FREE_MEMORY,
    ),
    Fault("disk full at a checkpoint", storage_faults.disk_full_at_checkpoint),
    Fault("newest checkpoint cut off", storage_faults.newest_checkpoint_cut_off),
    Fault("list of checkpoints cut off", storage_faults.list_of_checkpoints_cut_off),
    Fault(
        "object store full",
        surrounding_faults.object_store_full,
        plasma_bytes=surrounding_faults.SMALLEST_PLASMA,
    ),
    Fault("MLflow away", surrounding_faults.mlflow_away),
    Fault("poisoned row", user_faults.row_poisoned),
    Fault("too many poisoned rows", user_faults.rows_poisoned),
    Fault("submitted twice", user_faults.submitted_twice),
    Fault(
        "NaN gradient on a worker",
        number_faults.nan_gradient,
        expected=number_faults.without_that_step,
    ),
    Fault("diverging learning rate", number_faults.diverging_rate),
)


def main(argv: Sequence[str]) -> int:
    """The exit code: 0, or 1 when a fault did harm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument(
        "--only", action="append", choices=names, help="a fault; may be given often"
    )
    parser.add_argument("--out", type=Path, help="file that gets the table too")
    parser.add_argument(
        "--folder",
        type=Path,
        help="keeps all files of the runs; an undisturbed run that lies there is not trained again",
    )
    args = parser.parse_args(list(argv))
    folder = args.folder or Path(tempfile.mkdtemp(prefix="fault-drill-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        prepare_environment(folder)
        chosen = [fault for fault in FAULTS if args.only is None or fault.name in args.only]
        outcomes = drill(folder, chosen)
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    table = markdown_table(outcomes)
    sys.stdout.write(table)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table, encoding="utf-8")
    bad = [
        one for one in outcomes if (one.failed if isinstance(one, NotThrown) else not one.is_good)
    ]
    for one in bad:
        sys.stderr.write(f"harmful: {one}\n")
    return 1 if bad else 0


def prepare_environment(folder: Path) -> None:
    """What all processes of the drill inherit; Ray must not be imported yet."""
    token = folder / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.update(
        {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            **RAY_SETTINGS,
            "RAY_DISABLE_USAGE_STATS": "1",
            "RAYEMBED_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": f"{number_faults.BROKEN}:{Path(rayembed.__file__).parents[1]}",
            number_faults.VARIABLE: str(folder / "nan"),
        }
    )
    os.environ.pop("RAY_ADDRESS", None)


def drill(folder: Path, faults: Sequence[Fault]) -> list[Outcome | NotThrown]:
    """What came of each fault."""
    run_file = write_inputs(folder / "inputs")
    whole = undisturbed(folder / "undisturbed", run_file)
    outcomes: list[Outcome | NotThrown] = []
    for fault in faults:
        began = time.monotonic()
        outcomes.append(throw(fault, folder, run_file, whole))
        sys.stderr.write(f"{fault.name}: {time.monotonic() - began:.0f} s\n")
    return outcomes


def undisturbed(place: Path, run_file: Path) -> Trained:
    """What the run leaves that nothing disturbs."""
    if not place.exists():
        with scene(place, run_file) as calm:
            calm.submit().ends_with(0)
            if calm.steps.repeated():
                raise UnexpectedError("the undisturbed run did steps again")
    return read_trained(place / "outputs")


def throw(fault: Fault, folder: Path, run_file: Path, whole: Trained) -> Outcome | NotThrown:
    """What came of one fault."""
    place = folder / fault.name.replace(" ", "_")
    try:
        with scene(
            place,
            run_file,
            cpus=fault.cpus,
            plasma_bytes=fault.plasma_bytes,
            cables=fault.cables,
            free_bytes=fault.free_bytes,
        ) as thrown_at:
            seen, to_do = fault.throw(thrown_at)
            repeated = thrown_at.steps.repeated()
        if fault.expected is not None:
            whole = fault.expected(folder / f"{place.name}_expected", run_file)
        lost, twice, difference = compare(read_trained(thrown_at.storage), whole)
    except SkippedError as error:
        return NotThrown(fault.name, str(error), failed=False)
    except Exception as error:  # noqa: BLE001  the other faults are thrown all the same
        traceback.print_exc()
        return NotThrown(fault.name, str(error).partition("\n")[0], failed=True)
    left = half_written(thrown_at.storage)
    seen = shortened(seen.replace(str(thrown_at.storage), "STORAGE"))
    return Outcome(fault.name, seen, to_do, repeated, lost, twice, difference, left)


def shortened(text: str, most: int = 240) -> str:
    """The text in one line, without its end where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 2].rpartition(" ")[0] + " …"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
