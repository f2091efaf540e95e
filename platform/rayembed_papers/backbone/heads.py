"""Models with a task head: transformers' own classes, or a NomicBert with heads defined
here.

B rows, C choices, T tokens, H hidden size, L labels.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayembed.assets.sentence_modules import no_pickled_objects
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.backbones import check_backbone, num_positions
from rayembed.models.loading.files import read_json
from rayembed.models.loading.saved_folder import part_folder
from rayembed.models.loading.sentence_folder import read_modules
from rayembed.models.nomic_moe.checkpoint import load_encoder_weights
from rayembed.models.nomic_moe.encoder import NomicEncoder
from rayembed.models.nomic_moe.shape import is_nomic_layout, read_shape
from rayembed_papers.backbone.tasks import Finetuning, Kind

HEAD_FILE = "head.safetensors"
"""File of a NomicBert's head next to its encoder."""

IGNORED = -100
"""Label of tokens that are excluded from loss and scores."""

_AUTO_CLASSES: Mapping[Kind, str] = {
    "classes": "AutoModelForSequenceClassification",
    "score": "AutoModelForSequenceClassification",
    "choices": "AutoModelForMultipleChoice",
    "tags": "AutoModelForTokenClassification",
    "spans": "AutoModelForQuestionAnswering",
    "retrieval": "AutoModel",
}

Family = Literal["transformers", "nomic"]


def encoder_folder(folder: Path) -> Path:
    """Find the folder with config.json and the encoder's weights within a model's folder."""
    if not (folder / "config.json").is_file() and (folder / "modules.json").is_file():
        return read_modules(folder).transformer
    return part_folder(folder, "backbone")


def family_of(folder: Path) -> Family:
    """Return the implementation for the encoder of a folder: `nomic` or `transformers`.

    Raises:
        ArtifactError: neither a model that transformers knows nor a NomicBert with GELU.
    """
    settings = read_json(folder / "config.json")
    if is_nomic_layout(settings):
        read_shape(folder)
        return "nomic"
    check_backbone(folder)
    return "transformers"


def check_length(folder: Path, max_length: int, task: str) -> None:
    """Check that the encoder can read inputs of `max_length` tokens.

    Raises:
        ConfigError: it has learnt too few positions.
        ArtifactError: as `family_of`.
    """
    if family_of(folder) == "nomic":
        return  # rotary positions have no end
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModel.from_config(check_backbone(folder), trust_remote_code=False)
    positions = num_positions(model)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"{task} reads {max_length} tokens of an input, but the backbone in {str(folder)!r} "
            f"has only {positions} positions; set protocol.max_length={positions} or less"
        )


def check_heads(folder: Path, finetunings: Sequence[Finetuning]) -> None:
    """Check that the encoder's library has every needed head and that the folder has all encoder
    weights.

    Of safetensors files only names and shapes are read, so that it takes hardly any memory.

    Raises:
        ArtifactError: the encoder lacks weights, has some of other shapes, or they are damaged.
        ConfigError: a finetuning whose head the family does not have.
    """
    if family_of(folder) == "nomic":
        load_encoder_weights(folder)  # all heads are ours
        return
    _check_family(check_backbone(folder), finetunings)
    with _quiet():
        for one in {one.kind: one for one in finetunings}.values():
            _load_of_transformers(folder, one, device_map="meta")


def load_with_head(folder: Path, finetuning: Finetuning, *, head_dropout: float) -> nn.Module:
    """Load the model of a folder with the finetuning's head, in float32, on the CPU.

    Weights of a head that the folder has are taken where their shapes fit; others are drawn from
    the global generator.

    Args:
        head_dropout: before the classifier of a NomicBert.

    Raises:
        ArtifactError: the encoder lacks weights, or they are damaged.
        ConfigError: the family has no such head.
    """
    if family_of(folder) == "transformers":
        model = _load_of_transformers(folder, finetuning)
    else:
        encoder = load_encoder_weights(folder).float()
        model = NomicForTask(encoder, finetuning.kind, finetuning.num_labels, head_dropout)
        model.load_head(folder)
    return Retriever(model) if finetuning.kind == "retrieval" else model


def save_with_head(model: nn.Module, folder: Path) -> None:
    """Save a model so that `load_with_head` can read it, for the same kind of task or for
    another.
    """
    inner = model.encoder if isinstance(model, Retriever) else model
    if isinstance(inner, NomicForTask):
        inner.save(folder)
    else:
        inner.save_pretrained(folder)  # type: ignore[operator] # of transformers


