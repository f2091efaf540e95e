"""Hide log lines of libraries that are of no use to users.

What is not named here comes through: each entry has its reason. `without` keeps from a library a
package that it would import in vain.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr

# Progress of pipelines, checkpoints and uploads, which rayembed tells itself.
MLFLOW = {"MLFLOW_LOGGING_LEVEL": "WARNING", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
"""Environment of a process that uses MLflow."""
JOB = {**MLFLOW, "RAY_DATA_LOG_LEVEL": "WARNING", "TQDM_DISABLE": "1"}
"""Environment of a job's driver and workers on Ray."""

_HARMLESS = (
    # Of an own Ray: its token is rayembed's own (`ensure_token`), which is the safe way.
    ("ray._private.authentication.authentication_token_setup", "Token authentication is enabled"),
    # Evaluation and export run on CPUs; a training worker is told its accelerator.
    ("DeepSpeed", "Setting accelerator to CPU"),
    # In a notebook without ipywidgets; a run's report has what Ray would show.
    ("ray.widgets.util", "Missing packages"),
    # bm25s lets its progress through whatever the level of the log.
    ("bm25s", "Building index from"),
    # What it would do to a graph (shapes, constants) the exporter has done.
    ("root", "Please consider to run pre-processing before quantization"),
)
"""Logger and the beginning of its harmless message."""

_WARNINGS = (
    # DeepSpeed calls functions that torch renames; both still have them.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    # In a notebook without ipywidgets; rayembed shows its own progress.
    (r"IProgress not found", Warning),
)
"""Pattern of a harmless warning's beginning, and its class."""

_WORKERS_LINES = (
    # Of Ray Train's own actor, on the C++ side: its arguments lie in the object store of the
    # driver, with which the run ends anyway.
    "Actor with class name: 'PreemptionWatcher'",
)
"""Parts of harmless lines that Ray's workers write without a logger."""


@contextmanager
def without(name: str) -> Iterator[None]:
    """Make imports of the named package fail inside the block.

    For libraries that take what they do not need: one that is imported already stays visible.
    """
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment] # as Python marks what is missing
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


@contextmanager
def terminal_stderr() -> Iterator[None]:
    """Make `sys.stderr` write to file descriptor 2 inside the block, also in a notebook.

    For libraries that silence the compilers they start by redirecting `sys.stderr.fileno()`: in a
    notebook this is another descriptor than the one that compilers write to.
    """
    try:
        stream = os.fdopen(2, "w", closefd=False)
    except OSError:  # a process without standard error
        yield
        return
    with stream, redirect_stderr(stream):
        yield


class _Harmless(logging.Filter):
    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginning)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Harmless) and other.beginning == self.beginning

    __hash__ = logging.Filter.__hash__


def quiet() -> None:
    """Hide harmless log lines of libraries in this process; further calls change nothing.

    Also what each of Ray's workers begins with.
    """
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # where it is imported already
    for name, beginning in _HARMLESS:
        logging.getLogger(name).addFilter(_Harmless(beginning))
    for text, category in _WARNINGS:
        warnings.filterwarnings("ignore", text, category)


def set_unset(environment: Mapping[str, str]) -> dict[str, str]:
    """Set environment variables that have no value yet, for the duration of the block; leave others
    unchanged.
    """
    unset = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(unset)
    return unset


def without_harmless(lines: Iterable[str]) -> list[str]:
    """Remove harmless lines from the output of Ray's workers."""
    return [line for line in lines if not any(part in line for part in _WORKERS_LINES)]


@contextmanager
def without_loading_report() -> Iterator[None]:
    """Suppress transformers' progress bar, and its reports of weights that are left out on purpose
    (heads, cut layers) or not covered by tensor parallelism.

    `load_backbone` refuses missing ones.
    """
    from transformers.utils import logging as transformers_logging

    has_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    names = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel")
    loggers = [logging.getLogger(name) for name in names]

    def errors(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    # Not a level: each time one is set, Python empties the caches of all loggers, thousands here.
    for logger in loggers:
        logger.addFilter(errors)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(errors)
        if has_bar:
            transformers_logging.enable_progress_bar()
