"""Export models as graphs for onnxruntime and OpenVINO."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayembed_extras.compression.cpu_graph import CpuGraph
from rayembed_extras.compression.settings import Floats, Runtime

if TYPE_CHECKING:
    import numpy as np

_MULTIPLIES = ("MatMul", "Gather")
"""Node types that NNCF makes int8: products and embedding look-ups."""


class Onnx(CpuGraph):
    """Export to an ONNX graph, which onnxruntime runs on CPUs.

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
        """Write the ONNX graph, with int8 matrix multiplications if `precision` requests them."""
        if self.precision == "float32":
            plain.rename(target)
            return
        from rayembed_extras.compression.graphs import import_onnxruntime

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
        multiplied = [node.name for node in model.graph.node if node.op_type in _MULTIPLIES]
        onnx.save(_static_int8(model, multiplied, products, batches), str(target))

    def int8_weights(self, target: Path) -> int:
        """Count the int8 weights in an exported graph."""
        import onnx

        graph = onnx.load(str(target), load_external_data=False).graph
        kinds = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
        sizes = (one.dims for one in graph.initializer if one.data_type in kinds)
        return sum(math.prod(dims) for dims in sizes if len(dims) == 2)


class OpenVINO(CpuGraph):
    """Export to an OpenVINO graph, made from the ONNX graph; NNCF quantises it to int8."""

    kind: Literal["openvino"] = "openvino"
    runtime: ClassVar[Runtime] = "openvino"
    suffix: ClassVar[str] = ".xml"
    packages: ClassVar[tuple[str, ...]] = ("openvino", "nncf")

    bfloat16: bool = False
    """Whether operations that are not int8 run in bfloat16 if the CPU supports it."""

    @property
    def label(self) -> str:
        """Runtime and number types, such as `openvino-int8-static-bfloat16`."""
        return super().label + ("-bfloat16" if self.bfloat16 else "")

    @property
    def floats(self) -> Floats:
        """Number type of all operations that are not computed in int8."""
        return "bfloat16" if self.bfloat16 else "float32"

    def convert(
        self,
        plain: Path,
        target: Path,
        products: Sequence[str],
        batches: "Sequence[Mapping[str, np.ndarray]]",
    ) -> None:
        """Write the OpenVINO graph and its weights, with int8 matrix multiplications if `precision`
        requests them.
        """
        from rayembed_extras.compression.graphs import import_openvino

        openvino = import_openvino()
        model = openvino.Core().read_model(plain)
        if self.precision != "float32":
            model = self._quantised(model, products, batches)
        # float32 weights would be rounded to float16 otherwise.
        openvino.save_model(model, target, compress_to_fp16=False)

    def _quantised(
        self,
        model: Any,
        products: Sequence[str],
        batches: "Sequence[Mapping[str, np.ndarray]]",
    ) -> Any:
        multiplied = [
            op.get_friendly_name() for op in model.get_ops() if op.get_type_name() in _MULTIPLIES
        ]
        if self.precision == "int8-static":
            return _static_int8(model, multiplied, products, batches)
        nncf = _quiet_nncf()
        ignored = nncf.IgnoredScope(names=_others(multiplied, products), validate=False)
        return nncf.compress_weights(
            model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=ignored
        )

    def int8_weights(self, target: Path) -> int:
        """Count the int8 weights in an exported graph."""
        from rayembed_extras.compression.graphs import import_openvino

        ops = import_openvino().Core().read_model(target).get_ops()
        constants = [op for op in ops if op.get_type_name() == "Constant"]
        return sum(
            math.prod(op.get_output_shape(0))
            for op in constants
            if op.get_element_type().get_type_name() in ("i8", "u8")
            and len(op.get_output_shape(0)) >= 2
        )


def _quiet_nncf() -> Any:
    """Import `nncf` with telemetry off, so that it logs only errors."""
    from rayembed_extras.compression.graphs import without_telemetry

    without_telemetry()
    import nncf

    # Not by its own function, which sets the levels of handlers that others may share.
    logging.getLogger("nncf").setLevel(logging.ERROR)
    return nncf


def _others(multiplied: Sequence[str], products: Sequence[str]) -> list[str]:
    """Return the names of the matrix multiplications that are not computed in int8."""
    chosen = set(products)
    return [name for name in multiplied if name not in chosen]


def _static_int8(
    model: Any,
    multiplied: Sequence[str],
    products: Sequence[str],
    batches: "Sequence[Mapping[str, np.ndarray]]",
) -> Any:
    """Quantise matrix multiplications to int8 with fixed input ranges from calibration batches, by
    NNCF; accepts graphs of both runtimes.

    It moves large activations into the weights behind them (SmoothQuant, arXiv 2211.10438) and
    corrects the biases.

    Args:
        multiplied: names of all nodes that could be int8.
        products: of those that become it.
        batches: calibration texts, one in each.
    """
    nncf = _quiet_nncf()
    named = getattr(model, "inputs", None)
    graph_inputs = model.graph.input if named is None else named
    names = [one.name if named is None else one.get_any_name() for one in graph_inputs]
    return nncf.quantize(
        model,
        nncf.Dataset([{name: batch[name] for name in names} for batch in batches]),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
        ignored_scope=nncf.IgnoredScope(names=_others(multiplied, products), validate=False),
    )
