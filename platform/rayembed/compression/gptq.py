"""8-bit integers, with weights moved to make up for rounding (GPTQ, arXiv 2210.17323)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from rayembed.compression.calibrated import Calibrated
from rayembed.compression.contract import CalibrationText
from rayembed.compression.quantised import Quantised
from rayembed.config.compression import Scheme

if TYPE_CHECKING:
    from rayembed.compression.matrices import Matrix
    from rayembed.compression.quantise import Weights
    from rayembed.models.transformer_model import TransformerModel


class GPTQ(Calibrated, Quantised):
    """Weights and inputs as 8-bit integers; what rounding a weight loses, those behind it give.

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
    ) -> "Weights":
        """Quantised weights by the parameters' names, solved layer after layer."""
        from rayembed.compression.calibration import solve_layers
        from rayembed.compression.gptq_solver import GPTQSolver

        solver = GPTQSolver(self.scheme)
        solve_layers(model, matrices, texts, solver)
        return solver.weights
