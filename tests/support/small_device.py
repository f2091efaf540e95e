"""A device whose memory runs out in a step, unless less is kept of the step's passes."""

import weakref
from copy import copy
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from rayembed.distributed.collectives import rank
from rayembed.models.layers import recomputable_layers
from rayembed.training.trainer import Callback

SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB."

RAN_OUT = (
    torch.OutOfMemoryError(SAYS),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for "
        "details), NCCL version 2.29.7\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
    dist.DistBackendError("Last error:\nFailed to CUDA calloc async 608 bytes"),
)
"""What is raised where a GPU's memory runs out, by torch and by the libraries below it."""


@dataclass
class SmallDevice(Callback):
    """Runs out of memory in the passes of a step and of those after it.

    Args:
        layers: that must be recomputed for a pass with gradient to fit.
        tokens: that a pass may have at most.
        of_rank: the only worker whose device is small; None: all.
        error: that is raised.
    """

    step: int
    layers: int = 1
    tokens: int = 10**9
    of_rank: int | None = None
    error: Exception = field(default_factory=lambda: torch.OutOfMemoryError(SAYS))
    starts: int = field(default=0, init=False)
    held: int = field(default=0, init=False)
    """Models of earlier starts that still were in memory at a later one."""
    _models: list = field(default_factory=list, init=False)

    def on_train_start(self, trainer, step):
        self.starts += 1
        self.held += sum(model() is not None for model in self._models)
        self._done, model = step, trainer.engine.model
        self._models = [*self._models, weakref.ref(model)]
        if self.of_rank in (None, rank()):
            model.register_forward_pre_hook(self._fill)

    def on_step_end(self, record):
        self._done = record["step"]

    def _fill(self, module: nn.Module, given):
        if self._done + 1 < self.step or not torch.is_grad_enabled():
            return
        layers = recomputable_layers(module.trained_parts)
        recomputed = sum(layer.gradient_checkpointing for layer in layers)
        if recomputed < self.layers or given[0]["input_ids"].numel() > self.tokens:
            raise copy(self.error)  # whose traceback would hold the model
