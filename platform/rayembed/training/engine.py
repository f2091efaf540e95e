"""DeepSpeed around a model: the only place that imports it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayembed.config.run import Placement
from rayembed.config.stage import StageConfig
from rayembed.errors import ArtifactError
from rayembed.models.contract import EmbeddingModel
from rayembed.training.optimizer import build_optimizer, set_learning_rates
from rayembed.training.step import Passable

TAG = "state"
"""Folder of DeepSpeed's files within a checkpoint."""


def deepspeed_settings(
    stage: StageConfig, placement: Placement, dtype: str, num_workers: int
) -> dict[str, Any]:
    """DeepSpeed's configuration; every value that it would choose by itself is written out."""
    zero: dict[str, Any] = {"stage": placement.zero_stage, "overlap_comm": placement.use_gpu}
    if placement.zero_stage == 3:
        # Small parameters (LoRA, norms) stay whole on each worker: gathering costs more.
        zero["stage3_param_persistence_threshold"] = 10_000
    return {
        "train_batch_size": stage.batch.global_pairs,
        "train_micro_batch_size_per_gpu": stage.batch.global_pairs // num_workers,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": stage.optimizer.gradient_clipping,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


class DeepSpeedEngine:
    """A model under DeepSpeed: forward, backward, step, its shards on disk, its whole weights."""

    def __init__(
        self,
        model: EmbeddingModel,
        stage: StageConfig,
        placement: Placement,
        dtype: str,
        num_workers: int,
    ) -> None:
        import deepspeed

        self.model = model
        self._zero_stage = placement.zero_stage
        self._clipped = stage.optimizer.gradient_clipping > 0
        optimizer = build_optimizer(model, stage.optimizer)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=Passable(model),
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            config=deepspeed_settings(stage, placement, dtype, num_workers),
            dist_init_required=not torch.distributed.is_initialized(),
        )

    @property
    def forward(self) -> torch.nn.Module:
        """What `run_step` calls for forward passes."""
        engine: torch.nn.Module = self._engine
        return engine

    def backward(self, loss: Tensor, last: bool) -> None:
        """Send a scalar's gradient through its graph; reduce over workers at the step's last."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)

    def step(self, learning_rate_factor: float) -> tuple[float, float]:
        """The learning rate used and the norm of the gradient before clipping."""
        rate = set_learning_rates(self._optimizer, learning_rate_factor)
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return rate, float(norm) if norm is not None else float("nan")

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write this worker's shards and the small `state`; all workers must call it."""
        self._engine.save_checkpoint(
            str(folder), tag=TAG, client_state=state, exclude_frozen_parameters=True
        )

    def load(self, folder: Path) -> dict[str, Any]:
        """The `state` of a checkpoint, after weights and optimiser were taken from it.

        Raises:
            ArtifactError: DeepSpeed finds no checkpoint there.
        """
        path, state = self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=False)
        if path is None:
            raise ArtifactError(f"no DeepSpeed checkpoint {TAG!r} in {str(folder)!r}")
        found: dict[str, Any] = state
        return found

    def trainable_state(self) -> dict[str, Tensor]:
        """Whole trainable weights on the CPU, by name in the model; all workers must call it."""
        import deepspeed

        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=self._zero_stage == 3):
            return {name: p.detach().cpu().clone() for name, p in named.items()}