def _check_family(settings: Any, finetunings: Sequence[Finetuning]) -> None:
    """Check that transformers has a class with each finetuning's head for these settings."""
    import transformers

    lacking = {
        one.name: _AUTO_CLASSES[one.kind]
        for one in finetunings
        if type(settings) not in getattr(transformers, _AUTO_CLASSES[one.kind])._model_mapping
    }
    if lacking:
        classes = ", ".join(sorted(set(lacking.values())))
        raise ConfigError(
            f"models of the type {settings.model_type!r} have no head for {', '.join(lacking)} "
            f"({classes} of transformers); leave out the tasks that need such a head, listed by "
            "--dry-run"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and its messages about newly initialised head weights."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load_of_transformers(
    folder: Path, finetuning: Finetuning, device_map: str | None = None
) -> nn.Module:
    """Load a model with transformers, or only its shapes on the `meta` device; raises the same
    errors as `load_with_head`.
    """
    import safetensors
    import transformers

    kind = finetuning.kind
    settings = check_backbone(folder)
    if kind != "retrieval":
        settings.num_labels = finetuning.num_labels
    if kind in ("classes", "score"):
        regression = kind == "score"
        settings.problem_type = "regression" if regression else "single_label_classification"
    _check_family(settings, [finetuning])
    auto = getattr(transformers, _AUTO_CLASSES[kind])
    try:
        with no_pickled_objects(folder):
            model, report = auto.from_pretrained(
                str(folder),
                config=settings,
                dtype=torch.float32,
                device_map=device_map,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"cannot load the model in {str(folder)!r}: {error}") from error
    lacking = _of_encoder(model, report["missing_keys"])
    misshapen = _of_encoder(model, [entry[0] for entry in report["mismatched_keys"]])
    if lacking or misshapen:
        raise ArtifactError(
            f"the encoder in {str(folder)!r} does not fit its settings: it lacks {len(lacking)} "
            f"weights, such as {lacking[:3]}, and has {len(misshapen)} weights of other shapes, "
            f"such as {misshapen[:3]}"
        )
    loaded: nn.Module = model
    return loaded


def _of_encoder(model: Any, names: Any) -> list[str]:
    """Select the names of the encoder's weights, without head and pooler."""
    prefix = f"{model.base_model_prefix}."
    whole = model.base_model is model
    plain = [name.removeprefix(prefix) for name in names if whole or name.startswith(prefix)]
    return sorted(name for name in plain if not name.startswith("pooler."))


class NomicForTask(nn.Module):
    """A NomicBert, dense or with experts, with a task head.

    Heads are those of RoBERTa in transformers: of texts, dropout, a layer with tanh and dropout
    over the first token before the last layer (as the published pooler has it); of tokens, dropout
    and one layer. Experts have no balance loss here, as in the released finetuning.
    """

    def __init__(
        self, encoder: NomicEncoder, kind: Kind, num_labels: int, head_dropout: float
    ) -> None:
        super().__init__()
        self.kind = kind
        self.encoder = encoder
        width = encoder.config.hidden_size
        self.head: nn.Module = nn.Identity()
        if kind in ("tags", "spans"):
            self.head = nn.Sequential(nn.Dropout(head_dropout), nn.Linear(width, num_labels))
        elif kind != "retrieval":
            self.head = nn.Sequential(
                nn.Dropout(head_dropout),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Dropout(head_dropout),
                nn.Linear(width, num_labels),
            )
        for layer in self.head.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return outputs under the names that transformers' classes use, and the loss if labels are
        given.

        `logits` (B, L), of choices (B, C), of tags (B, T, L); `start_logits` and `end_logits`
        (B, T); of retrieval `last_hidden_state` (B, T, H).
        """
        shape = input_ids.shape
        flat = input_ids.flatten(0, -2), attention_mask.flatten(0, -2)
        hidden = self.encoder(*flat).last_hidden_state
        if self.kind == "retrieval":
            return {"last_hidden_state": hidden}
        if self.kind == "spans":
            start, end = self.head(hidden).unbind(-1)
            found = {"start_logits": start, "end_logits": end}
            if start_positions is None or end_positions is None:
                return found
            loss = functional.cross_entropy(start.float(), start_positions)
            loss = loss + functional.cross_entropy(end.float(), end_positions)
            return {"loss": loss / 2, **found}
        logits = self.head(hidden if self.kind == "tags" else hidden[:, 0])
        if self.kind == "choices":
            logits = logits.view(shape[:2])
        if labels is None:
            return {"logits": logits}
        return {"loss": self._loss(logits.float(), labels), "logits": logits}

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.kind == "score":
            return functional.mse_loss(logits.squeeze(-1), labels)
        flat = logits.flatten(0, -2), labels.flatten()
        return functional.cross_entropy(*flat, ignore_index=IGNORED)

    def save(self, folder: Path) -> None:
        """Save the encoder in its published layout and the head next to it."""
        import safetensors.torch

        self.encoder.save_pretrained(str(folder))
        weights = self.head.state_dict()
        if weights:
            safetensors.torch.save_file(weights, folder / HEAD_FILE)

    def load_head(self, folder: Path) -> None:
        """Load the weights of a saved head whose shapes fit, as transformers does."""
        import safetensors.torch

        if not (folder / HEAD_FILE).is_file():
            return
        own = self.head.state_dict()
        saved = safetensors.torch.load_file(folder / HEAD_FILE)
        fitting = {n: v for n, v in saved.items() if n in own and own[n].shape == v.shape}
        self.head.load_state_dict({**own, **fitting})


class Retriever(nn.Module):
    """Embeds queries and documents as unit vectors from the states of their first tokens."""

    SCALE = 20.0
    """Factor of cosines in the loss: temperature 0.05, as in the paper's pipeline."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, query: dict[str, Tensor], document: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return `vectors` (B, H) of the queries, and with documents also the loss; each other
        document of the batch is a negative.
        """
        vectors = self._embed(query)
        if document is None:
            return {"vectors": vectors}
        scores = self.SCALE * vectors @ self._embed(document).T
        right = torch.arange(len(scores), device=scores.device)
        return {"loss": functional.cross_entropy(scores, right), "vectors": vectors}

    def _embed(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.encoder(**batch)["last_hidden_state"]
        return functional.normalize(states[:, 0].float(), dim=-1)
