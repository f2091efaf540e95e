"""Load pretrained transformers of any family, with their dtype, attention mask and dropout, and
check that weights are complete.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from rayembed.assets.sentence_modules import is_own_format, no_pickled_objects
from rayembed.config.backbone import BackboneConfig, DtypeSetting
from rayembed.config.model import architecture_classes
from rayembed.config.table import load
from rayembed.errors import ArtifactError, ConfigError
from rayembed.machine.hardware import auto_precision
from rayembed.models.attention.short_texts import use_products

logger = logging.getLogger(__name__)

Mask = Literal["bidirectional", "causal", "own"]
"""Attention mask. `own`: the family's default, which for encoders is bidirectional."""

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,  # of weights on their way to another type; no model computes in it
    "float32": torch.float32,
}

_ATTENTION_DROPOUT = (
    "attention_dropout",  # Llama, Mistral, Qwen, Gemma, ModernBERT, DistilBERT
    "attention_probs_dropout_prob",  # BERT, XLM-R, MPNet
    "attn_pdrop",  # GPT-2
)
_HIDDEN_DROPOUT = (
    "hidden_dropout_prob",  # BERT, XLM-R, MPNet
    "hidden_dropout",
    "dropout",  # DistilBERT
    "embedding_dropout",  # ModernBERT
    "mlp_dropout",  # ModernBERT
    "resid_pdrop",  # GPT-2, Phi-3
    "embd_pdrop",  # GPT-2, Phi-3
    "activation_dropout",
)


def torch_dtype(dtype: DtypeSetting | Literal["float16"]) -> torch.dtype:
    """Return torch's dtype for a setting; `auto` is the type that this machine computes fast."""
    return _DTYPES[auto_precision().dtype if dtype == "auto" else dtype]


def load_backbone(folder: Path, config: BackboneConfig, *, mask: Mask) -> Any:
    """Load a pretrained model from a folder, without language-model head, in the config's dtype.

    Attention is SDPA or, in training on CPUs, `attention.attention`; no key-value cache is kept. An
    encoder's own pooler, which no embedding uses, is frozen. The state of the random generators
    stays as it was.

    Raises:
        ArtifactError: no such model, damaged, or weights missing.
        ConfigError: a dropout or a mask that the family does not have.
    """
    import safetensors
    import transformers

    settings = _settings(folder, config, mask)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            without_loading_report(),
            no_pickled_objects(folder),
        ):
            model, report = transformers.AutoModel.from_pretrained(
                str(folder),
                config=settings,
                trust_remote_code=False,
                dtype=torch_dtype(config.dtype),
                attn_implementation="sdpa",
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"cannot load the model in {str(folder)!r}: {error}") from error
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise ArtifactError(
            f"the model in {str(folder)!r} lacks {len(missing)} weights, such as {missing[0]!r}; "
            "copy or download it again"
        )
    _unpack(model)
    return finish_backbone(model, mask=mask)


def _unpack(model: Any) -> None:
    """Unpack quantised weights now; otherwise the first forward pass would do so, possibly in
    several threads at once.
    """
    if getattr(model, "ct_decompress_hook", None) is not None:
        model.hf_quantizer.compressor.decompress_model(model)


def is_quantised(settings: Any) -> bool:
    """Whether a transformers configuration describes weights in compressed-tensors format."""
    stated = getattr(settings, "quantization_config", None)
    method = "quant_method"
    found = stated.get(method) if isinstance(stated, dict) else getattr(stated, method, None)
    return bool(found == "compressed-tensors")


def check_not_quantised(parts: Mapping[str, Any]) -> None:
    """Check that no part has quantised weights, which cannot be trained.

    Raises:
        ConfigError: one has.
    """
    for name, part in parts.items():
        # Once weights are unpacked, their layers alone tell of it.
        packed = is_quantised(part.config)
        if packed or any(hasattr(module, "quantization_scheme") for module in part.modules()):
            raise ConfigError(
                f"the weights of the {name} are quantised: such a model cannot be trained, "
                "compressed or saved again; use the unquantised model that it was made from"
            )


