"""What may be freed in a storage, and a request to do so."""

from dataclasses import dataclass

from rayembed.errors import ConfigError

STATES, FOLDER, RUN, DATA, TEMPORARY = "states", "folder", "run", "data", "temporary"
FREED = {
    STATES: "checkpoints of runs that are done; without --run of all that do not keep them",
    FOLDER: "the folder of each --run; MLflow keeps its run, artifacts and versions",
    RUN: "the folder of each --run and MLflow's run of it with artifacts and logged models",
    DATA: "plans, data folders and teachers' vectors that no run in the storage uses; those of the "
    "last day stay, unless a --run that goes too used them",
    TEMPORARY: "half-written files of writers that were killed, older than an hour",
}
"""What may be freed, and what it is."""


@dataclass(frozen=True)
class CleanRequest:
    """What lies where, and what of it is to go."""

    storage: str
    runs: tuple[str, ...] = ()
    """Names of runs and sweeps; none: all."""
    free: tuple[str, ...] = ()
    """Of `FREED`; none: everything is only listed."""
    delete_versions: bool = False
    """Whether registered versions of a removed run go with it."""
    tracking_uri: str | None = None


def check_request(asked: CleanRequest) -> None:
    """Return when the options go together.

    Raises:
        ConfigError: they do not.
    """
    whole = [part for part in (FOLDER, RUN) if part in asked.free]
    if len(whole) == 2:
        raise ConfigError("--free folder keeps MLflow's entries and --free run does not; take one")
    if whole and not asked.runs:
        raise ConfigError(f"--free {whole[0]} needs the runs by name: --run NAME")
    if asked.runs and asked.free and not {STATES, *whole} & set(asked.free):
        raise ConfigError(
            f"--run says nothing to --free {' and '.join(asked.free)}, which looks at all runs of "
            "the storage; leave --run out, or add --free states, folder or run"
        )
    if asked.delete_versions and RUN not in asked.free:
        raise ConfigError("--delete-versions is about the runs of --free run; add that")
