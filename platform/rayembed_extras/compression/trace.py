"""Export a model's forward passes as ONNX graphs, for any number and length of texts.

torch.export traces the model and torch.onnx writes what it found. Opset 18 is what quantisers of
both runtimes know; 23 has attention as one node, which they quantise into graphs that do not load,
and which computes no faster (benchmarks/log).
"""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rayembed.errors import ConfigError
from rayembed.models.transformer_model import TransformerModel
from rayembed_extras.compression.matrices import Matrix

OPSET = 18

_EXAMPLES = (
    "one text",
    "another text, of more words than the first one has, so that it is padded",
    "a third",
)
"""Number of texts to trace; the graph holds for other numbers, as a test
after the export checks."""
_CONTEXT = 2
"""Number of context documents to trace."""


class Pass(nn.Module):
    """A forward pass that takes the tensors of a batch as separate arguments, as the exporter
    requires.
    """

    def __init__(self, model: TransformerModel, names: Sequence[str], *, context: bool) -> None:
        super().__init__()
        self.model, self.names, self.context = model, tuple(names), context

    def forward(self, *values: Tensor) -> Tensor:
        """Compute (B, D) unit vectors, or (B, C) context vectors."""
        batch = dict(zip(self.names, values, strict=True))
        if self.context:
            return self.model.embed_context(batch)
        context = batch.pop("context", None)
        made = self.model(batch) if context is None else self.model(batch, context)
        embeddings: Tensor = made.embeddings
        return embeddings


def trace(model: TransformerModel, *, context: bool = False) -> Any:
    """Export a forward pass as a torch program; `example` has its inputs by name.

    Args:
        context: of the pass that embeds context documents.

    Raises:
        ConfigError: the pass depends on its texts in a way that no graph can express.
    """
    values = example(model, context=context)
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple({0: dynamic, 1: dynamic} for _ in values)
    if "context" in values:
        shapes = (*shapes[:-1], {0: torch.export.Dim.AUTO})
    module = Pass(model, list(values), context=context).eval()
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(
                module,
                tuple(values.values()),
                dynamic_shapes={"values": shapes},
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except Exception as error:  # whatever torch or a model's code raises in tracing
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"this {model.config.kind} model cannot be exported as a graph: {said}"
        ) from error


def example(model: TransformerModel, *, context: bool) -> dict[str, Tensor]:
    """Make example inputs by name for the export, on the model's device."""
    tokens = model.tokenizer(_EXAMPLES, "document")
    batch = model.tokenizer.collate(tokens)
    device = next(model.parameters()).device
    if model.uses_context and not context:
        batch["context"] = torch.zeros(_CONTEXT, model.no_context().shape[1])
    return {name: value.to(device) for name, value in batch.items()}


def write_onnx(model: TransformerModel, path: Path, *, context: bool = False) -> None:
    """Write the float32 ONNX graph of a forward pass; raises the same errors as `trace`."""
    program = trace(model, context=context)
    names = list(example(model, context=context))
    with torch.no_grad(), _quiet():
        made = torch.onnx.export(
            program,
            input_names=names,
            output_names=["embeddings"],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert made is not None
    made.save(str(path))


def prepare(path: Path, matrices: Sequence[Matrix], model: nn.Module) -> list[str]:
    """Rewrite an exported graph for quantisers; return the names of nodes that multiply by the
    given matrices.

    The graph is rewritten: products with a sum behind them (Gemm) become products, which
    quantisers know, and what tells of the export, such as places on this machine, goes.
    """
    import onnx

    written = onnx.load(str(path))
    split_sums(written.graph)
    found = products_of(written.graph, matrices, model)
    del written.metadata_props[:], written.graph.metadata_props[:]
    graph = written.graph
    for part in (*graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output):
        del part.metadata_props[:]
    for function in written.functions:
        del function.metadata_props[:]
    onnx.save(written, str(path))
    return found


def products_of(graph: Any, matrices: Sequence[Matrix], model: nn.Module) -> list[str]:
    """Names of the nodes in a graph that multiply by one of the given matrices."""
    names = {id(module): name for name, module in model.named_modules()}
    modules = set()
    for matrix in matrices:
        name = f"model.{names[id(matrix.module)]}"
        # Experts multiply within the module that holds all of them.
        modules |= {name, name.rpartition(".")[0]} if len(matrix.slices) > 1 else {name}
    weights = {one.name for one in graph.initializer if len(one.dims) == 2}
    found = []
    for node in graph.node:
        scopes = {entry.key: entry.value for entry in node.metadata_props}.get(
            "pkg.torch.onnx.name_scopes", "[]"
        )
        within = [scope for scope in _list(scopes) if scope]
        ours = bool(set(within[-2:]) & modules)
        if node.op_type == "MatMul" and ours and node.input[1] in weights:
            found.append(str(node.name))
    return found


def split_sums(graph: Any) -> None:
    """Replace each Gemm node that has a constant weight by a MatMul of the same name and an Add, in
    place.
    """
    from onnx import helper, numpy_helper

    weights = {one.name: one for one in graph.initializer}
    nodes = list(graph.node)
    for node in nodes:
        settings = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        plain = settings.get("alpha", 1.0) == settings.get("beta", 1.0) == 1.0
        if node.op_type != "Gemm" or node.input[1] not in weights or settings.get("transA"):
            continue
        if not plain:
            continue
        name = node.input[1]
        if settings.get("transB"):
            turned = numpy_helper.to_array(weights[name]).T.copy()
            name = f"{name}_turned"
            if name not in weights:
                weights[name] = numpy_helper.from_array(turned, name)
                graph.initializer.append(weights[name])
        made = f"{node.output[0]}_product" if len(node.input) == 3 else node.output[0]
        product = helper.make_node("MatMul", [node.input[0], name], [made], name=node.name)
        product.metadata_props.extend(node.metadata_props)
        new = [product]
        if len(node.input) == 3:
            bias = [made, node.input[2]]
            new.append(helper.make_node("Add", bias, [node.output[0]], name=f"{node.name}_sum"))
        place = nodes.index(node)
        nodes[place : place + 1] = new
    used = {name for node in nodes for name in node.input}
    left = [one for one in graph.initializer if one.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(left)


def _list(text: str) -> list[str]:
    found: list[str] = json.loads(text.replace("'", '"'))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that silences the ONNX exporter's messages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
