"""Writes the index that `mteb_names` reads, of the mteb that is installed.

python tests/support/mteb_index.py      after another mteb is pinned
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import mteb
from mteb.benchmarks.get_benchmark import _build_aliases_registry
from mteb.get_tasks import TASK_LIST

from rayembed.evaluation import mteb_names
from rayembed.evaluation.benchmarks import benchmark_names, other_inputs
from rayembed.evaluation.mteb_names import FILE, MtebNames


def made_of_mteb() -> MtebNames:
    """The index of the mteb that is installed."""

    def others(tasks: Iterable[object]) -> str:
        return ", ".join(other_inputs(tasks))

    tasks = {task.metadata.name: others([task]) for task in TASK_LIST}
    benchmarks = {found.name: others(found.tasks) for found in mteb.get_benchmarks()}
    aliases = {name: others(found.tasks) for name, found in _build_aliases_registry().items()}
    known = benchmark_names()
    of_other_inputs = {**aliases, **benchmarks}
    return MtebNames(
        mteb=version("mteb"),
        tasks=tuple(sorted(name for name, inputs in tasks.items() if not inputs)),
        other_tasks={name: tasks[name] for name in sorted(tasks) if tasks[name]},
        benchmarks=known,
        other_benchmarks={n: i for n, i in sorted(of_other_inputs.items()) if i},
        aliases=tuple(sorted(n for n, i in aliases.items() if not i and n not in known)),
    )


if __name__ == "__main__":
    text = json.dumps(asdict(made_of_mteb()), indent=0, ensure_ascii=False) + "\n"
    Path(mteb_names.__file__).with_name(FILE).write_text(text, encoding="utf-8")
