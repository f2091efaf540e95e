"""Export a model as computation graphs for CPU runtimes (ONNX, OpenVINO): settings and
files.

A model is traced, converted, compared with its graph, and written.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PositiveInt

from rayembed.errors import ArtifactError, ConfigError, require_packages
from rayembed_extras.compression.contract import (
    CalibrationText,
    Compressed,
    Compression,
    CompressionSource,
)
from rayembed_extras.compression.settings import Floats, GraphConfig, GraphPrecision, Runtime

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rayembed.models.contract import Tokens
    from rayembed.models.transformer_model import TransformerModel
    from rayembed_extras.compression.matrices import Matrix

logger = logging.getLogger(__name__)

LEAST_TEXTS = 8
"""Fewest calibration texts for static ranges."""

LARGEST_BYTES = 2_000_000_000
"""Maximum bytes of a model's float32 weights: one ONNX file holds 2 GiB."""

_FLOAT_ERROR = 1e-4
"""Maximum difference between unit vectors of a float32 graph and of the model, per component."""


class CpuGraph(Compression):
    """Base class of exports to a CPU runtime; the exported graph maps token ids and masks to unit
    vectors.
    """

    runtime: ClassVar[Runtime]
    suffix: ClassVar[str]
    """Ending of the graph's file."""
    packages: ClassVar[tuple[str, ...]]
    """Modules needed to make the graph."""
    needs_texts: ClassVar[bool] = True
    """Static ranges need texts, and every graph is compared with the model on some."""

    precision: GraphPrecision = "int8-dynamic"
    """Number type of linear layers and experts. `float32`: as the model computes. `int8-dynamic`:
    int8 weights, and activations scaled to int8 by what each batch holds. `int8-static`:
    activations scaled by what calibration texts showed. All but linear layers and experts stays
    float."""
    skip: tuple[str, ...] | None = None
    """Patterns of names of parameters that stay float32, such as `*.output.dense.weight`; null: all
    outside of the transformers' layers. Routers of experts always do."""
    max_texts: PositiveInt = 128
    """Maximum number of calibration texts used."""
    least_cosine: float = Field(default=0.9, ge=-1, le=1)
    """Lowest allowed mean cosine between vectors of the graph and of the model over calibration
    texts; below it no graph is written."""

    @property
    def label(self) -> str:
        """Runtime and precision, such as `onnx-int8-static`."""
        return f"{self.kind}-{self.precision}"

    @property
    def fewest_texts(self) -> int:
        """Minimum number of texts: several to calibrate static ranges, otherwise one to compare
        vectors.
        """
        return LEAST_TEXTS if self.precision == "int8-static" else 1

    @property
    def floats(self) -> Floats:
        """Number type of all operations that are not computed in int8."""
        return "float32"

    def check(self, folder: Path) -> None:
        """Check that the packages are installed and that the model can be exported as a
        graph.

        Raises:
            ConfigError: they cannot, with the reason; or a package is missing, with its command.
            ArtifactError: no model that can be loaded.
        """
        from rayembed.models.loading.load import empty_model
        from rayembed.models.loading.saved_folder import SETTINGS_FILE
        from rayembed.models.loading.start import check_trainable
        from rayembed_extras.compression.matrices import matrices_of
        from rayembed_extras.compression.trace import trace

        require_packages(self.kind, "compress", "onnx", "onnxscript", *self.packages)
        check_trainable(folder)
        model = empty_model(folder).eval()
        _check_size(model)
        if self.precision != "float32":
            matrices_of(model, self.skip)
        if (folder / SETTINGS_FILE).is_file():
            trace(model)  # one in a published layout is traced when it is loaded, before all else

    def compress(self, source: CompressionSource, output: Path) -> Compressed:
        """Write the graph, and next to it the model's files other than weights.

        Raises:
            ConfigError: as `check`; or calibration texts too few for static ranges.
            ArtifactError: the graph gives other vectors than the model, or a weight is not finite,
                or what the model gives for a text.
        """
        from rayembed.assets.finite import check_finite
        from rayembed.models.loading.load import load_model
        from rayembed.models.loading.saved_prompts import saved_instructions
        from rayembed.models.loading.start import check_trainable
        from rayembed.models.saving.export import check_target, new_folder
        from rayembed_extras.compression.matrices import matrices_of, statistics_of

        require_packages(self.kind, "compress", "onnx", "onnxscript", *self.packages)
        check_target(output)
        check_trainable(source.folder)
        if self.precision == "int8-static" and len(source.texts) < self.fewest_texts:
            raise ConfigError(
                f"precision = 'int8-static' needs at least {self.fewest_texts} calibration texts, "
                f"but got {len(source.texts)}. Give more texts, or use precision = 'int8-dynamic'"
            )
        model = load_model(source.folder, dtype="float32").eval()
        check_finite(model.state_dict().items(), f"the model {str(source.folder)!r}")
        model.check_passes(f"the model {str(source.folder)!r}")
        _check_size(model)
        chosen = [] if self.precision == "float32" else matrices_of(model, self.skip)
        tokens = _tokens(model, source.texts[: self.max_texts])
        made = statistics_of(model, chosen)
        graph = GraphConfig(
            runtime=self.runtime,
            precision=self.precision,
            floats=self.floats,
            file=f"graph{self.suffix}",
            context_file=f"context{self.suffix}" if model.uses_context else None,
            context_width=model.no_context().shape[1] if model.uses_context else 0,
            max_context=model.max_context,
            added_tokens=model.added_tokens,
        )
        context = _context(model, source.texts) if model.uses_context else None
        instructions = saved_instructions(source.folder, model.config)
        with new_folder(output) as written:
            written.mkdir()
            _write_files(model, written, graph, instructions=instructions)
            _write_graph(self, model, chosen, written / graph.file, _inputs(model, tokens, context))
            if graph.context_file is not None:
                batches = _inputs(model, tokens, None)
                _write_graph(
                    self, model, chosen, written / graph.context_file, batches, context=True
                )
            _check_number(self, written, graph, made.compressed)
            apart = _compare(self, model, load_model(written), tokens, context)
            made.write(self, source.folder, written, **apart)
        return made

    def convert(
        self,
        plain: Path,
        target: Path,
        products: Sequence[str],
        batches: "Sequence[Mapping[str, np.ndarray]]",
    ) -> None:
        """Convert a float32 ONNX graph to the runtime's format and precision, and write it.

        Args:
            plain: the ONNX graph.
            target: file to write.
            products: names of the graph's nodes whose weights become int8.
            batches: calibration texts, one in each.
        """
        raise TypeError(f"{type(self).__name__} does not implement convert")

    def int8_weights(self, target: Path) -> int:
        """Count the int8 weights in an exported graph."""
        raise TypeError(f"{type(self).__name__} does not implement int8_weights")


