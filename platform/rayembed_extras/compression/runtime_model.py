"""Models whose forward passes run as graphs of a CPU runtime, with the interface of other
models.

B texts of a micro-batch, D embedding width, C width of context vectors.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from rayembed.assets.folder_formats import FolderFormat
from rayembed.config.model import ModelConfig
from rayembed.errors import ArtifactError, ConfigError, DataError, require_packages
from rayembed.models.architecture import architecture_of
from rayembed.models.contract import EmbedOutput, PromptTokenizer
from rayembed.models.loading.files import read_json
from rayembed.models.loading.saved_folder import (
    SETTINGS_FILE,
    default_instructions,
    part_folders,
    read_settings,
    saved_dimensions,
)
from rayembed.models.loading.saved_prompts import saved_instructions
from rayembed.models.loading.start import check_trainable
from rayembed.models.transformer_model import TransformerModel
from rayembed_extras.compression.graphs import Graph
from rayembed_extras.compression.settings import RUNTIME_PACKAGES, GraphConfig


class RuntimeModel(TransformerModel):
    """A model without torch weights: it tokenises as its architecture does and computes vectors by
    exported ONNX or OpenVINO graphs.

    It computes on the CPU wherever it is moved to, in the number types of its graphs, and cannot be
    trained.
    """

    unpadded = "never"
    corpus: Tensor | None = None
    """(n, C) float32 context vectors of a corpus; None without one."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        graph: GraphConfig,
        tokenizer: PromptTokenizer,
        dimensions: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.folder, self.config, self.graph = folder, config, graph
        self.tokenizer, self.dimensions = tokenizer, dimensions
        self.added_tokens, self.max_context = graph.added_tokens, graph.max_context
        self.uses_context = graph.context_file is not None
        self._embed = Graph(folder / graph.file, graph)
        self._context = None
        if graph.context_file is not None:
            self._context = Graph(folder / graph.context_file, graph)

    @property
    def parts(self) -> dict[str, Any]:
        """Always empty, because the graphs contain the pretrained transformers."""
        return {}

    @property
    def device(self) -> torch.device:
        """Always the CPU."""
        return torch.device("cpu")

    @property
    def number_type(self) -> str:
        """Number type of the graph's products."""
        return "int8" if self.graph.precision.startswith("int8") else self.graph.floats

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Compute the unit vectors (B, D) of a padded micro-batch, on the CPU.

        Raises:
            DataError: more context vectors than the model takes, or of another width.
        """
        if self.uses_context:
            batch = {**batch, "context": self._checked(self._known(context))}
        return EmbedOutput(_of_graph(self._embed, batch))

    def embed_context(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute the context vectors (B, C) of a padded micro-batch of documents."""
        if self._context is None:
            return super().embed_context(batch)
        return _of_graph(self._context, batch)

    def set_corpus(self, vectors: Tensor | None) -> None:
        """Set the context vectors for all texts that have none of their own; raises the same errors
        as `forward`.
        """
        if not self.uses_context:
            super().set_corpus(vectors)
        self.corpus = None if vectors is None else self._checked(vectors.detach().clone().float())

    def no_context(self) -> Tensor:
        """Return an empty (0, C) array of context vectors, for a model without documents."""
        if not self.uses_context:
            return super().no_context()
        return torch.empty(0, self.graph.context_width)

    def _known(self, context: Tensor | None) -> Tensor:
        if context is not None:
            return context
        return self.no_context() if self.corpus is None else self.corpus

    def _checked(self, context: Tensor) -> Tensor:
        most, width = self.max_context, self.graph.context_width
        if context.ndim != 2 or context.shape[1] != width or len(context) > (most or len(context)):
            raise DataError(
                f"the context has the shape {tuple(context.shape)}, but this model takes at most "
                f"{most} vectors of width {width} (model.num_context)"
            )
        return context

    def train(self, mode: bool = True) -> "RuntimeModel":
        """Do nothing and return the model, because graphs always run in evaluation mode."""
        return super().train(False)

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Always raise, because the model has no torch weights.

        Raises:
            ConfigError: always.
        """
        check_trainable(self.folder)

    def write_files(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Write the model's files, including the corpus, into a folder.

        Raises:
            ConfigError: other instructions than those of the model that the graph was made of.
        """
        own = saved_instructions(self.folder, self.config)
        if instructions and dict(instructions) != own:
            raise ConfigError(
                "the instructions (prompts) of an exported graph are fixed; set them on the "
                "model that it is exported from"
            )
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        architecture_of(self.config).write_more(self, folder)


def load_runtime_model(folder: Path) -> RuntimeModel:
    """Load a model that consists of graphs; the graph files are opened at their first use.

    Raises:
        ArtifactError: no such model, or files are missing.
        ConfigError: the runtime is not installed.
    """
    graph = check_graph(folder)
    require_packages(f"the graph in {str(folder)!r}", "compress", *runtime_packages(folder))
    config = read_settings(folder)
    architecture = architecture_of(config)
    tokenizer = architecture.tokenizer(config, part_folders(config, folder))
    widths = saved_dimensions(folder / SETTINGS_FILE)
    model = RuntimeModel(folder.absolute(), config, graph, tokenizer, widths).eval()
    architecture.read_more(model, folder)
    model.default_instructions = default_instructions(folder)
    return model


def read_graph(folder: Path) -> GraphConfig:
    """Read the graph settings from a saved model's `rayembed.json`.

    Raises:
        ArtifactError: the folder's settings have none, or such as do not hold.
    """
    try:
        return GraphConfig.model_validate(read_json(folder / SETTINGS_FILE).get("graph"))
    except ValidationError as error:
        raise ArtifactError(
            f"the settings of the graph in {str(folder)!r} are not valid: {error}"
        ) from error


def check_graph(folder: Path) -> GraphConfig:
    """Read the graph settings of a folder; raise if a graph file is missing.

    Raises:
        ArtifactError: one is missing, or as `read_graph`.
    """
    graph = read_graph(folder)
    named = [name for name in (graph.file, graph.context_file) if name is not None]
    named += [name.removesuffix(".xml") + ".bin" for name in named if name.endswith(".xml")]
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise ArtifactError(
            f"the model in {str(folder)!r} is incomplete: the graph files {', '.join(missing)} "
            "are missing; copy the folder again, or export the model again"
        )
    return graph


def runtime_packages(folder: Path) -> tuple[str, ...]:
    """Name the Python package of the runtime that a folder's graphs need."""
    return (RUNTIME_PACKAGES[read_graph(folder).runtime],)


GRAPH = FolderFormat(load_runtime_model, check_graph, runtime_packages)
"""Loader for folders whose `rayembed.json` has graph settings."""


def _of_graph(graph: Graph, batch: Mapping[str, Tensor]) -> Tensor:
    return torch.from_numpy(graph({name: value.numpy() for name, value in batch.items()})).float()
