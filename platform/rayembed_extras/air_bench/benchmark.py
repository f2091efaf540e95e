"""Make each version of AIR-Bench available as a benchmark of an evaluation."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayembed.assets.storage import join
from rayembed.config.evaluation import EvaluationPlacement, EvaluationRun
from rayembed_extras.air_bench.catalogue import Version

if TYPE_CHECKING:
    from rayembed.evaluation.jobs import Done
    from rayembed_extras.air_bench.job import AirBenchJob

_FOLDER = "air-bench"
"""Folder of all AIR-Bench files in the storage."""


@dataclass(frozen=True)
class AirBench:
    """One version of AIR-Bench as a benchmark. Methods import what they need: its name is read
    where mteb is not loaded.
    """

    name: Version

    def jobs(self, run: EvaluationRun) -> "list[AirBenchJob]":
        """Create a job for each data set that has one of the run's languages.

        Raises:
            ConfigError: there is none.
        """
        from rayembed_extras.air_bench.job import air_bench_jobs

        return air_bench_jobs(self.name, _folder(run), run.languages)

    def keep(self, run: EvaluationRun, done: "Sequence[Done]") -> None:
        """Write the table of dev scores to storage, if any dev split was scored."""
        from rayembed_extras.air_bench.scores import write_dev_scores

        if _has_dev(done):
            write_dev_scores(_folder(run), self.name, _retriever(done))

    def scores(self, run: EvaluationRun, done: "Sequence[Done]") -> Mapping[str, float]:
        """Return the main scores of the finished dev splits, by data set."""
        from rayembed_extras.air_bench.scores import read_dev_scores

        if not _has_dev(done):
            return {}
        found = read_dev_scores(_folder(run), self.name, _retriever(done)).scores
        return {name: score for name, score in found.items() if score is not None}

    def report(self, run: EvaluationRun, done: "Sequence[Done]") -> list[str]:
        """Print the dev scores, and the command that submits the test splits."""
        from rayembed_extras.air_bench.scores import dev_file, dev_markdown, read_dev_scores

        finished = [one for one in done if one.outcome is not None]
        lines = [f"{self.name}: results of {len(finished)} of {len(done)} data sets"]
        if not finished:
            return lines
        place = _folder(run), self.name, _retriever(done)
        if _has_dev(done):
            lines.append(dev_markdown(read_dev_scores(*place)))
            lines.append(f"Dev scores {dev_file(*place)}")
        lines.append(
            "Test scores come from the leaderboard alone: "
            f"rayembed evaluate --submission {shlex.quote(self.name)} "
            f"--retriever {shlex.quote(_retriever(done))}{_set_storage(run)}"
        )
        return lines

    def write_submission(self, storage: str, retriever: str) -> str:
        """Write the leaderboard's zip file; raises the same errors as
        `submission.write_submission`.
        """
        from rayembed_extras.air_bench.submission import write_submission

        folder = join(storage, _FOLDER)
        return write_submission(folder, self.name, retriever, join(folder, "submissions"))


V24_04 = AirBench("AIR-Bench_24.04")
V24_05 = AirBench("AIR-Bench_24.05")


def _folder(run: EvaluationRun) -> str:
    return join(run.placement.storage_path, _FOLDER)


def _has_dev(done: Sequence[Any]) -> bool:
    return any(one.outcome is not None and "dev" in one.job.dataset.splits for one in done)


def _retriever(done: "Sequence[Done]") -> str:
    """Return the model's name in AIR-Bench's results; at least one result must exist."""
    from rayembed_extras.air_bench.job import AIR_BENCH_RESULT

    outcomes = (one.outcome for one in done if one.outcome is not None)
    return str(next(outcomes)[AIR_BENCH_RESULT]["retriever"])


def _set_storage(run: EvaluationRun) -> str:
    """Return the `--set` option that names the storage in a suggested command; empty for the
    default storage.
    """
    storage = run.placement.storage_path
    default = EvaluationPlacement().storage_path
    if storage in (default, str(Path(default).absolute())):
        return ""
    return f" --set {shlex.quote(f'placement.storage_path={storage}')}"
