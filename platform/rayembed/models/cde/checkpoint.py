"""Read the published checkpoints jxm/cde-small-v1 and v2, and read or write a model's context
vectors.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayembed.config.backbone import BackboneConfig, Dtype
from rayembed.errors import ArtifactError
from rayembed.models.cde.config import CDEConfig, FirstStageConfig
from rayembed.models.cde.layers import ContextLayers
from rayembed.models.cde.model import CDE
from rayembed.models.cde.tokens import make_tokenizer
from rayembed.models.loading.backbones import finish_backbone, torch_dtype
from rayembed.models.loading.files import load_weights, read_header, read_json

CORPUS_FILE = "corpus.safetensors"
"""File of a corpus's context vectors in a saved model's folder."""
_CORPUS = "context"

_WEIGHTS = "model.safetensors"
_FIRST, _SECOND = "first_stage_model.embedder.", "second_stage_model.backbone."
_FIRST_MLP = "first_stage_model.mlp."
_PROMPTS = "second_stage_model.prompt_projection."
_OUTPUT = "second_stage_model.output_projection."
_NULL = "second_stage_model.sequence_dropout_null_embedding"
_LAYER = re.compile(r"\blayers\.(\d+)\.")

_NOMIC_NAMES = (
    ("encoder.layers.", "layers."),
    ("emb_ln.", "embeddings.LayerNorm."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".norm1.", ".post_attention_layernorm."),
    (".norm2.", ".post_mlp_layernorm."),
    (".mlp.fc11.", ".mlp.up_proj."),
    (".mlp.fc12.", ".mlp.gate_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
)
_HEAD_WIDTH = 64
"""Head width of NomicBERT and ModernBERT in their published sizes; weights do not reveal it."""
_SETTINGS = (
    "local_attention",
    "global_attn_every_n_layers",
    *(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")),
)
"""Settings in config.json that shapes do not reveal; defaults are those of the published sizes."""


Shapes = Mapping[str, Sequence[int]]
"""Weight name → shape."""


def is_published_cde(folder: Path) -> bool:
    """Whether the folder holds weights of both encoders under their published names."""
    if not (folder / _WEIGHTS).is_file():
        return False
    try:
        names = read_header(folder / _WEIGHTS)
    except ArtifactError:
        return False  # whoever reads it as something else tells what is broken
    return all(any(name.startswith(prefix) for name in names) for prefix in (_FIRST, _SECOND))


def load_published_cde(folder: Path, *, dtype: Dtype | None = None) -> CDE:
    """Load the published model from a local copy of its repository, in evaluation mode.

    Version 1 has NomicBERT in both stages, version 2 ModernBERT; this decides what weights and
    `config.json` do not tell: v2 has a residual at its output, positions of the context, a norm
    applied twice and leaves the prefix out of the mean.

    Raises:
        ArtifactError: files are missing, or weights have other names or shapes.
    """
    weights = load_weights(folder / _WEIGHTS)
    stated = _stated(folder)
    config = published_cde_config(folder, dtype=dtype or "float32")
    backbone = _stage(_part(weights, _SECOND), stated, folder)
    encoder = _stage(_part(weights, _FIRST), stated, folder)
    layers = ContextLayers(config, encoder.config.hidden_size, backbone.config.hidden_size)
    _load(layers, _layers(weights, backbone), folder)
    tokenizer = make_tokenizer(config, {"backbone": folder})
    model = CDE(config, backbone, encoder, layers, tokenizer)
    return model.to(torch_dtype(config.backbone.dtype)).eval()


def _stated(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def published_cde_config(folder: Path, *, dtype: Dtype = "float32") -> CDEConfig:
    """Read the settings of a published model, without its weights.

    Raises:
        ArtifactError: files are damaged, or weights have other names.
    """
    shapes = _shapes(folder)
    stated = _stated(folder)
    second = f"{_SECOND}embeddings.tok_embeddings.weight" in shapes
    prompts = shapes.get(f"{_PROMPTS}2.bias")
    width = published_cde_width(folder)
    length = int(stated.get("max_seq_length") or 512)
    return CDEConfig(
        backbone=BackboneConfig(path=str(folder), dtype=dtype),
        encoder=FirstStageConfig(path=str(folder)),
        num_context=int(stated.get("transductive_corpus_size") or 512),
        sequence_dropout=float(stated.get("transductive_sequence_dropout_prob") or 0.0),
        num_soft_prompts=0 if prompts is None else prompts[0] // width,
        output="residual" if second else "mlp",
        context_positions="counted" if second else "none",
        pool_context=not stated.get("pool_ignore_contextual_tokens", True),
        pool_instruction=not stated.get("pool_ignore_instruction_tokens", second),
        normalize_twice=second,
        query_max_length=length,
        document_max_length=length,
    )


def published_cde_width(folder: Path) -> int:
    """Read the vector width of a published model from the shapes of its weights.

    Raises:
        ArtifactError: there is no MLP at the output, which both releases have.
    """
    shape = _shapes(folder).get(f"{_OUTPUT}2.bias")
    if shape is None:
        raise ArtifactError(
            f"the weights in {str(folder)!r} are not those of CDE: {_OUTPUT}2.bias is missing"
        )
    return int(shape[0])


def _shapes(folder: Path) -> Shapes:
    return {name: tensor["shape"] for name, tensor in read_header(folder / _WEIGHTS).items()}


def _part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)}


def _stage(weights: dict[str, Tensor], stated: dict[str, Any], folder: Path) -> Any:
    """Build one encoder without weights, in the size of its published weights."""
    import transformers

    modern = "embeddings.tok_embeddings.weight" in weights
    state = weights if modern else _nomic_state(weights)
    words = state[f"embeddings.{'tok' if modern else 'word'}_embeddings.weight"]
    sizes = {key: stated[key] for key in _SETTINGS if modern and key in stated}
    heads = stated.get("num_attention_heads") or words.shape[1] // _HEAD_WIDTH
    sizes |= {
        "vocab_size": words.shape[0],
        "hidden_size": words.shape[1],
        "num_attention_heads": heads,
        "num_hidden_layers": 1 + max(int(m[1]) for n in state if (m := _LAYER.search(n))),
    }
    if modern:
        sizes["intermediate_size"] = state["layers.0.mlp.Wo.weight"].shape[1]
        model: Any = transformers.ModernBertModel(transformers.ModernBertConfig(**sizes))
    else:
        sizes["intermediate_size"] = state["layers.0.mlp.up_proj.weight"].shape[0]
        types = state["embeddings.token_type_embeddings.weight"]
        sizes["type_vocab_size"] = types.shape[0]
        model = transformers.NomicBertModel(transformers.NomicBertConfig(**sizes))
    model.config._attn_implementation = "sdpa"
    _load(model, state, folder)
    return finish_backbone(model, mask="own")


def _nomic_state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to the names in transformers' NomicBERT; Wqkv is split into three matrices."""
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        found = name
        for theirs, ours in _NOMIC_NAMES:
            found = found.replace(theirs, ours)
        if ".attn.Wqkv." in found:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                state[found.replace(".attn.Wqkv.", f".self_attn.{letter}_proj.")] = part.clone()
        else:
            state[found] = value
    return state


