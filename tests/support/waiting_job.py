"""A stage whose training stands still at steps, as long as a test wants it to."""

import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayembed.distributed.collectives import world_size
from rayembed.training.on_worker import TrainerHooks
from rayembed.training.worker import StageJob


@dataclass(frozen=True)
class WaitingJob(StageJob):
    """Workers wait while the folder has a file `<number of workers>-<steps done>`."""

    folder: str

    def train(self, hooks: TrainerHooks) -> None:
        def stream(*arguments: Any) -> Generator[Any]:
            for batch in hooks.stream(*arguments):
                while Path(self.folder, f"{world_size()}-{batch.step}").exists():
                    time.sleep(0.02)
                yield batch

        super().train(replace(hooks, stream=stream))
