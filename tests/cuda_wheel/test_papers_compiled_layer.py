"""A layer of a 7B model with LoRA, compiled for GPUs that are not there."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fake_compiler import Kernel, kernels_of
from fake_cuda import GPU, fake_gpu, faked, to_gpu
from transformers import MistralConfig, MistralModel

from rayembed.config.settings import changed
from rayembed.models.adapters.lora import add_lora
from rayembed.models.attention import short_texts as attention
from rayembed.models.attention.packed import Packed, pack
from rayembed.models.layers import compile_layers
from rayembed_papers.mixtures.nvembed import nvembed_v2_public

TOKENS, LENGTH = 4096, 256


def mistral() -> MistralModel:
    """Mistral-7B's first layer with the adapters of NV-Embed, in bfloat16 on the meta device."""
    config = MistralConfig(vocab_size=8, num_hidden_layers=1, sliding_window=None)
    with torch.device("meta"):
        model = MistralModel(config)
        add_lora(model, changed(nvembed_v2_public().model.lora, dropout=0.1), setting="lora")
    attention.use_products(model)
    return model.to(torch.bfloat16).train()


@pytest.fixture(params=[(9, 0), (8, 0)], ids=["sm_90", "sm_80"])
def kernels(request) -> Iterator[tuple[str, list[Kernel]]]:
    """Name of the architecture, and the kernels of the layer's forward and backward pass."""
    model = mistral()
    compile_layers([model])
    entries = pack([np.zeros(LENGTH)] * (TOKENS // LENGTH))
    with fake_gpu(request.param) as mode:
        to_gpu(model)
        entries = {name: value.to(GPU) for name, value in faked(mode, entries).items()}
        packed, places = Packed.of(entries), entries["position_ids"][None]
        shape = (1, TOKENS, model.config.hidden_size)
        states = torch.empty(shape, dtype=torch.bfloat16, device=GPU, requires_grad=True)

        def call():
            return model.layers[0](
                states,
                attention_mask=places.new_empty(1, 1, 0, 0, dtype=torch.bool),
                position_ids=places,
                position_embeddings=model.rotary_emb(states.detach(), places),
                **packed.for_attention(),
            )

        yield request.node.callspec.id, kernels_of(call, request.param)


def test_all_kernels_build_and_none_spills(kernels, capsys) -> None:
    architecture, found = kernels
    lines = [f"{k.registers:9} {k.spilled:7} {k.shared:6}  {k.name}" for k in found]
    with capsys.disabled():
        sys.stdout.write("\n".join(["", f"{architecture}: registers spilled shared", *lines, ""]))
    assert {one.architecture for one in found} == {architecture}
    assert {one.name: one.spilled for one in found if one.spilled} == {}
    assert len(found) <= 16, "of some sixty element-wise kernels of the layer as it is"
