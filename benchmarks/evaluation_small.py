"""What a small evaluation costs beside its tasks: CPU seconds of each process of the job.

Nine tasks of MTEB(eng, v1) with made-up data (30 documents each and the like, from a hub on
loopback) and a model of two tiny layers, so that nearly all of it is the start of processes. Each
number of workers is a `jobs/evaluate_model.py` of its own: one does all in the job's process, two
are on Ray.

    python benchmarks/evaluation_small.py --workers 1 2
"""

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil

from evaluation_mteb import repositories
from loopback import hub_beside
from processes import cpu_of_all

ROOT = Path(__file__).resolve().parents[1]
TASKS = (
    *("NFCorpus", "SciFact", "AskUbuntuDupQuestions", "STS12", "STSBenchmark", "SummEval"),
    *("Banking77Classification", "TwentyNewsgroupsClustering", "SprintDuplicateQuestions"),
)
_SHOWN = 0.5


def job(model, workers, storage):
    """The command of an evaluation."""
    words = [sys.executable, str(ROOT / "jobs" / "evaluate_model.py"), "--model", str(model)]
    words += ["--tasks", ",".join(TASKS), f"--set=placement.workers={workers}"]
    return [*words, f"--set=placement.storage_path={storage}"]


def measured(words):
    """Seconds of a command, and what its processes used."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        with cpu_of_all(process) as used:
            code = process.wait()
        output.seek(0)
        if code:
            raise SystemExit(f"the command ended with {code}:\n{output.read()[-4000:]}")
    return time.perf_counter() - began, used


def kind_of(words):
    """What a process is for, by its command line."""
    if "evaluate_model.py" in words:
        return "the job"
    if words.startswith("ray::"):
        return words.partition("(")[0].split(".")[0].strip()
    return "Ray's own"


def table(used):
    """CPU seconds by kind of process; those that use less than half a second are summed up."""
    lines = ["| process | CPU seconds |", "| --- | ---: |"]
    few = []
    for process, seconds in sorted(used.by_process.items(), key=lambda item: -item[1]):
        kind = kind_of(used.names.get(process, ""))
        if kind == "Ray's own" or seconds < _SHOWN:
            few.append(seconds)
        else:
            lines.append(f"| {kind} | {seconds:.1f} |")
    if few:
        lines.append(f"| Ray's own and idle ones, {len(few)} | {sum(few):.1f} |")
    return "\n".join([*lines, f"| all | {used.seconds:.1f} |"])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args(arguments)
    import mteb

    from counted import machine

    tasks = [mteb.get_task(name) for name in TASKS]
    print(f"{machine()}; {len(TASKS)} tasks")
    with (
        tempfile.TemporaryDirectory() as folder,
        hub_beside(partial(repositories, tasks, 1), Path(folder) / "hub"),
    ):
        from tiny_models import save_encoder

        model = save_encoder(Path(folder) / "tiny")
        for number in given.workers:
            seconds, used = measured(job(model, number, Path(folder) / f"of-{number}"))
            print(f"\n{number} worker(s), {seconds:.1f} s\n\n{table(used)}", flush=True)


if __name__ == "__main__":
    main()
