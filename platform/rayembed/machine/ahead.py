"""Compute work in advance in a thread or in processes, such as training batches, tokens to encode,
or corpus parts.

A thread does it, or processes where one thread is too slow. What it does is left to its users; it
knows no torch.
"""

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from rayembed.errors import ConfigError, WorkerError

_SECONDS_BETWEEN_LOOKS = 0.1

_ENDING_SECONDS = 5.0
"""Timeout in seconds for the thread or a process to end; one that is blocked in a read must not
delay the error."""

_PROCESS = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rayembed.machine.ahead import serve; serve()"
)
"""Program of a worker process. It imports no `__main__`, so a script needs no `if __name__ == ...`.
"""


class CannotSendError(ConfigError):
    """Raised when a function cannot be pickled and so cannot run in other processes."""


def done_ahead(
    work: Callable[[Any], Any], items: Iterable[Any], *, read_ahead: int
) -> Generator[Any]:
    """Yield the results of `work` on each item, in order; a thread computes the next ones in
    advance.

    Closing the iterator ends the thread, which closes `items` where that can be closed.

    Args:
        read_ahead: results that are ready before they are asked for.

    Raises:
        RayembedError: what `work` or `items` raises, after the results before it.
    """
    ready: queue.Queue[Any] = queue.Queue(maxsize=read_ahead)
    closed = threading.Event()

    def put(item: Any) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_SECONDS_BETWEEN_LOOKS)
            except queue.Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            with closing(items) if isinstance(items, Generator) else nullcontext():
                for item in items:
                    if not put(work(item)):
                        return
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that waits
            put(error)
        else:
            put(None)

    thread = threading.Thread(target=run, name="done-ahead", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join(_ENDING_SECONDS)


def done_by_processes(
    work: Callable[[Any], Any], items: Sequence[Any], *, processes: int, setting: str
) -> Generator[Any]:
    """Yield the results of `work` on each item, in order; several processes of this machine compute
    them.

    Each process does every `processes`-th item and has one result ready. It computes with one
    thread, sees no GPU and ends with this process, also where that is killed. Signals of a terminal
    reach this process alone. Closing the iterator ends the processes.

    Args:
        work: picklable by cloudpickle; each process has its own copy.
        setting: full name of the setting that asks for processes, for messages.

    Raises:
        CannotSendError: `work` cannot be sent to a process; before the first result.
        WorkerError: a process died.
        Exception: what `work` raises, with its class and message, after the results before it.
    """
    sent = (
        f"{setting}={processes} sends {type(work).__name__} to other processes, and it cannot "
        f"{{}}. Set {setting}=0 to make batches in a thread of this process"
    )
    try:
        told = cloudpickle.dumps(work)
    except Exception as error:
        raise CannotSendError(sent.format(f"be pickled: {error}")) from error
    processes = min(processes, len(items))
    with ExitStack() as stack:
        started = [stack.enter_context(_Process(setting)) for _ in range(processes)]
        for first, process in enumerate(started):
            process.begin(told, items[first::processes])
        for process in started:
            if (refused := process.unsent()) is not None:
                raise CannotSendError(sent.format(f"be made again there: {refused}")) from refused
        for place, item in enumerate(items):
            yield started[place % processes].result(item)


class _Process:
    """Worker process that computes results for this process; it runs while the `with` block is
    open.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def __enter__(self) -> "_Process":
        # In a session of its own: Ctrl-C and a closed terminal are for the process that trains.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROCESS, json.dumps([*map(str, sys.path)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdin as own, self._process.stdout as answers:
            self._input = Connection(os.dup(own.fileno()), readable=False)
            self._answers = Connection(os.dup(answers.fileno()), writable=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._answers.close()

    def begin(self, work: bytes, items: Sequence[Any]) -> None:
        """Send the pickled work and this process's items to the helper process."""
        try:
            self._input.send_bytes(pickle.dumps((work, items)))
        except BrokenPipeError as error:
            raise self._died("before its first item") from error

    def unsent(self) -> Exception | None:
        """Wait until the process has unpickled the work; return the error if it could not.

        Raises:
            WorkerError: the process died.
        """
        error: Exception | None
        _, error = self._answer("before its first item")
        return error

    def result(self, item: Any) -> Any:
        """Wait for the next result, which must be that of `item`.

        Raises:
            WorkerError: the process died.
            Exception: what the work raised.
        """
        failed, value = self._answer(f"at item {item}")
        if failed:
            raise value
        return value

    def _answer(self, when: str) -> tuple[bool, Any]:
        try:
            answer = self._answers.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._died(when) from error
        failed, value = pickle.loads(answer)
        return failed, value

    def _died(self, when: str) -> WorkerError:
        self._end()
        code, setting = self._process.returncode, self._setting
        advice = f"Set {setting}=0 to do its work in a thread of the training process"
        if code == -signal.SIGKILL:
            advice = (
                "It was killed, mostly because memory ran out. "
                f"Set {setting} lower, or to 0 for a thread of the training process"
            )
        return WorkerError(
            f"a process of {setting} died {when} with exit code {code} (a negative one is a "
            f"signal). What it wrote last is above. {advice}"
        )

    def _end(self) -> None:
        self._input.close()  # at whose end the process ends
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve() -> None:
    """Main function of a worker process of `done_by_processes`: read the work from standard input
    and answer with its results.
    """
    given = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what the work prints must not stand among the answers
    work, items = pickle.loads(given.recv_bytes())
    threading.Thread(target=_end_with_input, name="end-with-input", daemon=True).start()
    with suppress(BrokenPipeError):  # nobody reads any more
        try:
            own = pickle.loads(work)
        except BaseException as error:  # noqa: BLE001  it is raised where the results are read
            answers.send_bytes(_failure(error))
            return
        answers.send_bytes(pickle.dumps((False, None)))
        for item in items:
            answers.send_bytes(_answer(own, item))


def _end_with_input() -> None:
    """Exit this worker process when its standard input closes, which happens when its parent
    process ends.
    """
    while os.read(0, 1):
        pass
    os._exit(0)


def _answer(work: Callable[[Any], Any], item: Any) -> bytes:
    """Run `work` on one item; return the pickled pair (False, result), or (True, error) if it
    raised.
    """
    try:
        # With classes of the script that trains, which no module of a process has.
        made: bytes = cloudpickle.dumps((False, work(item)))
    except BaseException as error:  # noqa: BLE001  as above
        return _failure(error)
    return made


def _failure(error: BaseException) -> bytes:
    """Pickle (True, error) with the traceback as a note; replace the error by a RuntimeError that
    names it if it cannot be pickled or is no Exception.
    """
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, Exception):
        with suppress(Exception):  # whatever its class does when it is made again
            made: bytes = cloudpickle.dumps((True, error))
            pickle.loads(made)
            return made
    other = RuntimeError(f"{type(error).__name__}: {error}")
    other.__notes__ = error.__notes__
    return pickle.dumps((True, other))
