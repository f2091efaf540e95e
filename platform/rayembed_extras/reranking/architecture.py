"""The cross-encoder: loaded from a published layout, trained, and saved in it.

A model is the `…ForSequenceClassification` class of transformers for its family, with one label:
bge-reranker (XLM-R), the MS MARCO MiniLM rerankers (BERT), gte-reranker-modernbert, and decoders
that score by their last token. So weights keep their published names, and what is saved loads in
transformers, sentence-transformers and Text Embeddings Inference. B pairs of a micro-batch.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from rayembed.assets.sentence_modules import no_pickled_objects
from rayembed.config.backbone import BackboneConfig, Dtype
from rayembed.display.quiet import without_loading_report
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.architecture import Architecture, Folders, ModuleEntry, Parts, Published
from rayembed.models.contract import EmbedOutput, PromptTokenizer
from rayembed.models.loading.backbones import (
    check_backbone,
    cut_layers,
    finish_backbone,
    num_positions,
    set_dropout,
    torch_dtype,
)
from rayembed.models.loading.files import read_json, write_json
from rayembed.models.loading.rope import set_rope
from rayembed.models.loading.saved_folder import SETTINGS_FILE
from rayembed.models.loading.sentence_folder import stated_dtype
from rayembed.models.tokens import pretrained_tokenizer
from rayembed.models.transformer_model import TransformerModel
from rayembed_extras.reranking.settings import CrossEncoderConfig
from rayembed_extras.reranking.tokens import PairTokenizer

logger = logging.getLogger(__name__)

_CLASS = "ForSequenceClassification"
_HEAD_DROPOUT = ("classifier_dropout", "seq_classif_dropout")
_UNLIMITED = 10**6
"""Lengths above it mean none: tokenizers without a limit say 1e30."""


class CrossEncoderModel(TransformerModel):
    """A score for each pair of query and document."""

    config: CrossEncoderConfig
    tokenizer: PairTokenizer

    def __init__(self, config: CrossEncoderConfig, backbone: Any, tokenizer: PairTokenizer) -> None:
        super().__init__()
        self.config, self.backbone, self.tokenizer = config, backbone, tokenizer
        self.dimensions = (1,)
        if backbone.config.pad_token_id is None:  # by which a decoder tells a text's last token
            backbone.config.pad_token_id = tokenizer.pad_id
        for name, parameter in backbone.named_parameters():
            if _is_head(backbone, name) and ".base_layer." not in name:
                parameter.requires_grad_(True)  # adapters freeze all that has none

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Score a collated micro-batch: (B, 1) float32, before any sigmoid, in the place of
        embeddings, so that GradCache carries their gradient.
        """
        inputs = ("input_ids", "attention_mask", "token_type_ids")
        found = self.backbone(**{name: batch[name] for name in inputs if name in batch})
        return EmbedOutput(found.logits.float())

    def backbone_parameter(self, name: str) -> bool:
        """Whether the parameter belongs to the pretrained encoder, not to the layers that score."""
        return not _is_head(self.backbone, name.removeprefix("backbone."))

    @torch.inference_mode()
    def check_passes(self, what: str) -> None:
        """Check that the model gives a short pair a finite score.

        Raises:
            ArtifactError: it does not.
        """
        tokens = self.tokenizer.of_pairs([("what is Paris", "the capital of France")])
        batch = {n: value.to(self.device) for n, value in self.tokenizer.collate(tokens).items()}
        score = self(batch).embeddings
        if not score.isfinite().all():
            raise ArtifactError(
                f"{what}: the score of a short pair is {score.item()}, so the weights are of no "
                "use; train with a lower learning rate"
            )

    def write_files(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Write the model in the format of transformers, which sentence-transformers reads as a
        cross-encoder.
        """
        super().write_files(folder, instructions=instructions)
        # A folder without these is one of transformers' classifiers; with them it would be taken
        # for an embedding model.
        for name in ("modules.json", "config_sentence_transformers.json"):
            (folder / name).unlink()
        # As a bi-encoder has it: a CPU without bfloat16 units would emulate them.
        write_json(folder / "config.json", read_json(folder / "config.json") | {"dtype": "float32"})


class CrossEncoderArchitecture(Architecture):
    """From settings to the cross-encoder, and to its files."""

    objective = "rayembed_extras.reranking.objective:LISTS"

    def load_part(self, config: CrossEncoderConfig, name: str, folder: Path) -> Any:
        """Load the encoder with the layers that score; these start from random weights where the
        folder has none, which a warning says.
        """
        return load_scorer(folder, config.backbone)

    def empty_part(self, config: CrossEncoderConfig, name: str, folder: Path) -> Any:
        """Build the encoder with the layers that score on the meta device."""
        import transformers

        settings = _settings(folder, config.backbone)
        with torch.device("meta"):
            return transformers.AutoModelForSequenceClassification.from_config(
                settings, attn_implementation="sdpa", trust_remote_code=False
            )

    def tokenizer(self, config: CrossEncoderConfig, folders: Folders) -> PairTokenizer:
        """Make the tokenizer of pairs.

        Raises:
            ArtifactError: it has no template of two texts.
        """
        return PairTokenizer(pretrained_tokenizer(folders["backbone"]), config)

    def assemble(
        self, config: CrossEncoderConfig, parts: Parts, head: nn.Module, tokenizer: PromptTokenizer
    ) -> CrossEncoderModel:
        """Build the model around its encoder."""
        assert isinstance(tokenizer, PairTokenizer)
        return CrossEncoderModel(config, parts["backbone"], tokenizer)

    def published(self, folder: Path) -> Published | None:
        """Read a reranker in the format of transformers, such as bge-reranker; None for others."""
        if (folder / SETTINGS_FILE).is_file() or not _is_scorer(folder):
            return None
        settings = check_backbone(folder)
        length = _length(folder, settings)
        config = CrossEncoderConfig(
            backbone=BackboneConfig(path=str(folder), dtype=stated_dtype(folder)),
            document_max_length=length,
        )
        return Published(
            config,
            folder,
            width=lambda: 1,
            load=partial(self._load, config),
            check=lambda: self.empty_part(config, "backbone", folder),
        )

    def _load(self, config: CrossEncoderConfig, dtype: Dtype) -> CrossEncoderModel:
        folder = Path(config.backbone.path)
        backbone = config.backbone.model_copy(update={"dtype": dtype})
        config = config.model_copy(update={"backbone": backbone})
        model = load_scorer(folder, backbone, is_trained=True)
        tokenizer = self.tokenizer(config, {"backbone": folder})
        return CrossEncoderModel(config, model, tokenizer).eval()

    def write_sentence_files(self, model: CrossEncoderModel, folder: Path) -> list[ModuleEntry]:
        """Return no modules: sentence-transformers reads the format of transformers."""
        return []


def load_scorer(folder: Path, config: BackboneConfig, *, is_trained: bool = False) -> Any:
    """Load a model of transformers that gives a text one score, in the config's dtype.

    Layers that score and are missing start from random numbers, drawn from the global CPU
    generator, whose state stays as it was.

    Args:
        is_trained: whether such layers are refused, because the model is not trained next.

    Raises:
        ArtifactError: no such model, damaged, or weights missing.
        ConfigError: a classifier of several labels, or a dropout that the family does not have.
    """
    import transformers

    settings = _settings(folder, config)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            without_loading_report(),  # the missing layers are told of below
            no_pickled_objects(folder),
        ):
            model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
                str(folder),
                config=settings,
                trust_remote_code=False,
                dtype=torch_dtype(config.dtype),
                attn_implementation="sdpa",
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"cannot load the model in {str(folder)!r}: {error}") from error
    lacking = sorted(report["missing_keys"])
    fresh = [] if is_trained else [name for name in lacking if _is_head(model, name)]
    if missing := [name for name in lacking if name not in fresh]:
        raise ArtifactError(
            f"the model in {str(folder)!r} lacks {len(missing)} weights, such as {missing[0]!r}; "
            "copy or download it again"
        )
    if fresh:
        logger.warning(
            "the model in %s has no trained layers that score pairs, so these start from random "
            "weights: %s",
            *(folder, ", ".join(fresh)),
        )
    return finish_backbone(model, mask="own").requires_grad_(True)


def _is_head(model: Any, name: str) -> bool:
    """Whether a weight belongs to the layers that score: those behind the encoder, and its pooler,
    which some families have and no embedding needs.
    """
    body = f"{model.base_model_prefix}."
    return not name.startswith(body) or name.startswith(f"{body}pooler.")


def _settings(folder: Path, config: BackboneConfig) -> Any:
    """Read the configuration of transformers, set to one score and the config's dropout."""
    settings = check_backbone(folder)
    names = [str(name) for name in settings.architectures or ()]
    if settings.num_labels != 1 and any(name.endswith(_CLASS) for name in names):
        raise ConfigError(
            f"model.backbone.path: the model in {str(folder)!r} is a classifier of "
            f"{settings.num_labels} labels, but a reranker gives one score; name a reranker, or "
            "the encoder that the classifier was made from"
        )
    settings.num_labels = 1
    set_dropout(settings, config)
    if config.rope is not None:
        set_rope(settings, config.rope)
    for name in _HEAD_DROPOUT:
        if getattr(settings, name, None) is not None:
            setattr(settings, name, config.hidden_dropout)
    if config.num_layers is not None:
        cut_layers(settings, config.num_layers)
    settings.use_cache = False
    return settings


def _is_scorer(folder: Path) -> bool:
    """Whether config.json describes a model of transformers that gives a text one score."""
    if not (folder / "config.json").is_file():
        return False
    stated = read_json(folder / "config.json")
    names = [str(name) for name in stated.get("architectures") or ()]
    labels = stated.get("num_labels", len(stated.get("id2label") or {"0": "", "1": ""}))
    return labels == 1 and any(name.endswith(_CLASS) for name in names)


def _length(folder: Path, settings: Any) -> int:
    """Maximum tokens of a pair: the tokenizer's, at most as many as the model has positions."""
    import transformers

    path = folder / "tokenizer_config.json"
    stated = read_json(path).get("model_max_length") if path.is_file() else None
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(settings, trust_remote_code=False)
    limits = (stated, num_positions(model), settings.max_position_embeddings)
    return min(int(n) for n in limits if isinstance(n, int | float) and 0 < n < _UNLIMITED)


CROSS_ENCODER = CrossEncoderArchitecture()