@contextmanager
def without_loading_report() -> Iterator[None]:
    """Suppress transformers' reports of weights that are left out on purpose (heads, cut layers) or
    not covered by tensor parallelism.

    Missing ones are refused here.
    """
    names = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel")
    told = [logging.getLogger(name) for name in names]

    def errors(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    # Not a level: each time one is set, Python empties the caches of all loggers, thousands here.
    for logger in told:
        logger.addFilter(errors)
    try:
        yield
    finally:
        for logger in told:
            logger.removeFilter(errors)


def empty_backbone(folder: Path, config: BackboneConfig, *, mask: Mask) -> Any:
    """Build a folder's model on the meta device, with layers and shapes but without
    weights.

    Raises:
        ArtifactError: no such model.
        ConfigError: a dropout that the family does not have.
    """
    import transformers

    settings = _settings(folder, config, mask)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(
            settings, attn_implementation="sdpa", trust_remote_code=False
        )


_LEARNT_POSITIONS = ("position_embeddings", "wpe", "embed_positions")
"""Names of learnt positions in BERT, GPT-2 and OPT."""


def num_positions(model: Any) -> int | None:
    """Return how many positions the model has learnt; None if they are computed."""
    learnt = _learnt_positions(model)
    if learnt is None:
        return None
    # OPT counts positions from an offset within the layer.
    return learnt.num_embeddings - max(_unused(learnt), int(getattr(learnt, "offset", 0)))


def row_positions(model: Any) -> int | None:
    """Return the number of learnt positions for models whose numbering includes padding at the
    start of a row; None for others.

    None if positions are computed, or counted over a text's own tokens, as RoBERTa and OPT do.
    """
    learnt = _learnt_positions(model)
    counts_tokens = learnt is None or _unused(learnt) > 0 or hasattr(learnt, "offset")
    return None if learnt is None or counts_tokens else learnt.num_embeddings


def first_position(model: Any) -> int:
    """Return the position id of a text's first token; for RoBERTa and XLM-R it follows the padding
    token's id.
    """
    learnt = _learnt_positions(model)
    return 0 if learnt is None else _unused(learnt)


def _learnt_positions(model: Any) -> torch.nn.Embedding | None:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _LEARNT_POSITIONS and isinstance(module, torch.nn.Embedding):
            return module
    return None


def _unused(learnt: torch.nn.Embedding) -> int:
    return 0 if learnt.padding_idx is None else learnt.padding_idx + 1


def _settings(folder: Path, config: BackboneConfig, mask: Mask) -> Any:
    settings = check_backbone(folder)
    set_dropout(settings, config)
    if config.num_layers is not None:
        cut_layers(settings, config.num_layers)
    settings.use_cache = False
    settings.chunk_size_feed_forward = 0  # saves memory, and fails for most lengths of a text
    if mask == "bidirectional":
        remove_causal_mask(settings)
    return settings


def check_for_transformers(folder: Path) -> None:
    """Raise if transformers would compute something else than the model that the folder's
    config.json describes.

    Raises:
        ArtifactError: it is of an architecture's own layout, which transformers would take without
            a word and compute as another model.
    """
    for known in loaded_architectures():
        known.check_for_transformers(folder)


def loaded_architectures() -> Iterator[Any]:
    """Return one instance of each architecture; warn about, and leave out, another package's
    architecture that fails to import.
    """
    for settings in architecture_classes():
        try:
            yield load(settings.architecture)
        except ImportError as error:  # models of other kinds need it not
            if settings.__module__.startswith("rayembed."):
                raise
            logger.warning(
                "skipping %s, which cannot be imported: %s", settings.architecture, error
            )


def check_for_sentence_transformers(folder: Path) -> None:
    """Raise if sentence-transformers would load a part of the folder as another model, since it
    uses transformers.

    Raises:
        ArtifactError: one of them is misread, see `check_for_transformers`.
    """
    if not is_own_format(folder):
        for path in sorted(folder.rglob("config.json")):
            check_for_transformers(path.parent)


def check_backbone(folder: Path) -> Any:
    """Read the transformers configuration of a folder, and check that its model is
    supported.

    Raises:
        ArtifactError: no configuration, an unknown architecture, or an encoder with a decoder.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    check_for_transformers(folder)
    if (folder / "adapter_config.json").is_file():
        raise ArtifactError(
            f"the model in {str(folder)!r} has PEFT adapters (adapter_config.json), which rayembed "
            "does not read; merge them (merge_and_unload in PEFT) and save the whole model"
        )
    try:
        # Unsaid, a terminal would be asked whether to run the folder's own code.
        settings = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ArtifactError(f"no transformers model in {str(folder)!r}: {error}") from error
    if getattr(settings, "is_encoder_decoder", False):
        raise ArtifactError(
            f"the model in {str(folder)!r} (family {settings.model_type!r}) has an encoder and a "
            "decoder, but only models with one of them are supported"
        )
    if is_quantised(settings) and find_spec("compressed_tensors") is None:
        raise ArtifactError(
            f"the model in {str(folder)!r} is quantised, but the package compressed-tensors that "
            "reads it is not installed: in the checkout, pip install '.[compress]'"
        )
    return settings


def finish_backbone(model: Any, *, mask: Mask) -> Any:
    """Set the mask on each attention layer of a loaded model, and verify it by a forward
    pass.

    Raises:
        ConfigError: the family does not attend as `mask` says.
    """
    if mask == "bidirectional":
        # Without padding there is no mask tensor, and SDPA and flash attention go by the layers.
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
    use_products(model)
    pooler = getattr(model, "pooler", None)
    if isinstance(pooler, torch.nn.Module):
        pooler.requires_grad_(False)
    if mask != "own" and model.device.type != "meta":
        found = "bidirectional" if sees_later_tokens(model) else "causal"
        if found != mask:
            raise ConfigError(
                f"model.mask is {mask!r}, but a backbone of the family "
                f"{model.config.model_type!r} always has {found} attention; "
                f"set model.mask={found} or use another backbone"
            )
    return model


def remove_causal_mask(settings: Any) -> None:
    """Change a decoder's configuration in place so that all tokens attend to each other.

    A sliding window would otherwise stay, as a two-sided one. Families whose layers are of
    several types keep them, since Gemma 3 has other rotary frequencies in its sliding layers;
    there the window is opened to the longest text that the model takes.
    """
    settings.is_causal = False
    if getattr(settings, "sliding_window", None) is None:
        return
    by_layer = "sliding_attention" in (getattr(settings, "layer_types", None) or ())
    always = settings.model_type.startswith(("gemma", "t5gemma"))
    settings.sliding_window = settings.max_position_embeddings if by_layer or always else None


def cut_layers(settings: Any, number: int) -> None:
    """Reduce a transformers configuration to the first `number` layers, in place.

    Raises:
        ConfigError: the model has fewer.
    """
    if number > settings.num_hidden_layers:
        raise ConfigError(
            f"model.backbone.num_layers is {number}, but the model has only "
            f"{settings.num_hidden_layers} layers; set num_layers to at most this number, or to "
            "null for all layers"
        )
    settings.num_hidden_layers = number
    # Families whose layers are of several types name the type of each.
    if getattr(settings, "layer_types", None):
        settings.layer_types = settings.layer_types[:number]


def set_dropout(settings: Any, config: BackboneConfig) -> None:
    """Write the dropout settings into a transformers configuration, in place.

    Raises:
        ConfigError: a dropout above zero that the family has no setting for.
    """
    for value, names, setting in (
        (config.attention_dropout, _ATTENTION_DROPOUT, "attention_dropout"),
        (config.hidden_dropout, _HIDDEN_DROPOUT, "hidden_dropout"),
    ):
        present = [name for name in names if hasattr(settings, name)]
        if value > 0 and not present:
            raise ConfigError(
                f"model.backbone.{setting} is {value}, but models of the family "
                f"{settings.model_type!r} have no such dropout; set it to 0"
            )
        for name in present:
            setattr(settings, name, value)


def attention_dropout(settings: Any) -> float:
    """Return the dropout of attention probabilities in a transformers configuration; 0 if it has
    none.
    """
    return max(float(getattr(settings, name, 0.0) or 0.0) for name in _ATTENTION_DROPOUT)


@torch.no_grad()
def sees_later_tokens(model: Any) -> bool:
    """Whether the model attends to later tokens: two forward passes test if the third token changes
    the first one's state.

    Two passes of equal shape are equal to the bit where nothing differs, so no tolerance is
    needed and a difference of any size counts.
    """
    was_training = model.training
    model.eval()
    last = model.config.vocab_size - 1
    first, second = (
        model(input_ids=torch.tensor([[last, last - 1, token]], device=model.device))
        for token in (last - 2, last - 3)
    )
    model.train(was_training)
    return not torch.equal(first.last_hidden_state[:, 0], second.last_hidden_state[:, 0])


def check_bidirectional(setting: str, model: Any, folder: Path) -> None:
    """Raise if an encoder's attention is causal; without weights its layers decide.

    Args:
        setting: that names it, for the message.

    Raises:
        ConfigError: its tokens do not see later ones.
    """
    if model.device.type == "meta":
        causal = any(getattr(module, "is_causal", False) for module in model.modules())
    else:
        causal = not sees_later_tokens(model)
    if causal:
        raise ConfigError(
            f"{setting} {str(folder)!r} is a model of the family {model.config.model_type!r}, "
            "whose attention is causal; use a bidirectional encoder"
        )