def _check_size(model: "TransformerModel") -> None:
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST_BYTES:
        raise ConfigError(
            f"the model has {size / 1e9:.1f} GB in float32, but one graph file can hold at most "
            f"{LARGEST_BYTES / 1e9:.1f} GB; use a smaller model, or a compression method with "
            "int8 weights for torch"
        )


def _write_files(
    model: "TransformerModel",
    folder: Path,
    graph: GraphConfig,
    *,
    instructions: Mapping[str, str] | None = None,
) -> None:
    """Write all files of a model except its weights, which the graphs replace.

    Every architecture has the layout of those that need rayembed to load, bi-encoders too.

    Args:
        graph: how the graphs are run, which the caller writes.
    """
    from rayembed.assets.sentence_modules import OWN_MODULE
    from rayembed.models.architecture import ModuleEntry, architecture_of
    from rayembed.models.loading.files import write_json
    from rayembed.models.loading.saved_folder import MODEL_TYPE
    from rayembed.models.tokens import save_tokenizer
    from rayembed.models.transformer_model import (
        let_all_read,
        write_sentence_files,
        write_settings,
    )

    architecture = architecture_of(model.config)
    write_json(folder / "config.json", {"model_type": MODEL_TYPE, "kind": model.config.kind})
    for name, part in model.parts.items():
        (folder / name).mkdir()
        architecture.write_part_settings(part, folder / name)
        save_tokenizer(model.part_tokenizers[name], folder / name)
    architecture.write_more(model, folder)
    write_settings(model, folder, format="graph", graph=graph.model_dump(mode="json"))
    write_sentence_files(model, [ModuleEntry("", OWN_MODULE)], folder, instructions or {})
    let_all_read(folder)


