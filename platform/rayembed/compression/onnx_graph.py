"""Graphs for onnxruntime."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rayembed.compression.cpu_graph import CpuGraph
from rayembed.config.graph import Runtime

if TYPE_CHECKING:
    import numpy as np


class Onnx(CpuGraph):
    """An ONNX graph, which onnxruntime computes on CPUs.

    int8 weights have a scale for each output; activations one for each batch (dynamic) or text
    collection (static).
    """

    kind: Literal["onnx"] = "onnx"
    runtime: ClassVar[Runtime] = "onnx"
    suffix: ClassVar[str] = ".onnx"
    packages: ClassVar[tuple[str, ...]] = ("onnxruntime",)

    percentile: float = Field(default=100.0, gt=50, le=100)
    """Share of activations in per cent that static ranges hold, others are clipped; 100: all."""

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

        import_onnxruntime()
        from onnxruntime import quantization

        shared: dict[str, Any] = {
            "op_types_to_quantize": ["MatMul", "Gemm"],
            "nodes_to_quantize": list(products),
            "per_channel": True,
            "weight_type": quantization.QuantType.QInt8,
        }
        if self.precision == "int8-dynamic":
            quantization.quantize_dynamic(plain, target, **shared)
            return
        methods = quantization.CalibrationMethod
        whole = self.percentile == 100
        quantization.quantize_static(
            plain,
            target,
            _reader(batches),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            calibrate_method=methods.MinMax if whole else methods.Percentile,
            extra_options={} if whole else {"CalibPercentile": self.percentile},
            **shared,
        )

    def int8_weights(self, target: Path) -> int:
        """Number of int8 weights in a written graph."""
        import math

        import onnx

        graph = onnx.load(str(target), load_external_data=False).graph
        kinds = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
        sizes = (one.dims for one in graph.initializer if one.data_type in kinds)
        return sum(math.prod(dims) for dims in sizes if len(dims) == 2)


def _reader(batches: "Sequence[Mapping[str, np.ndarray]]") -> Any:
    """The batches as onnxruntime's calibration reads them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc] # its own is not typed
        def __init__(self) -> None:
            self._left: Iterator[Mapping[str, Any]] = iter(batches)

        def get_next(self) -> Mapping[str, Any] | None:
            return next(self._left, None)

    return Reader()
