"""Settings of an adaptation: masked-language modelling of an encoder with rotary positions.

The first step of Nomic Embed v2 (arXiv 2502.07972, section 4.1 and Table 2): what it leaves is the
`model.backbone.path` of the next one.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.backbone import BackboneConfig
from rayembed.config.document import NamedRun
from rayembed.config.placement import Placement, check_shares
from rayembed.config.settings import Settings
from rayembed.config.sources import Column, FileSource
from rayembed.config.stage import AnyOptimizer
from rayembed.config.types import FileName, PlainName, Reference, Seed, unique_names

Probability = Annotated[float, Field(ge=0.0, le=1.0)]

_WITHOUT_EFFECT = (
    "expert_parallel",
    "gpu",
    "compile_layers",
    "grad_cache",
    "mirrors",
    "registered_model",
    "validation_cpus",
    "validation_gpus",
    "validations_at_once",
    "validation_minutes",
    "unpadded",
)
"""Placement settings that an adaptation ignores."""


class RotaryEncoderConfig(Settings):
    """Settings of the encoder to adapt, whose positions become rotary."""

    backbone: BackboneConfig
    """BERT, RoBERTa or XLM-R, whose absolute positions are replaced by rotary ones, or a dense
    NomicBert. Where it brings a head for masked-language modelling, training starts from that."""
    rotary_base: PositiveFloat = 10_000.0
    """Base of the rotary positions (Table 2); the released configuration file says 100,000, the
    published model 10,000."""

    @model_validator(mode="after")
    def _without_dropout(self) -> "RotaryEncoderConfig":
        for name in ("attention_dropout", "hidden_dropout"):
            if getattr(self.backbone, name) > 0:
                raise ValueError(f"backbone.{name}: this encoder has no dropout; set it to 0")
        return self


class TextsSource(FileSource):
    """Files with one text in each row; `language` names the column of its language."""

    kind: Literal["texts"] = "texts"
    text: Column = "text"


class TextsConfig(Settings):
    """Settings of one set of texts of the corpus."""

    name: PlainName
    """Name, unique within the corpus; used in folder names."""
    source: TextsSource
    language: str | None = Field(default=None, min_length=1)
    """Language code of all its texts; None: rows state it in `source.language`."""

    @model_validator(mode="after")
    def _one_language(self) -> "TextsConfig":
        column = self.source.language
        if (self.language is None) == (column is None):
            raise ValueError(
                f"texts {self.name!r}: the language is either the same for all texts (language) "
                "or read from each row (source.language, a column); set exactly one of them"
            )
        return self


class CorpusConfig(Settings):
    """Settings of the corpus: texts, how they are cut into token sequences, and how languages are
    sampled.
    """

    root: Reference = ""
    """Base of relative source paths; not part of the run's identity."""
    texts: Annotated[tuple[TextsConfig, ...], unique_names("sets of texts")] = Field(min_length=1)
    max_length: PositiveInt = 2048
    """Tokens of a sequence, special ones included (Table 2)."""
    layout: Literal["packed", "truncated"] = "packed"
    """`packed`: texts of one language stand one after the other, with the tokenizer's end of text
    between them, and are cut into sequences of the full length. `truncated`: a text is a sequence,
    and what exceeds the length is left out."""
    language_alpha: float = Field(default=0.3, gt=0.0, le=1.0)
    """α: a language with n sequences is sampled in proportion to n^α (Table 2, arXiv 1911.02116,
    section 3.1); 1: in proportion to n."""


class MaskingConfig(Settings):
    """Settings that choose the masked tokens and their replacements in masked-language
    modelling.

    Drawn for each step, by seed, step and position in the batch. Table 2 states the probability;
    the shares are those of the collator of transformers that the released code calls, and of BERT.
    """

    probability: float = Field(default=0.3, gt=0.0, lt=1.0)
    """Probability of masking a non-special token."""
    mask_share: Probability = 0.8
    """Share of masked tokens that the tokenizer's mask token replaces."""
    random_share: Probability = 0.1
    """Share of masked tokens that a random word replaces; the rest is unchanged."""

    @model_validator(mode="after")
    def _shares_fit(self) -> "MaskingConfig":
        if self.mask_share + self.random_share > 1.0 + 1e-9:
            raise ValueError(
                f"mask_share {self.mask_share} and random_share {self.random_share} exceed 1 "
                "together; lower one of them"
            )
        return self


