"""A stage whose workers raise an error as they start, for the first few times."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from rayembed.training.job import StageJob


@dataclass(frozen=True)
class FailingJob(StageJob):
    """Raises `error` in workers, `times` times; a line of the file `attempts` counts each."""

    error: Exception
    times: int
    attempts: str
    driver: int = field(default_factory=os.getpid)

    def model(self):
        """The model, or the error."""
        attempts = Path(self.attempts)
        done = len(attempts.read_text().splitlines()) if attempts.exists() else 0
        if os.getpid() != self.driver and done < self.times:
            with attempts.open("a") as file:
                file.write(f"{os.getpid()}\n")
            raise self.error
        return super().model()
