"""What both runtimes of CPUs share: settings, and the way from a model to its graphs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PositiveInt

from rayembed.compression.contract import Compressed, Compression, Source
from rayembed.config.graph import Floats, GraphPrecision, Runtime

if TYPE_CHECKING:
    import numpy as np

LEAST_TEXTS = 8
"""Fewest calibration texts for static ranges."""


class CpuGraph(Compression):
    """A graph that a runtime for CPUs computes, from token ids and masks to unit vectors."""

    runtime: ClassVar[Runtime]
    suffix: ClassVar[str]
    """Ending of the graph's file."""
    packages: ClassVar[tuple[str, ...]]
    """Modules that make the graph."""
    needs_texts: ClassVar[bool] = True
    """Ranges of activations are taken from texts, and all are compared with the model on some."""

    precision: GraphPrecision = "int8-dynamic"
    """Numbers of linear layers and experts. `float32`: as the model computes. `int8-dynamic`: int8
    weights, and activations scaled to int8 by what each batch holds. `int8-static`: activations
    scaled by what calibration texts showed. All but linear layers and experts stays float."""
    skip: tuple[str, ...] | None = None
    """Patterns of names of parameters that stay float32, such as `*.output.dense.weight`; null: all
    that stands outside of the transformers' layers. Routers of experts always do."""
    max_texts: PositiveInt = 128
    """Calibration texts that are used, of all that there are."""
    least_cosine: float = Field(default=0.9, ge=-1, le=1)
    """Lowest mean cosine between vectors of the graph and of the model over calibration texts; a
    graph below it is not written."""

    @property
    def label(self) -> str:
        """Runtime and precision, such as `onnx-int8-static`."""
        return f"{self.kind}-{self.precision}"

    @property
    def fewest_texts(self) -> int:
        """Ranges need some, a comparison of vectors one."""
        return LEAST_TEXTS if self.precision == "int8-static" else 1

    @property
    def floats(self) -> Floats:
        """Number type of what is not int8."""
        return "float32"

    def check(self, folder: Path) -> None:
        """Check that packages are there and that the model's passes can be traced.

        Raises:
            ConfigError: they cannot, with the reason; or a package is missing, with its command.
            ArtifactError: no model that can be loaded.
        """
        from rayembed.compression.make_graph import check_traceable
        from rayembed.models.graphs import check_packages

        check_packages("onnx", "onnxscript", *self.packages)
        check_traceable(self, folder)

    def compress(self, source: Source, output: Path) -> Compressed:
        """Write the graph and what stands beside it.

        Raises:
            ConfigError: as `check`; or calibration texts too few for static ranges.
            ArtifactError: the graph gives other vectors than the model.
        """
        from rayembed.compression.make_graph import make_graph
        from rayembed.models.graphs import check_packages

        check_packages("onnx", "onnxscript", *self.packages)
        return make_graph(self, source, output)

    def convert(
        self,
        plain: Path,
        target: Path,
        products: Sequence[str],
        batches: "Sequence[Mapping[str, np.ndarray]]",
    ) -> None:
        """Write the runtime's graph of a float32 ONNX graph.

        Args:
            plain: the ONNX graph.
            target: file to write.
            products: names of the graph's nodes whose weights become int8.
            batches: calibration texts, one in each.
        """
        raise TypeError(f"{type(self).__name__} converts no graph")

    def int8_weights(self, target: Path) -> int:
        """Number of int8 weights in a written graph."""
        raise TypeError(f"{type(self).__name__} counts no weights")


MULTIPLIES = ("MatMul", "Gather")
"""Kinds of nodes that NNCF makes int8: products, and looking up of embeddings."""


def quiet_nncf() -> Any:
    """The module `nncf`, which reports nothing and says what is wrong alone."""
    import logging

    from rayembed.models.graphs import without_telemetry

    without_telemetry()
    import nncf

    # Not by its own function, which sets the levels of handlers that others may share.
    logging.getLogger("nncf").setLevel(logging.ERROR)
    return nncf


def others(multiplied: Sequence[str], products: Sequence[str]) -> list[str]:
    """Names of nodes that stay float."""
    chosen = set(products)
    return [name for name in multiplied if name not in chosen]


def static_int8(
    model: Any,
    multiplied: Sequence[str],
    products: Sequence[str],
    batches: "Sequence[Mapping[str, np.ndarray]]",
) -> Any:
    """Graph of either runtime with int8 products of static ranges, by NNCF.

    It moves large activations into the weights behind them (SmoothQuant, arXiv 2211.10438) and
    corrects the biases.

    Args:
        multiplied: names of all nodes that could be int8.
        products: of those that become it.
        batches: calibration texts, one in each.
    """
    nncf = quiet_nncf()
    named = getattr(model, "inputs", None)
    graph_inputs = model.graph.input if named is None else named
    names = [one.name if named is None else one.get_any_name() for one in graph_inputs]
    return nncf.quantize(
        model,
        nncf.Dataset([{name: batch[name] for name in names} for batch in batches]),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
        ignored_scope=nncf.IgnoredScope(names=others(multiplied, products), validate=False),
    )
