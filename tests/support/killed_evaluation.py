"""An evaluation whose process gets SIGKILL: `python killed_evaluation.py MOMENT arguments…`.

Moments: `result-2` after the second result was written down; `sent` when MLflow has the scores and
it was not noted yet that it has; `never`.
"""

import os
import signal
import sys
from typing import Any

from rayembed.pipeline.evaluate.job import run_evaluation_job
from rayembed.registry import tracking
from rayembed.results.writer import ResultWriter


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_result(number: int) -> None:
    save, saved = ResultWriter.save, []

    def save_and_die(writer: ResultWriter, result: Any) -> Any:
        written = save(writer, result)
        saved.append(result.task_name)
        if len(saved) == number:
            die()
        return written

    ResultWriter.save = save_and_die


def die_when_sent() -> None:
    send = tracking.send_entry

    def send_and_die(client: Any, run_id: str, entry: Any, folder: Any) -> None:
        send(client, run_id, entry, folder)
        if entry["kind"] == "scores":
            die()

    tracking.send_entry = send_and_die


if __name__ == "__main__":
    moment, _, number = sys.argv[1].partition("-")
    if moment == "result":
        die_after_result(int(number))
    elif moment == "sent":
        die_when_sent()
    sys.exit(run_evaluation_job(sys.argv[2:]))
