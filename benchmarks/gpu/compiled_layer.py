"""Bytes a token that a decoder layer keeps for its backward pass, as it is and compiled.

The layer is Mistral-7B's with LoRA as NV-Embed trains it, in bfloat16 on packed tokens, or a
narrower one of the same ratios. Layers are compiled as training does (`layers.compile_layers`).
What a compiled layer keeps is decided before code is made for a device: torch traces forward and
backward pass into one graph and cuts it where the least must be kept, computing element-wise work
again. By default only that cut is made and its two graphs run as they are, which needs no compiler;
`--backend inductor` is what training takes. Attention is a kernel that saves its inputs, its output
and a number a query, as a GPU's does; adapters' dropout keeps bits, as on a GPU.

Run: python -m benchmarks.gpu.compiled_layer [--width 4096] [--backend inductor]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.measuring import print_table
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

WIDTH, INNER, HEADS, KEY_HEADS, RANK = 4096, 14_336, 32, 8, 16
_TOKENS, _LENGTH = 64, 4
"""Tokens of a pass, and of a text. A pass of 16 is cut otherwise at the whole width, and keeps
76 % where one of 64 keeps 64 %, as narrower layers do."""


@dataclass(frozen=True)
class Kept:
    """Bytes a token that one layer keeps."""

    eager: float
    compiled: float
    products: float
    """Compiled, where the layer keeps its products and recomputes the rest."""


def cut_alone(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend of torch.compile that cuts graphs as inductor does, and makes no code."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import config
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    def as_it_is(part: Any, _: Any) -> Any:
        return make_boxed_func(part.forward)

    with config.patch(fallback_random=True):  # as `compile_layers` sets it
        backend = aot_autograd(
            fw_compiler=as_it_is,
            bw_compiler=as_it_is,
            partition_fn=partition_fn,
            decompositions=select_decomp_table(),
        )
        return backend(graph, inputs)


def kept(width: int = WIDTH, backend: Any = cut_alone) -> Kept:
    """Count a layer of this width, eager and compiled.

    Args:
        width: of hidden states, a divisor of Mistral's; all else is narrower in proportion.
    """
    from rayembed.models.adapters import adapted_linear
    from rayembed.models.layers import compile_layers, recompute_layers

    model, keeps_bits = _model(WIDTH // width), adapted_linear.keeps_bits
    adapted_linear.keeps_bits = lambda *_: True
    try:
        eager = _of_token(model)
        torch._dynamo.reset()
        compile_layers([model], backend)
        compiled = _of_token(model)
        recompute_layers([model], 0, 1)
        return Kept(eager, compiled, _of_token(model))
    finally:
        adapted_linear.keeps_bits = keeps_bits


def _model(narrower: int) -> Any:
    """A transformer of one layer, with adapters."""
    from transformers import MistralConfig, MistralModel

    from rayembed.config.settings import changed
    from rayembed.models.adapters.lora import add_lora
    from rayembed.models.attention.short_texts import use_products
    from rayembed_papers.mixtures.nvembed import nvembed_v2_public

    # No narrower heads than half of them: the number a query and head is not in proportion.
    heads = max(HEADS // narrower, 4)
    config = MistralConfig(
        vocab_size=8,
        hidden_size=WIDTH // narrower,
        intermediate_size=INNER // narrower,
        num_attention_heads=heads,
        num_key_value_heads=heads * KEY_HEADS // HEADS,
        num_hidden_layers=1,
        sliding_window=None,
    )
    with torch.device("meta"):
        model = MistralModel(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    lora = nvembed_v2_public().model.lora
    assert lora is not None
    add_lora(model, changed(lora, rank=max(RANK // narrower, 1)), setting="lora")
    use_products(model)
    return model.to(torch.bfloat16).train()


def _of_token(model: Any) -> float:
    """Bytes of a further token: of what a pass keeps once nothing."""
    return (_of_pass(model, 2 * _TOKENS) - _of_pass(model, _TOKENS)) / _TOKENS


def _of_pass(model: Any, tokens: int) -> int:
    """Bytes that the layer's pass keeps. Weights and what all layers share do not count; the input
    does where it is kept, since it is the output of the layer before."""
    from rayembed.models.attention import varlen
    from rayembed.models.attention.packed import Packed, pack
    from rayembed_extras.estimates.model_sizes import kernels_on_meta

    entries = pack([np.zeros(_LENGTH)] * (tokens // _LENGTH))
    packed, places = Packed.of(entries), entries["position_ids"][None]
    assert packed is not None
    width = model.config.hidden_size
    states = torch.zeros(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    shared = {
        "attention_mask": places.new_empty(1, 1, 0, 0, dtype=torch.bool),
        "position_ids": places,
        "position_embeddings": model.rotary_emb(states.detach(), places),
        **packed.for_attention(),
    }
    others = [*model.parameters(), *(x for x in tree_leaves(shared) if isinstance(x, Tensor))]
    known = {x.untyped_storage()._cdata for x in others}
    found: dict[int, Tensor] = {}

    @torch.compiler.disable
    def keep(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    reference = varlen.reference
    varlen.reference = _kernel
    try:
        with kernels_on_meta(), saved_tensors_hooks(keep, lambda tensor: tensor):
            model.layers[0](states, **shared)
    finally:
        varlen.reference = reference
    return sum(x.untyped_storage().nbytes() for key, x in found.items() if key not in known)


def _kernel(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    """(T, H, D) of no particular values, in place of `varlen.reference`, by `kernels_on_meta`."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    attended: Tensor = flash(query, key, value, 0.0, False)[0]
    return attended[0].transpose(0, 1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=WIDTH, help="of hidden states")
    parser.add_argument("--backend", default="", help="of torch.compile; the cut alone without")
    options = parser.parse_args(arguments)
    found = kept(options.width, options.backend or cut_alone)
    cells = [f"{options.width}", f"{found.eager:,.0f}", f"{found.compiled:,.0f}"]
    cells += [f"{found.compiled / found.eager:.4f}", f"{found.products:,.0f}"]
    heads = ["width", "eager, bytes a token", "compiled", "of it", "compiled, products kept"]
    print_table(heads, [cells])


if __name__ == "__main__":
    main()
