"""The workers of an evaluation, as settings ask for them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Workers:
    """Number of workers and the resources of each."""

    number: int = 1
    cpus: float = 1.0
    """CPUs reserved for each worker."""
    threads: int | None = None
    """Threads of torch in each worker; None: `cpus`, rounded down, at least 1."""
    gpu: bool = False
    """Whether each worker has a GPU."""
    tasks_at_once: int | None = None
    """Tasks that run side by side; None: one more than workers, so that none waits while a task
    computes its score, at most 8."""
    cpus_per_task: float = 0.0
    """CPUs reserved for each running task."""
    tries: int = 5
    """Tries of texts whose worker dies, also of those that only waited for it: which of them it
    died over cannot be told."""

    @property
    def runners(self) -> int:
        """Tasks that run side by side."""
        return self.tasks_at_once or min(self.number + 1, 8)

    @property
    def in_one_process(self) -> bool:
        """Whether one process embeds and scores: further ones would share its cores and only add
        their imports. Beside a GPU they fit classifiers while it embeds.
        """
        return self.number == 1 and not self.gpu and self.tasks_at_once is None

    @property
    def torch_threads(self) -> int:
        """Threads of torch in each worker."""
        return self.threads or max(1, int(self.cpus))
