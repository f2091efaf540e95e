"""A validation whose scores are written down beforehand, and which keeps what it was given."""

import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from rayembed.config.run import Run
from rayembed.training.validation.folder import ValidationResult
from rayembed.training.validation.scoring import Validation


@dataclass(frozen=True)
class ScriptedScores:
    """Scores by step; at `dies_at` the process that scores is gone, as one killed for memory."""

    seen: str
    """Folder that gets a copy of each step's weights and a line a try."""
    scores: dict[int, float]
    dies_at: frozenset[int] = field(default=frozenset())
    seconds: float = 0.0

    def __call__(self, run: Run, weights: str, device: str) -> dict[str, float]:
        assert device == "cpu"
        step = int(re.findall(r"step-(\d+)", weights)[-1])
        seen = Path(self.seen)
        seen.mkdir(parents=True, exist_ok=True)
        with (seen / "tries.txt").open("a") as file:
            file.write(f"{step} {os.getpid()}\n")
        if step in self.dies_at:
            os._exit(1)
        shutil.copyfile(weights, seen / f"{step}.safetensors")
        time.sleep(self.seconds)
        return {"made-up": self.scores[step]}

    def tries(self) -> list[int]:
        """Steps that were tried, in order."""
        lines = (Path(self.seen) / "tries.txt").read_text().splitlines()
        return [int(line.split()[0]) for line in lines]


def validation_by(script: ScriptedScores, told: list[ValidationResult]) -> Validation:
    """A validation by the script that adds what it is told to a list."""
    return Validation(script, "made-up-data", lambda scores: scores["made-up"], told.append)
