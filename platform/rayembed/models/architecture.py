"""Interface of a model architecture: how settings become a model, and how a model is written to
files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import nn

from rayembed.assets.sentence_modules import OWN_MODULE
from rayembed.config.architecture import ArchitectureConfig
from rayembed.config.backbone import BackboneConfig, Dtype, ProjectionConfig
from rayembed.config.model import ModelConfig
from rayembed.config.table import load
from rayembed.errors import ConfigError
from rayembed.models.contract import PromptTokenizer
from rayembed.models.loading.backbones import (
    Mask,
    check_backbone,
    empty_backbone,
    load_backbone,
    loaded_architectures,
    num_positions,
)

Model = Any
"""A `TransformerModel`, which is saved by its architecture and therefore not imported here."""

Parts = Mapping[str, Any]
"""Pretrained transformers by their settings (`backbone`, `encoder`)."""

Shapes = Mapping[str, Any]
"""Their transformers configurations."""

Folders = Mapping[str, Path]
"""Folders in which they, or exports of them, lie with their tokenizers."""


class Published(NamedTuple):
    """A model that others published in their own folder layout: its settings, and functions that
    load and check it.
    """

    config: ModelConfig
    """Its settings, in the number type in which it is saved."""
    transformer: Path
    """Folder of the tokenizer and the weights."""
    width: Callable[[], int]
    """Function that reads the width of its vectors from settings, without weights."""
    load: Callable[[Dtype], Model]
    """Function that loads it in a number type, in evaluation mode."""
    check: Callable[[], object]
    """Function that checks without reading weights that `load` succeeds; raises ArtifactError."""
    in_float16: Callable[[], Model | None] = lambda: None
    """Loads weights that are saved in float16 in that type, in which no model of ours computes, for
    a caller that casts them layer by layer; None if they are in another."""


class ModuleEntry(NamedTuple):
    """An entry of `modules.json`, the list of modules that sentence-transformers reads."""

    path: str
    """Folder relative to the model's."""
    type: str
    """Dotted name of its class."""


class Architecture:
    """Base class for architectures: builds a model from its settings and writes its files.

    One object of each architecture is named by its settings' class. The defaults are those of one
    pretrained transformer that attends as its family does, with a head without weights. Sub-classes
    give at least `tokenizer` and `assemble`. `config` is of the architecture's own class.
    """

    objective: ClassVar[str] = "rayembed.training.contrastive.step:CONTRASTIVE"
    """Import string of the training objective, which makes batches and runs steps."""
    takes_any_encoder: ClassVar[bool] = False
    """Whether `published` accepts any encoder in a usual format; such architectures are
    tried last."""
    left_alone: ClassVar[tuple[str, ...]] = ("*.router.*", "*.gate.*", "*_expert_gate.*")
    """Name patterns of parameters that compression leaves unchanged by default: routers, which are
    small and affect every expert."""

    # --- building

    def mask(self, config: Any) -> Mask:
        """Return the attention mask that the settings require of the backbone: causal,
        bidirectional, or the default of the model family.
        """
        return "own"

    def load_part(self, config: Any, name: str, folder: Path) -> Any:
        """Load a pretrained part (backbone or encoder) from its folder, in the backbone's number
        type, on the CPU.

        Raises:
            ArtifactError: no such model, damaged, or weights missing.
            ConfigError: settings that do not fit it.
        """
        mask = self.mask(config) if name == "backbone" else "own"
        return load_backbone(folder, part_settings(config, name, folder), mask=mask)

    def empty_part(self, config: Any, name: str, folder: Path) -> Any:
        """Build a pretrained part on the meta device, without reading weights; raises the same
        errors as `load_part`.
        """
        mask = self.mask(config) if name == "backbone" else "own"
        return empty_backbone(folder, part_settings(config, name, folder), mask=mask)

    def check_part(self, config: Any, name: str, folder: Path) -> None:
        """Check from its files that a saved pretrained part can be loaded.

        Raises:
            ArtifactError: an unknown architecture, or weights of other names or shapes.
        """
        check_backbone(folder)

    def empty_of_settings(
        self, config: Any, name: str, settings: Mapping[str, Any], where: str
    ) -> nn.Module | None:
        """Build a part that rayembed itself implements on the meta device, from the content of a
        config.json; None if transformers builds this part.

        Args:
            where: what to call it in messages.

        Raises:
            ArtifactError, ConfigError: as `empty_part`.
        """
        return None

    def build_head(self, config: Any, shapes: Shapes) -> nn.Module:
        """Build the head: randomly initialised layers that work on the outputs of the pretrained
        parts.

        Raises:
            ConfigError: settings that do not fit the parts' sizes.
        """
        return nn.Identity()

    def start_head(self, config: Any, head: nn.Module, parts: Parts) -> None:
        """Rescale a newly initialised head in place so that it fits the weights of the pretrained
        parts.
        """
        return None

    def tokenizer(self, config: Any, folders: Folders) -> PromptTokenizer:
        """Make the model's picklable tokenizer from the folders of its parts, or from an exported
        model's folder.

        Raises:
            ArtifactError: no fast tokenizer there, or one without a token that is needed.
            ConfigError: maximum lengths that leave no room for text.
        """
        raise TypeError(f"{type(self).__name__} must define the method tokenizer")

    def assemble(
        self, config: Any, parts: Parts, head: nn.Module, tokenizer: PromptTokenizer
    ) -> Model:
        """Build the model from its pretrained parts, head and tokenizer."""
        raise TypeError(f"{type(self).__name__} must define the method assemble")

    def check_parts(self, config: Any, parts: Parts, folders: Folders) -> None:
        """Check that the pretrained parts fit the settings and each other; the parts may be on the
        meta device.

        Raises:
            ConfigError: they do not.
        """
        return None

    # --- cutting

    def layer_fits(self, part: Any, layer: int, place: int) -> bool:
        """Whether a layer of a pretrained part may move to another position in it, both counted
        from 0.
        """
        return True

    def cut_layers(self, part: Any, kept: Sequence[int]) -> bool:
        """Keep only the given layers of a part that is not a transformers model, and update its
        settings; the part may be on the meta device. False: it is one, and nothing was done.
        """
        return False

    def cut_vocabulary(self, part: Any, kept: Sequence[int]) -> bool:
        """Keep only the embeddings of the given token ids (ascending; renumbered from 0) of a part
        that is not a transformers model. False: it is one, and nothing was done.
        """
        return False

    def check_lengths(self, config: Any, parts: Parts) -> None:
        """Check that the pretrained parts have positions for texts of maximum length.

        Raises:
            ConfigError: a text may be longer.
        """
        for role, length in config.max_lengths.items():
            check_positions(f"model.{role}_max_length", length, parts["backbone"], "backbone")

    # --- starting from a model

    def projections(self, config: Any) -> tuple[ProjectionConfig, ...]:
        """Return the linear layers after the pooling, as Dense modules of sentence-transformers."""
        return ()

    def remark_on_start(self, config: Any, folder: Path, transformer: Path) -> str | None:
        """Return a warning about starting training from this folder, such as another pooling; None
        if nothing differs.

        Args:
            transformer: the folder of the transformer within.
        """
        return None

    def check_for_transformers(self, folder: Path) -> None:
        """Raise if transformers would misread a folder in this architecture's own layout.

        Raises:
            ArtifactError: it would silently be computed as another model.
        """
        return None

    # --- files

    def published(self, folder: Path) -> Published | None:
        """Return the model of a folder in a layout that others publish and this architecture reads;
        None for other layouts.

        Raises:
            ArtifactError: of this layout, but damaged or with parts that are not supported.
        """
        return None

    def write_sentence_files(self, model: Any, folder: Path) -> list[ModuleEntry]:
        """Write the files that sentence-transformers reads; return the entries of
        `modules.json`.
        """
        return [ModuleEntry("", OWN_MODULE)]

    def check_sentence_files(self, config: Any, folder: Path) -> None:
        """Check that the files of `write_sentence_files` agree with the settings.

        Raises:
            ArtifactError: it says another thing.
        """
        return None

    def write_part_settings(self, part: Any, folder: Path) -> None:
        """Write the config.json of a pretrained part."""
        part.config.save_pretrained(str(folder))

    def write_more(self, model: Any, folder: Path) -> None:
        """Write model data other than pretrained parts, head, tokenizers and settings."""
        return None

    def read_more(self, model: Any, folder: Path) -> None:
        """Read the data that `write_more` wrote into a loaded model."""
        return None


