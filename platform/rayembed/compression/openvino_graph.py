"""Graphs for OpenVINO."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayembed.compression.cpu_graph import CpuGraph
from rayembed.config.graph import Floats, Runtime

if TYPE_CHECKING:
    import numpy as np


class OpenVINO(CpuGraph):
    """An OpenVINO graph, made from the ONNX one; int8 by NNCF."""

    kind: Literal["openvino"] = "openvino"
    runtime: ClassVar[Runtime] = "openvino"
    suffix: ClassVar[str] = ".xml"
    packages: ClassVar[tuple[str, ...]] = ("openvino", "nncf")

    bfloat16: bool = False
    """Whether what is not int8 is computed in bfloat16 where the CPU has units for it."""

    @property
    def label(self) -> str:
        """Runtime and precisions, such as `openvino-int8-static-bfloat16`."""
        return super().label + ("-bfloat16" if self.bfloat16 else "")

    @property
    def floats(self) -> Floats:
        """Number type of what is not int8."""
        return "bfloat16" if self.bfloat16 else "float32"

    def convert(
        self,
        plain: Path,
        target: Path,
        products: Sequence[str],
        batches: "Sequence[Mapping[str, np.ndarray]]",
    ) -> None:
        """Write the graph and its weights, with int8 products as asked."""
        from rayembed.models.graphs import import_openvino

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
        import nncf

        nncf.set_log_level(logging.ERROR)
        multiplied = ("MatMul", "Gather", "Embedding")
        others = [
            op.get_friendly_name()
            for op in model.get_ops()
            if op.get_type_name() in multiplied and op.get_friendly_name() not in set(products)
        ]
        ignored = nncf.IgnoredScope(names=others, validate=False)
        if self.precision == "int8-dynamic":
            return nncf.compress_weights(
                model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=ignored
            )
        names = [one.get_any_name() for one in model.inputs]
        dataset = nncf.Dataset([{name: batch[name] for name in names} for batch in batches])
        return nncf.quantize(
            model,
            dataset,
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(batches),
            ignored_scope=ignored,
        )

    def int8_weights(self, target: Path) -> int:
        """Number of int8 weights in a written graph."""
        import math

        from rayembed.models.graphs import import_openvino

        ops = import_openvino().Core().read_model(target).get_ops()
        constants = [op for op in ops if op.get_type_name() == "Constant"]
        return sum(
            math.prod(op.get_output_shape(0))
            for op in constants
            if op.get_element_type().get_type_name() in ("i8", "u8")
            and len(op.get_output_shape(0)) >= 2
        )
