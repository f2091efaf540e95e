"""An index that is killed five times beside one that nobody disturbs: equal rows, what was embedded
again, seconds.

Makes short documents and a model of two layers, and builds one index undisturbed. The other is
built by the same command, of which a process gets SIGKILL at drawn moments: the driver while it
reads, before it embeds, while parts are embedded, and at the switch; on Ray (two nodes with a CPU
each) also a worker and a whole node. The command is repeated until it completes. Both stores are
compared row for row, and a change of 1 % of the documents is brought in by `--update`. Run:
python benchmarks/index_kills.py --documents 1000000 --runtime ray --store lance
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import psutil

from index_cluster import ROOT, TwoNodes
from indexing import save_two_layers, write_made_up

SECONDS = 1200
"""For a build, on a machine with other work."""

NODE_SECONDS = 5
"""After a node was lost, until another one comes."""

KILLS = {
    "local": [
        *(("driver", "reading"), ("driver", "sending")),
        *(("driver", "embedding"), ("driver", "embedding"), ("driver", "switch")),
    ],
    "ray": [
        *(("driver", "reading"), ("worker", "embedding"), ("node", "embedding")),
        *(("driver", "embedding"), ("driver", "switch")),
    ],
}
"""Process and phase of each kill, in order."""


class UnexpectedError(Exception):
    """The index is not what it should be, or a job did not do what is waited for."""


class Progress:
    """What the files of an index say of the job at work."""

    def __init__(self, storage):
        self._table = storage / "indexes/docs/docs_1"
        self._pointer = storage / "indexes/docs/store/docs.json"
        self._events = storage / "embedded.jsonl"

    def reached(self, phase, since, parts):
        """Whether a job that began at this time has come to the phase."""
        if phase == "reading":
            return any((self._table / "golden").glob("*.npy"))
        if phase == "sending":
            made = (self._table.glob(f"working/**/{name}/**/*") for name in ("rows", "differences"))
            return any(_newer(path, since) for paths in made for path in paths)
        if phase == "embedding":
            return self.done() >= 1
        return self.done() >= parts

    def done(self):
        """Number of parts that the store has."""
        return len(list(self._table.glob("working/**/done/*.json")))

    def is_switched(self):
        """Whether the index's name refers to the table."""
        return self._pointer.exists()

    def events(self):
        """What the tasks have noted."""
        if not self._events.exists():
            return []
        return [json.loads(line) for line in self._events.read_text().splitlines()]

    def embedded(self):
        """Texts that were embedded, those of killed parts as well."""
        return sum(event["texts"] for event in self.events() if event["event"] == "begin")

    def at_work(self):
        """Processes that have begun a part and not ended it."""
        last = {event["process"]: event["event"] for event in self.events()}
        return [pid for pid, event in last.items() if event == "begin" and psutil.pid_exists(pid)]


def _newer(path, since):
    with suppress(FileNotFoundError):
        return path.stat().st_mtime > since
    return False


class Index:
    """An index in a storage of its own, and the command that builds it."""

    def __init__(self, folder, given, name, address):
        self.storage, self._folder, self._given = folder / name, folder, given
        self.storage.mkdir()
        self.progress, self.starts = Progress(self.storage), 0
        self.parts = -(-given.documents // given.rows_per_part)
        self._processes = []
        self._environment = {**os.environ, "INDEX_TASK": given.task}
        if address:
            self._environment["RAY_ADDRESS"] = address

    def start(self, *more):
        """Start the command."""
        self.starts += 1
        given = self._given
        settings = {
            "placement.storage_path": self.storage,
            "placement.runtime": given.runtime,
            "rows_per_part": given.rows_per_part,
            "documents.metadata": "[year, lang]",
            "model.dtype": "float32",
        }
        command = [sys.executable, str(ROOT / "benchmarks/index_counted.py"), "--name", "docs"]
        command += ["--documents", str(self._folder / "docs.jsonl"), "--store", given.store]
        command += ["--model", str(self._folder / "model"), *more]
        command += [
            word for name, value in settings.items() for word in ("--set", f"{name}={value}")
        ]
        with self._log.open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        self._processes.append(process)
        return process

    def close(self):
        """End what killed jobs have left."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    @property
    def _log(self):
        return self.storage / f"{self.starts}.log"

    def finish(self, process):
        """Wait until the job has ended well."""
        if code := process.wait(SECONDS):
            raise UnexpectedError(f"exit code {code}:\n{self._log.read_text()[-4000:]}")

    def wait(self, condition, process):
        """Wait until it is so; return False where the job ended before."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise UnexpectedError(f"nothing in {SECONDS} s:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.01)
        return True

    def manifest(self):
        """Record of the index; None: there is none yet."""
        from rayembed_extras.indexing.manifest import read_manifest

        return read_manifest(str(self.storage), "docs")

    def rows(self):
        """All rows of the store, by id."""
        import pyarrow as pa

        from rayembed_extras.indexing.places import store_from

        manifest = self.manifest()
        store = store_from(json.dumps(manifest.store)).open()
        return pa.concat_tables(store.scan(manifest.current)).sort_by("id")


