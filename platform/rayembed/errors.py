"""All errors that rayembed raises for a user to act on.

A message says what was asked, what was seen, what is allowed and what to do. All classes take
the finished message as their only argument, so that they survive pickling between processes.
"""

from importlib.util import find_spec


class RayembedError(Exception):
    """Base class of all errors that rayembed raises for its users."""


class ConfigError(RayembedError, ValueError):
    """A setting is unknown, out of range or contradicts another one; raised before any worker
    starts.
    """


class DataError(RayembedError):
    """A data source, a record or a batch plan cannot be used."""


class AssetError(RayembedError):
    """A model or data asset is missing, unreachable or does not have the expected content."""


class ArtifactError(RayembedError):
    """A checkpoint, an exported model or a stored result is missing, corrupt or belongs to another
    run.
    """


class StorageError(ArtifactError):
    """A storage does not answer properly; its files may be intact, so a retry may help."""


class StorageFullError(StorageError):
    """A storage is full; a retry helps only after space has been freed."""


class DeviceMemoryError(RayembedError):
    """A GPU's memory is too small for a training step, a text or a model."""

    may_pass = False
    """Whether a retry may succeed: the next start takes less memory, or another process held it."""


def may_pass(error: BaseException) -> bool:
    """Whether a retry may succeed: the storage did not answer, or the next attempt may have enough
    GPU memory.
    """
    if isinstance(error, DeviceMemoryError):
        return error.may_pass
    return isinstance(error, StorageError) and not isinstance(error, StorageFullError)


class PlacementError(RayembedError):
    """The machine or cluster lacks the hardware or storage that the run's placement requires."""


class TrackingError(RayembedError):
    """The MLflow server cannot be reached or refuses a request."""


class WorkerError(RayembedError):
    """Training workers, or a task that exports or evaluates a model, failed more often than
    allowed.
    """


class DivergenceError(RayembedError):
    """Training produced non-finite numbers and cannot continue."""


def require_packages(what: str, extra: str, *modules: str) -> None:
    """Check that the packages of an optional extra are installed, without importing them.

    Args:
        what: that needs them, in the singular, for the message.
        extra: of rayembed, which installs them.

    Raises:
        ConfigError: some are missing, with the command that installs them.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {', '.join(missing)}, which is not installed: "
            f"in the checkout, pip install '.[{extra}]'"
        )