def _write_graph(
    way: CpuGraph,
    model: "TransformerModel",
    chosen: "Sequence[Matrix]",
    target: Path,
    batches: "Sequence[Mapping[str, np.ndarray]]",
    *,
    context: bool = False,
) -> None:
    """Export one graph and remove the intermediate files."""
    from rayembed_extras.compression.trace import prepare, write_onnx

    plain = target.with_name(f"plain-{target.stem}.onnx")
    write_onnx(model, plain, context=context)
    products = prepare(plain, chosen, model)
    way.convert(plain, target, products, batches)
    for left in target.parent.glob(f"{plain.stem}*"):
        left.unlink()


def _tokens(model: "TransformerModel", texts: Sequence[CalibrationText]) -> "list[Tokens]":
    from rayembed.models.passes.encoding import PROBES

    given = texts or [CalibrationText(text) for text in PROBES]
    return [
        model.tokenizer(
            [one.text],
            one.role,
            [model.instruction_of(one.role, one.instruction)],
            allow_empty=True,
        )[0]
        for one in given
    ]


def _context(model: Any, texts: Sequence[CalibrationText]) -> "Tensor":
    """(n, C) context vectors of the model's corpus, or of documents among the calibration texts if
    it has none.
    """
    from rayembed.models.passes.encoding import PROBES, corpus_context

    if model.corpus is not None and len(model.corpus):
        corpus: Tensor = model.corpus
        return corpus
    documents = [one.text for one in texts if one.role == "document"] or list(PROBES)
    found = corpus_context(model, documents)
    return model.no_context() if found is None else found


def _inputs(
    model: "TransformerModel", tokens: "Sequence[Tokens]", context: "Tensor | None"
) -> "list[dict[str, np.ndarray]]":
    """Collate each text alone, without padding, into the graph's inputs."""
    more = {} if context is None else {"context": context.numpy()}
    return [
        {name: value.numpy() for name, value in model.tokenizer.collate([one]).items()} | more
        for one in tokens
    ]


def _check_number(way: CpuGraph, folder: Path, graph: GraphConfig, asked: int) -> None:
    """Raise if the exported graph does not have the requested number of int8 weights.

    Raises:
        ArtifactError: they are not those that were asked for.
    """
    files = [name for name in (graph.file, graph.context_file) if name is not None]
    found = sum(way.int8_weights(folder / name) for name in files)
    if found != asked:
        raise ArtifactError(
            f"{way.label}: {asked} weight matrices should be int8, but {found} matrices of the "
            "exported graph are; the output was removed"
        )


def _compare(
    way: CpuGraph,
    model: "TransformerModel",
    graph: "TransformerModel",
    tokens: "Sequence[Tokens]",
    context: "Tensor | None",
) -> dict[str, float]:
    """Compare the graph's vectors with the model's in micro-batches of several sizes: mean and
    lowest cosine.

    Raises:
        ArtifactError: they are further apart than the way allows.
    """
    import numpy as np

    from rayembed.models.passes.encoding import encode_tokens

    before = encode_tokens(model, tokens, context=context)
    after = encode_tokens(graph, tokens, context=context)
    cosines = (before * after).sum(axis=1)
    apart = {"cosine_mean": float(cosines.mean()), "cosine_lowest": float(cosines.min())}
    largest = float(np.abs(before - after).max())
    exact = way.precision == "float32" and way.floats == "float32"
    # Written so that NaN fails.
    if not (largest <= _FLOAT_ERROR if exact else apart["cosine_mean"] >= way.least_cosine):
        raise ArtifactError(
            f"{way.label}: over {len(tokens)} texts the graph's vectors have a mean cosine of "
            f"{apart['cosine_mean']:.4f} with the model's vectors, and their numbers differ by up "
            f"to {largest:.2g}; "
            + (
                f"the largest allowed difference is {_FLOAT_ERROR:g}"
                if exact
                else f"the minimum mean cosine is least_cosine={way.least_cosine:g}. Exclude "
                "sensitive matrices by skip, or use another precision"
            )
        )
    logger.info("%s: mean cosine between graph and model %.5f", way.label, apart["cosine_mean"])
    return apart