def _layers(weights: dict[str, Tensor], backbone: Any) -> dict[str, Tensor]:
    """Rename the weights around the two encoders to the names in `ContextLayers`.

    transformers' NomicBERT adds its token type's vector to all that it reads, the released code to
    text alone. So that vector is taken off what makes context and soft prompts.
    """
    state = {f"first.{n}": v for n, v in _part(weights, _FIRST_MLP).items()}
    state |= {f"prompts.{n}": v for n, v in _part(weights, _PROMPTS).items()}
    state |= {f"output.{n}": v for n, v in _part(weights, _OUTPUT).items()}
    width = backbone.config.hidden_size
    # Trained without sequence dropout a model has no null token.
    state["null"] = weights.get(_NULL, torch.zeros(width))
    types = getattr(backbone.embeddings, "token_type_embeddings", None)
    if types is not None:
        vector = types.weight[0].detach()
        state["null"] = state["null"] - vector
        state["first.2.bias"] = state["first.2.bias"] - vector
        if "prompts.2.bias" in state:
            repeats = len(state["prompts.2.bias"]) // width
            state["prompts.2.bias"] = state["prompts.2.bias"] - vector.repeat(repeats)
    return state


def _load(module: torch.nn.Module, state: dict[str, Tensor], folder: Path) -> None:
    """Load weights into a module; raise if any is missing or unexpected."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ArtifactError(
            f"the weights in {str(folder)!r} are not those of CDE: {error}"
        ) from error


def save_corpus(vectors: Tensor, folder: Path) -> None:
    """Write (n, h) context vectors into a model's folder, as float32."""
    import safetensors.torch

    safetensors.torch.save_file({_CORPUS: vectors.float().cpu().contiguous()}, folder / CORPUS_FILE)


def load_corpus(folder: Path) -> Tensor | None:
    """Read the (n, h) float32 context vectors in a model's folder; None if it has none.

    Raises:
        ArtifactError: the file is damaged.
    """
    path = folder / CORPUS_FILE
    if not path.is_file():
        return None
    if (vectors := load_weights(path).get(_CORPUS)) is None:
        raise ArtifactError(f"{str(path)!r} contains no context vectors; set the corpus again")
    return vectors
