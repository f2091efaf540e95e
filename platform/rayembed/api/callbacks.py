"""Ready-made callbacks for `rayembed.train(callbacks=…)`, and the base class `Callback` for your
own.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rayembed.distributed.random_state import capture, restore
from rayembed.errors import ConfigError
from rayembed.training.trainer import Callback, StepRecord

if TYPE_CHECKING:
    from rayembed.models.contract import TrainableModel
    from rayembed.training.trainer import StageTrainer

__all__ = ["Callback", "Evaluate"]

Evaluator = Callable[["TrainableModel", int], Mapping[str, float]]


class Evaluate(Callback):
    """Call the user's evaluator every `every_steps` steps, and add its results to the step's
    metrics.

    They are in the run's `metrics.jsonl`, in MLflow and its mirrors, as `own/<name>`. The model is
    in evaluation mode and without gradients meanwhile, and random numbers stay as they were, so
    that weights do not depend on it.

    Args:
        every_steps: steps between two calls, from 1.
        evaluator: takes the model in training and the number of finished steps, and returns
            numbers by name. Each worker calls it, so it must not depend on the worker.

    Raises:
        ConfigError: `every_steps` is below 1, or, when called, a figure is no number.
    """

    def __init__(self, every_steps: int, evaluator: Evaluator) -> None:
        if every_steps < 1:
            raise ConfigError(f"every_steps={every_steps} must be at least 1")
        self._every, self._evaluator = every_steps, evaluator
        self._trainer: StageTrainer | None = None

    def on_train_start(self, trainer: "StageTrainer", step: int) -> None:
        """Store the trainer, whose model the evaluator is called with."""
        self._trainer = trainer

    def on_step_end(self, record: StepRecord) -> None:
        """Call the evaluator after every `every_steps` steps."""
        if record["step"] % self._every or self._trainer is None:
            return
        import torch

        model, state = self._trainer.model, capture()
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                figures = dict(self._evaluator(model, record["step"]))
        finally:
            model.train(was_training)
            restore(state)
        for name, value in figures.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(
                    f"the evaluator returned {name!r} = {value!r}, which is not a number"
                )
            record[f"own/{name}"] = float(value)

    def on_train_end(self) -> None:
        """Drop the reference to the trainer, so that its memory can be freed."""
        self._trainer = None
