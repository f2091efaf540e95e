"""Graphs for onnxruntime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rayembed.compression.cpu_graph import MULTIPLIES, CpuGraph, static_int8
from rayembed.config.graph import Runtime

if TYPE_CHECKING:
    import numpy as np


class Onnx(CpuGraph):
    """An ONNX graph, which onnxruntime computes on CPUs.

    int8 weights have a scale for each output; activations one for each batch (dynamic) or one for
    all texts (static, by NNCF: the ranges of onnxruntime's own quantiser cost 4 % of the score).
    """

    kind: Literal["onnx"] = "onnx"
    runtime: ClassVar[Runtime] = "onnx"
    suffix: ClassVar[str] = ".onnx"
    packages: ClassVar[tuple[str, ...]] = ("onnxruntime", "nncf")

    def convert(
        self,
        plain: Path,
        target: Path,
        products: Sequence[str],
        batches: "Sequence[Mapping[str, np.ndarray]]",
    ) -> None:
        """Write the graph, with int8 products as asked."""
        if self.precision == "float32":
            plain.rename(target)
            return
        from rayembed.models.graphs import import_onnxruntime

        if self.precision == "int8-dynamic":
            import_onnxruntime()
            from onnxruntime import quantization

            quantization.quantize_dynamic(
                plain,
                target,
                op_types_to_quantize=["MatMul"],
                nodes_to_quantize=list(products),
                per_channel=True,
                weight_type=quantization.QuantType.QInt8,
            )
            return
        import onnx

        model = onnx.load(str(plain))
        multiplied = [node.name for node in model.graph.node if node.op_type in MULTIPLIES]
        onnx.save(static_int8(model, multiplied, products, batches), str(target))

    def int8_weights(self, target: Path) -> int:
        """Number of int8 weights in a written graph."""
        import math

        import onnx

        graph = onnx.load(str(target), load_external_data=False).graph
        kinds = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
        sizes = (one.dims for one in graph.initializer if one.data_type in kinds)
        return sum(math.prod(dims) for dims in sizes if len(dims) == 2)
