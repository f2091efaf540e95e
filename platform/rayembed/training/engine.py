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
    # Micro-batches add up their gradients; in bf16 small ones would be lost. Stages 2 and 3 add
    # in fp32; stage 0 has no such setting, and in stage 1 it takes another optimiser, which gave
    # wrong gradients after several backward passes (measured: norm 6.9 for 1.05).
    data_types = {"grad_accum_dtype": "fp32"} if placement.zero_stage >= 2 else {}
    return {
        "train_batch_size": stage.batch.global_pairs,
        "train_micro_batch_size_per_gpu": stage.batch.global_pairs // num_workers,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": stage.optimizer.gradient_clipping,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": data_types,
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
        self._bf16 = dtype == "bfloat16"
        optimizer = build_optimizer(model, stage.optimizer)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=Passable(model),
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            config=deepspeed_settings(stage, placement, dtype, num_workers),
            dist_init_required=not torch.distributed.is_initialized(),
        )
        _forget_warmup_step(self._optimizer)

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
        norm = self._norm_without_partitions()
        self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        if self._zero_stage == 3:
            self._clear_partitioned_gradients()
        return rate, norm

    def _norm_without_partitions(self) -> float | None:
        """Norm of plain gradients, which DeepSpeed tells only where it partitions or keeps fp32."""
        if self._zero_stage or self._bf16:
            return None
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def _clear_partitioned_gradients(self) -> None:
        """Zero ZeRO-3's gradient buffers.

        It copies into them in a step's first backward pass and adds in later ones, so a parameter
        that the first micro-batch does not use (a context encoder, an expert without tokens) would
        be added to what the step before left there.
        """
        from deepspeed.utils import safe_set_local_grad

        for p in self.model.parameters():
            if p.requires_grad:
                partition: Tensor = p.ds_tensor  # type: ignore[attr-defined] # set by DeepSpeed
                safe_set_local_grad(p, torch.zeros_like(partition))

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


def _forget_warmup_step(optimizer: Any) -> None:
    """Set Adam's step counters back to zero.

    DeepSpeed allocates optimiser states by a step with zero gradients; in stage 0 with bf16 that
    step stays counted, and the first real ones come out at 0.74 of their size.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        if "step" in state:
            state["step"].zero_()
