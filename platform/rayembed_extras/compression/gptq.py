"""8-bit integer quantisation that adjusts weights to compensate rounding (GPTQ, arXiv 2210.17323).

Through llm-compressor's functions of single layers, which take second moments of a matrix's inputs:
(H, H) of H inputs; a matrix is (F, H).
"""

import logging
import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayembed.errors import ArtifactError
from rayembed_extras.compression.contract import Calibrated, CalibrationText
from rayembed_extras.compression.quantised import (
    Quantised,
    Quantity,
    Scheme,
    Weights,
    arguments,
    rounded,
    scale_of,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rayembed.models.transformer_model import TransformerModel
    from rayembed_extras.compression.matrices import Matrix

logger = logging.getLogger(__name__)

_SILENT = "LLM_COMPRESSOR_LOG_DISABLED"

DAMPING = 0.01
"""Share of the mean diagonal added to the diagonal, as in both papers' code."""

_DAMPINGS = (DAMPING, 0.1, 1.0)


class GPTQ(Calibrated, Quantised):
    """Quantise weights and inputs to 8-bit integers; later weights compensate each rounding error.

    By llm-compressor's function of a layer, inputs of large norm first. Inputs are not rounded
    while weights are solved. The second step of NV-Embed's compression (arXiv 2405.17428, A.3).
    """

    kind: Literal["gptq"] = "gptq"

    scheme: ClassVar[Scheme] = "INT8"
    packages: ClassVar[tuple[str, ...]] = ("compressed_tensors", "llmcompressor")

    def weights(
        self,
        model: "TransformerModel",
        matrices: "Sequence[Matrix]",
        texts: Sequence[CalibrationText],
    ) -> Weights:
        """Quantise the matrices layer after layer; return them by parameter name."""
        from rayembed_extras.compression.calibration import solve_layers

        solver = GPTQSolver(self.scheme)
        solve_layers(model, matrices, texts, solver)
        return solver.weights


class Hessian:
    """(H, H) float32 matrix 2 · X Xᵀ / N, accumulated over the N inputs of the calibration
    texts.
    """

    def __init__(self, num_inputs: int, device: "torch.device") -> None:
        import torch

        self.rows = 0
        self._sums = torch.zeros(num_inputs, num_inputs, device=device)

    def add(self, rows: "Tensor") -> None:
        """Add inputs (N, H) to the sum of X Xᵀ."""
        self.rows += len(rows)
        given = rows.float()
        self._sums += given.T @ given

    def mean(self) -> "Tensor":
        """Return a copy of the Hessian."""
        return self._sums * (2 / self.rows)


def damping(hessian: "Tensor", name: str) -> float:
    """Find the smallest damping with which the Hessian has a Cholesky factor.

    llm-compressor takes the identity for one that has none, and goes on: the layer would be solved
    without looking at any text.

    Raises:
        ArtifactError: it has none at all.
    """
    import torch

    live = hessian.clone()
    diagonal = live.diagonal()
    diagonal[diagonal == 0] = 1
    mean = float(diagonal.mean())
    for share in _DAMPINGS:
        damped = live + share * mean * torch.eye(len(live), device=live.device)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed) and not bool(
            torch.linalg.cholesky_ex(torch.cholesky_inverse(factor))[1]
        ):
            if share != DAMPING:
                logger.warning(
                    "%s: inputs are nearly linearly dependent, so the damping was raised to %g "
                    "of the mean diagonal",
                    name,
                    share,
                )
            return share
    raise ArtifactError(
        f"{name} cannot be quantised, because the second moments (X^T X) of its inputs cannot be "
        "inverted; check that the model's weights and the calibration texts are not damaged"
    )


class GPTQSolver:
    """Quantises a matrix column by column, and adjusts the later columns to compensate the rounding
    error.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.weights: Weights = {}
        """What was solved so far, by the parameters' names."""
        self._scheme = scheme
        self._solve = library("modifiers.gptq.gptq_quantize").quantize_weight

    def begin(self, weight: "Tensor") -> Hessian:
        """Create an empty Hessian for the inputs of a matrix."""
        return Hessian(weight.shape[1], weight.device)

    def solve(self, weight: "Tensor", statistic: Hessian, name: str) -> None:
        """Quantise the matrix and replace it by the dequantised values.

        Weights that are zero, as those of a pruned model, stay so.
        """
        zeros = weight == 0
        hessian = statistic.mean()
        scale = scale_of(weight, self._scheme)
        given = arguments(self._scheme).model_copy(update={"actorder": "static"})
        made, _, _ = self._solve(
            weights=weight.float().clone().unsqueeze(0),
            hessians=hessian.clone().unsqueeze(0),
            scale=scale.float().unsqueeze(0),
            zero_point=scale.new_zeros(scale.shape).unsqueeze(0),
            global_scale=None,
            quant_args=given,
            percdamp=damping(hessian, name),
        )
        values = rounded(made.squeeze(0).masked_fill(zeros, 0.0), scale, self._scheme)
        self.weights[name] = Quantity(values.cpu(), scale.cpu())
        weight.copy_((values.float() * scale.float()).to(weight.dtype))


def library(module: str) -> Any:
    """Import a module of llm-compressor and stop it from logging to standard output.

    Its import takes nine seconds, so that it waits for the first use.
    """
    before = os.environ.get(_SILENT)
    os.environ[_SILENT] = "true"
    try:
        return import_module(f"llmcompressor.{module}")
    finally:
        if before is None:
            del os.environ[_SILENT]
        else:
            os.environ[_SILENT] = before