def undisturbed(index):
    """Build it; return when each phase began, and the end, in seconds from the start."""
    began, since = time.monotonic(), time.time()
    process, times = index.start(), {}
    for phase in ("reading", "sending", "embedding", "switch"):
        index.wait(lambda at=phase: index.progress.reached(at, since, index.parts), process)
        times[phase] = time.monotonic() - began
    index.wait(index.progress.is_switched, process)
    times["end"] = time.monotonic() - began
    index.finish(process)
    times["exit"] = time.monotonic() - began
    return times


def goals(plan, parts, drawn):
    """Number of parts that are done when each kill in `embedding` is thrown."""
    number = sum(phase == "embedding" for _, phase in plan)
    edges = [parts * (place + 1) / (number + 1) for place in range(number)]
    width = parts / (number + 1)
    return [max(1, int(edge + (drawn.random() - 0.5) * width)) for edge in edges]


def disturbed(index, times, plan, drawn, nodes):
    """Build it with kills; return the lines of their table."""
    lines, process, since = [], None, 0.0
    later = iter(goals(plan, index.parts, drawn))
    phases = list(times)
    for target, phase in plan:
        if process is None or process.poll() is not None:
            since, process = time.time(), index.start()
        goal, share = next(later) if phase == "embedding" else 1, drawn.random()
        length = times[phases[phases.index(phase) + 1]] - times[phase]
        length = length / index.parts if phase == "embedding" else 0.8 * length

        def come(phase=phase, goal=goal, since=since):
            progress = index.progress
            return progress.reached(phase, since, index.parts) and progress.done() >= (
                goal if phase == "embedding" else 0
            )

        if index.wait(come, process):
            time.sleep(share * length)
        killed = throw(target, index, process, drawn, nodes)
        if target == "driver":
            process.wait()
        switched, done = index.progress.is_switched(), index.progress.done()
        if switched and phase != "switch":
            raise UnexpectedError(f"the name refers to a table with {done} of its parts")
        after = f"{share * length:.2f} s"
        moment = f"{goal} parts and {after}" if phase == "embedding" else f"{after} of {phase}"
        state = "name switched" if switched else f"{done} of {index.parts} parts done"
        lines.append(f"| {target} | {moment} | {state} | {'' if killed else 'missed'} |")
        print(lines[-1], flush=True)
    for _ in range(5):
        manifest = index.manifest()
        if process.poll() not in (None, 0) and (manifest is None or manifest.current is None):
            process = index.start()
        process.wait(SECONDS)
    if index.manifest().current is None:
        index.finish(process)
    return lines


def throw(target, index, process, drawn, nodes):
    """SIGKILL for the target; return False where it was gone."""
    if target == "driver":
        there = process.poll() is None
        process.kill()
        return there
    if target == "node":
        nodes.lose_second(NODE_SECONDS)
        return process.poll() is None
    index.wait(index.progress.at_work, process)
    workers = index.progress.at_work()
    for pid in drawn.sample(workers, min(1, len(workers))):
        os.kill(pid, signal.SIGKILL)
    return bool(workers)


def vectors_of(rows):
    """(N, D) vectors of rows."""
    flat = rows["vector"].combine_chunks().flatten().to_numpy()
    return flat.reshape(len(rows), -1)


