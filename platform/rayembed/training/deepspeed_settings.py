"""Make DeepSpeed's configuration for a stage, without importing DeepSpeed."""

from typing import Any

from torch import nn

from rayembed.config.optimizer import TrainLoopConfig
from rayembed.config.placement import Placement

_WHOLE = 10_000
"""Elements up to which a parameter stays whole on each worker in stage 3: norms and biases."""

_BUCKET = 500_000_000
"""Maximum elements of a gradient bucket in one reduction; DeepSpeed's default."""


def deepspeed_settings(
    stage: TrainLoopConfig,
    placement: Placement,
    dtype: str,
    num_workers: int,
    num_trained: int,
    largest_adapter: int = 0,
) -> dict[str, Any]:
    """Make DeepSpeed's configuration; it states even default values if they can change
    results.

    Args:
        num_trained: trained weights; no buffer need hold more.
        largest_adapter: elements of the largest matrix of LoRA.
    """
    # Even, as stages 1 and 2 demand.
    bucket = min(_BUCKET, num_trained + num_trained % 2)
    zero: dict[str, Any] = {
        "stage": placement.zero_stage,
        # With overlap, stage 1 reduces in the last backward pass alone and loses the gradients of
        # parameters that only earlier passes used (a context encoder under GradCache).
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if placement.zero_stage == 3:
        # Small parameters stay whole on each worker, since gathering costs more, and so do the
        # many matrices of LoRA (rank 16 on Mistral: 448 of 16,384 to 229,376 elements, 84 MB).
        zero["stage3_param_persistence_threshold"] = max(_WHOLE, largest_adapter)
        zero["stage3_prefetch_bucket_size"] = 50_000_000
        zero["stage3_max_live_parameters"] = 1_000_000_000
        zero["stage3_max_reuse_distance"] = 1_000_000_000
    # What is added up from one reduction to the next is held in fp32. Stage 0 has no such setting,
    # and in stage 1 it takes another optimiser, which gave wrong gradients after several backward
    # passes (measured: norm 6.9 for 1.05); both reduce once a step.
    data_types = {"grad_accum_dtype": "fp32"} if placement.zero_stage >= 2 else {}
    return {
        "train_batch_size": stage.global_rows,
        "train_micro_batch_size_per_gpu": stage.global_rows // num_workers,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": stage.optimizer.gradient_clipping,
        "gradient_predivide_factor": 1.0,
        "prescale_gradients": False,
        # Sums over workers: in bf16 they would depend on how many there are.
        "communication_data_type": "fp32",
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": data_types,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        # Its clock of samples per second waits for the device at each forward pass.
        "timers": {"throughput": {"enabled": False}},
    }


def largest_adapter(model: nn.Module) -> int:
    """Return the number of elements of the largest LoRA matrix; 0 for a model without adapters."""
    return max((p.numel() for name, p in model.named_parameters() if "lora_" in name), default=0)