def architecture_of(config: ArchitectureConfig) -> Architecture:
    """Return the architecture that the settings name."""
    return _loaded(type(config).architecture)


def architectures() -> Iterator[Architecture]:
    """Return all architectures; those that accept any encoder come last."""
    yield from sorted(loaded_architectures(), key=lambda one: bool(one.takes_any_encoder))


def part_settings(config: ArchitectureConfig, name: str, folder: Path) -> BackboneConfig:
    """Return the settings with which to load a pretrained part: the backbone's own; for other parts
    only its number type.
    """
    if name == "backbone":
        return config.backbone
    return BackboneConfig(path=str(folder), dtype=config.backbone.dtype)


def check_positions(setting: str, length: int, part: Any, what: str, added: int = 0) -> None:
    """Check that a pretrained part has enough positions for a text of maximum length and `added`
    further tokens.

    Args:
        setting: where the length stands, for the message.
        what: the part's name in the message.

    Raises:
        ConfigError: it has learnt fewer.
    """
    positions = num_positions(part)
    if positions is not None and length + added > positions:
        behind = f", and the tokens before a text take {added} of them" if added else ""
        raise ConfigError(
            f"{setting} is {length}, but the {what} has learnt only {positions} "
            f"positions{behind}; set it to at most {max(positions - added, 0)}"
        )


def check_word_width(part: Any, kind: str, reference: str) -> None:
    """Check that a backbone's word embeddings are as wide as its hidden states, since vectors of
    that width are inserted among them.

    Args:
        kind: the model's kind, for the message.
        reference: the backbone's.

    Raises:
        ConfigError: its words are narrower than its states (OPT-350m, ALBERT, small ELECTRA).
    """
    width, hidden = part.get_input_embeddings().embedding_dim, part.config.hidden_size
    if width != hidden:
        raise ConfigError(
            f"model.backbone.path {reference!r}: its word embeddings are {width} wide and its "
            f"hidden states {hidden}, but a {kind} inserts vectors as wide as hidden states among "
            "the word embeddings; use a model in which both widths are equal"
        )


@cache
def _loaded(reference: str) -> Architecture:
    found: Architecture = load(reference)
    return found
