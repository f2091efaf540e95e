"""A stage whose training stands still at steps, as long as a test wants it to."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayembed.distributed.collectives import world_size
from rayembed.training.job import StageJob
from rayembed.training.trainer import Callback, StageTrainer, Stream


@dataclass(frozen=True)
class WaitingJob(StageJob):
    """Workers wait while the folder has a file `<number of workers>-<steps done>`."""

    folder: str

    def trainer(self, callbacks: Sequence[Callback], stream: Stream) -> StageTrainer:
        def waiting(*arguments: Any) -> Generator[Any]:
            for batch in stream(*arguments):
                while Path(self.folder, f"{world_size()}-{batch.step}").exists():
                    time.sleep(0.02)
                yield batch

        return super().trainer(callbacks, waiting)
