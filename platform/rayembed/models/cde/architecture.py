"""CDE architecture: builds the model from its settings and writes its files."""

from functools import partial
from pathlib import Path

from torch import nn

from rayembed.models.architecture import (
    Architecture,
    Folders,
    Parts,
    Published,
    Shapes,
    check_positions,
    check_word_width,
)
from rayembed.models.cde.checkpoint import (
    CORPUS_FILE,
    is_published_cde,
    load_corpus,
    load_published_cde,
    published_cde_config,
    published_cde_width,
    save_corpus,
)
from rayembed.models.cde.config import CDEConfig
from rayembed.models.cde.layers import ContextLayers
from rayembed.models.cde.model import CDE
from rayembed.models.cde.positions import SequenceLayout
from rayembed.models.cde.tokens import make_tokenizer
from rayembed.models.contract import PromptTokenizer
from rayembed.models.loading.backbones import check_bidirectional
from rayembed.models.tokens import PrefixTokenizer


class CDEArchitecture(Architecture):
    """Architecture of two bidirectional encoders in sequence, saved with context vectors of a
    corpus.
    """

    def build_head(self, config: CDEConfig, shapes: Shapes) -> ContextLayers:
        """Build the layers around the two encoders."""
        widths = (int(shapes[part].hidden_size) for part in ("encoder", "backbone"))
        return ContextLayers(config, *widths)

    def tokenizer(self, config: CDEConfig, folders: Folders) -> PrefixTokenizer:
        """Make the tokenizer that both encoders share."""
        return make_tokenizer(config, folders)

    def assemble(
        self, config: CDEConfig, parts: Parts, head: nn.Module, tokenizer: PromptTokenizer
    ) -> CDE:
        """Build the model around the two encoders."""
        assert isinstance(head, ContextLayers)
        assert isinstance(tokenizer, PrefixTokenizer)
        return CDE(config, parts["backbone"], parts["encoder"], head, tokenizer)

    def check_parts(self, config: CDEConfig, parts: Parts, folders: Folders) -> None:
        """Check that both encoders are bidirectional, and that context vectors are as wide as word
        vectors.
        """
        check_word_width(parts["backbone"], config.kind, config.backbone.path)
        for name, part in parts.items():
            check_bidirectional(f"model.{name}.path", part, folders[name])

    def check_lengths(self, config: CDEConfig, parts: Parts) -> None:
        """Check that the second encoder has positions for a text with its context vectors, and the
        first one for a document.
        """
        backbone, encoder = parts["backbone"], parts["encoder"]
        added = SequenceLayout.of(config, backbone).num_positions(0)
        for role, length in config.max_lengths.items():
            check_positions(f"model.{role}_max_length", length, backbone, "backbone", added)
        length = config.document_max_length
        check_positions("model.document_max_length", length, encoder, "encoder")

    def published(self, folder: Path) -> Published | None:
        """Read the published model jxm/cde-small-v1 or v2."""
        if not is_published_cde(folder):
            return None
        return Published(
            published_cde_config(folder),
            folder,
            width=partial(published_cde_width, folder),
            load=lambda dtype: load_published_cde(folder, dtype=dtype),
            check=lambda: None,
        )

    def write_more(self, model: CDE, folder: Path) -> None:
        """Write the context vectors of the model's corpus."""
        if model.corpus is not None and len(model.corpus):
            save_corpus(model.corpus, folder)
        else:
            (folder / CORPUS_FILE).unlink(missing_ok=True)

    def read_more(self, model: CDE, folder: Path) -> None:
        """Read the context vectors of the model's corpus."""
        model.set_corpus(load_corpus(folder))


CDE_ARCHITECTURE = CDEArchitecture()