class HeldOutWords(Settings):
    """Sequences excluded from training, whose masked words are predicted and scored while training
    runs.

    Their masks are drawn once, by the run's seed, so that scores of all steps are comparable, and
    those of runs that differ in neither these sequences nor this masking.
    """

    batches: PositiveInt = 4
    """Number of held-out batches of `training.global_sequences`, with the language shares of
    training batches."""
    masking: MaskingConfig = MaskingConfig()
    """Masking of held-out sequences, independent of the training's own masking."""
    every_steps: PositiveInt | None = None
    """Steps between two scores; None: only the last step is scored. The last always is."""


class MaskedTraining(Settings):
    """Length, batches and optimiser of masked-language modelling."""

    global_sequences: PositiveInt = 4096
    """Sequences in one step, over all workers and micro-batches."""
    optimizer: AnyOptimizer
    steps: PositiveInt
    checkpoint_every_steps: PositiveInt = 500
    """Steps between checkpoints, from which a killed run resumes; one is always made at the end."""
    held_out: HeldOutWords | None = None
    """None: nothing is held out, and metrics are those of the training's own batches."""

    @property
    def name(self) -> str:
        """Name of the training stage's folder, also used in log lines."""
        return "adapt"

    @property
    def loss(self) -> None:
        """Always None: an adaptation has no configurable loss, it uses cross-entropy of the masked
        words.
        """
        return

    @property
    def global_rows(self) -> int:
        """Number of sequences in a step, over all workers."""
        return self.global_sequences

    @property
    def row_name(self) -> str:
        """Plural noun for training rows in messages: sequences."""
        return "sequences"

    @model_validator(mode="after")
    def _can_learn(self) -> "MaskedTraining":
        try:
            self.optimizer.check_steps(self.steps)
        except ValueError as error:
            raise ValueError(f"optimizer of the adaptation: {error}") from None
        if self.optimizer.loss_learning_rate is not None:
            raise ValueError(
                "optimizer.loss_learning_rate has no effect because the loss of masked words "
                "has no parameters; set it to null"
            )
        return self


class Adaptation(NamedRun):
    """Complete settings of one adaptation."""

    name: FileName
    """Name; a run resubmitted under its name resumes."""
    seed: Seed = 0
    """Seed of a fresh head, the order of sequences and the masks."""
    model: RotaryEncoderConfig
    corpus: CorpusConfig
    masking: MaskingConfig = MaskingConfig()
    training: MaskedTraining
    placement: Placement = Placement()
    """Placement of the adaptation, as for a training run. Micro-batch gradients are accumulated, so
    the batch size is independent of memory; the word probabilities of a micro-batch's masked tokens
    take `micro_batch_tokens` · `masking.probability` · vocabulary size · 4 bytes, twice."""

    @model_validator(mode="after")
    def _workers_share(self) -> "Adaptation":
        workers = self.placement.fewest_workers, self.placement.workers
        check_shares("training.global_sequences", self.training.global_sequences, *workers)
        self.training.optimizer.check_zero_stage(self.placement.zero_stage)
        return self

    @model_validator(mode="after")
    def _placement_counts(self) -> "Adaptation":
        for name in _WITHOUT_EFFECT:
            default = Placement.model_fields[name].default
            if getattr(self.placement, name) != default:
                raise ValueError(
                    f"placement.{name} has no effect on an adaptation; leave it at {default}"
                )
        return self

    @property
    def total_steps(self) -> int:
        """Number of training steps."""
        return self.training.steps

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Name of the adaptation's only training stage."""
        return (self.training.name,)

    def identity(self, write: Callable[[str], str] | None = None) -> dict[str, Any]:
        """Settings that decide the trained weights and are therefore fingerprinted."""
        values = super().identity(write)
        del values["corpus"]["root"], values["training"]["checkpoint_every_steps"]
        if self.training.held_out is None:
            del values["training"]["held_out"]
        else:
            del values["training"]["held_out"]["every_steps"]
        return {"kind": "adaptation", **values}
