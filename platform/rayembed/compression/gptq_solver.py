"""A matrix (F, H) quantised by GPTQ, through llm-compressor."""

from torch import Tensor

from rayembed.compression.hessian import Hessian, damping
from rayembed.compression.library import library
from rayembed.compression.quantise import Quantity, Weights, arguments, rounded, scale_of
from rayembed.config.compression import Scheme


class GPTQSolver:
    """Quantises matrices, moving the weights that are not yet rounded."""

    def __init__(self, scheme: Scheme) -> None:
        self.weights: Weights = {}
        """What was solved so far, by the parameters' names."""
        self._scheme = scheme
        self._solve = library("modifiers.gptq.gptq_quantize").quantize_weight

    def begin(self, weight: Tensor) -> Hessian:
        """Empty second moments of a matrix's inputs."""
        return Hessian(weight.shape[1], weight.device)

    def solve(self, weight: Tensor, statistic: Hessian, name: str) -> None:
        """Quantise the matrix, and put what the quantised weights stand for in its place.

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