def compare(one, other):
    """Raise unless all columns but vectors are equal; return the share of rows whose vectors are
    equal in all bits, and the lowest cosine.
    """
    if len(one) != len(other):
        raise UnexpectedError(f"{len(other):,} rows instead of {len(one):,}")
    for name in one.column_names:
        if name != "vector" and not one[name].equals(other[name]):
            raise UnexpectedError(f"the column {name} differs")
    left, right = vectors_of(one), vectors_of(other)
    equal = (left.view(np.uint32) == right.view(np.uint32)).all(axis=1)
    cosines = np.einsum("nd,nd->n", left, right)
    cosines /= np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return float(equal.mean()), float(cosines.min())


def compare_with_file(rows, path):
    """Raise unless the store has the ids, texts and metadata of the file."""
    import pyarrow.json

    asked = pyarrow.json.read_json(path).sort_by("id")
    for name in asked.column_names:
        if not rows[name].cast(asked[name].type).equals(asked[name]):
            raise UnexpectedError(f"the column {name} is not that of the documents")


def update(index, folder, given, drawn):
    """Change 1 % of the documents and bring them in; return the share of texts embedded, and
    seconds.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    before, embedded = index.rows(), index.progress.embedded()
    changed = set(drawn.sample(range(given.documents), given.documents // 100))
    write_made_up(folder / "docs.jsonl", given.documents, changed)
    began = time.monotonic()
    index.finish(index.start("--update"))
    seconds = time.monotonic() - began
    after = index.rows()
    compare_with_file(after, folder / "docs.jsonl")
    touched = pa.array([f"{kind}-{number}" for number in changed for kind in ("doc", "new")])
    kept = [rows.filter(pc.invert(pc.is_in(rows["id"], touched))) for rows in (before, after)]
    if compare(*kept)[0] < 1:
        raise UnexpectedError("vectors of unchanged documents have changed")
    return (index.progress.embedded() - embedded) / given.documents, seconds


def measure(given, folder, opened):
    """Build both indexes, compare them, and print the table."""
    drawn = random.Random(given.seed)
    save_two_layers(folder / "model")
    write_made_up(folder / "docs.jsonl", given.documents)
    nodes = opened.enter_context(TwoNodes()) if given.runtime == "ray" else None
    address = nodes and nodes.address
    plain, killed = (Index(folder, given, name, address) for name in ("undisturbed", "killed"))
    opened.callback(plain.close)
    opened.callback(killed.close)
    times = undisturbed(plain)
    print({name: round(seconds, 1) for name, seconds in times.items()}, flush=True)
    print("| killed | moment | state | |\n|---|---|---|---|", flush=True)
    began = time.monotonic()
    disturbed(killed, times, KILLS[given.runtime], drawn, nodes)
    seconds, starts = time.monotonic() - began, killed.starts
    plain_rows, killed_rows = plain.rows(), killed.rows()
    compare_with_file(plain_rows, folder / "docs.jsonl")
    equal, lowest = compare(plain_rows, killed_rows)
    del plain_rows, killed_rows
    if equal < 1 and lowest < 1 - 1e-6:
        raise UnexpectedError(f"the lowest cosine of two vectors of one row is {lowest}")
    again = killed.progress.embedded() / given.documents
    share, update_seconds = update(killed, folder, given, drawn)
    print(
        "\n| documents | runtime, store | s undisturbed | s with kills, starts | texts embedded | "
        "rows equal, in all bits | texts of a 1 % change, s |\n|---|---|---|---|---|---|---|\n"
        f"| {given.documents:,} | {given.runtime}, {given.store} | {times['exit']:.0f} | "
        f"{seconds:.0f}, {starts} | {100 * again:.1f} % | {given.documents:,}, {equal:.2%} | "
        f"{share:.2%}, {update_seconds:.0f} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rows-per-part", type=int, default=16_384)
    parser.add_argument("--runtime", choices=list(KILLS), default="local")
    parser.add_argument("--store", choices=["parquet", "lance"], default="parquet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", default="counted", help="of index_counted")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT / "platform")
    # Else processes take the threads that others leave free when they begin: other sums, and with
    # other work beside them a small model's threads wait for each other.
    os.environ.setdefault("RAYEMBED_THREADS", "1")
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        print(f"seed {given.seed}", flush=True)
        try:
            measure(given, folder, opened)
        except UnexpectedError as error:
            sys.exit(f"seed {given.seed}: {error}")


if __name__ == "__main__":
    main()
