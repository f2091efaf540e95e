"""GGUF: a tiny Llama written with the gguf package, converted and loaded by transformers."""

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast
from transformers import LlamaConfig as Config

from rayembed.assets.resolver import resolve_model, set_special_tokens
from rayembed.errors import AssetError
from rayembed.recipes.sample import SMOLLM2

D, HEADS, MLP, LAYERS = 32, 2, 64, 1
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *[chr(code) for code in range(ord("a"), ord("z") + 1)], "Ġ", "ab", "Ġa"]


@pytest.fixture
def written(tmp_path):
    """A GGUF file with fp32 norms and Q8_0 matrices; its tensors as they were before."""
    generator = np.random.default_rng(0)
    path = tmp_path / "tiny.Q8_0.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(D // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    tensors = {
        "token_embd.weight": (len(TOKENS), D),
        "output_norm.weight": (D,),
        "blk.0.attn_norm.weight": (D,),
        "blk.0.ffn_norm.weight": (D,),
        "blk.0.attn_q.weight": (D, D),
        "blk.0.attn_k.weight": (D, D),
        "blk.0.attn_v.weight": (D, D),
        "blk.0.attn_output.weight": (D, D),
        "blk.0.ffn_gate.weight": (MLP, D),
        "blk.0.ffn_up.weight": (MLP, D),
        "blk.0.ffn_down.weight": (D, MLP),
    }
    values = {}
    for name, shape in tensors.items():
        values[name] = generator.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values[name])
            continue
        quantised = gguf.quants.quantize(values[name], gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        values[name] = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, values


def test_a_gguf_is_converted_once_to_the_numbers_that_it_holds(written, tmp_path):
    path, values = written
    folder = resolve_model(str(path), cache=tmp_path / "cache")
    model = AutoModel.from_pretrained(folder)
    state = model.state_dict()
    # Every number is the dequantised one: nothing was rounded to 16 bits on the way.
    for ours, theirs in {
        "embed_tokens.weight": "token_embd.weight",
        "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "norm.weight": "output_norm.weight",
    }.items():
        assert state[ours].dtype == torch.float32
        np.testing.assert_array_equal(state[ours].numpy(), values[theirs])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token_id is not None
    assert tokenizer.padding_side == "right"
    assert tokenizer("ab a", add_special_tokens=False)["input_ids"] == [30, 31]
    weights = folder / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert resolve_model(str(path), cache=tmp_path / "cache") == folder
    assert weights.stat().st_mtime_ns == made


def test_a_cut_gguf_is_refused_and_leaves_nothing(written, tmp_path):
    path, _ = written
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(AssetError, match="cannot convert the GGUF file"):
        resolve_model(str(path), cache=tmp_path / "cache")
    left = [p for p in (tmp_path / "cache" / "gguf").iterdir() if not p.name.endswith(".lock")]
    assert left == []


def _tokenizer(**special):
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, "a"])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    return PreTrainedTokenizerFast(tokenizer_object=plain, padding_side="left", **special)


def test_special_tokens_come_from_the_configuration():
    # What transformers makes of SmolLM2's GGUF: <|im_start|> at both ends.
    tokenizer = _tokenizer(bos_token=SPECIAL[1], eos_token=SPECIAL[1])
    set_special_tokens(tokenizer, Config(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=None))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.padding_side == "right"


def test_special_tokens_of_the_tokenizer_stay_where_the_configuration_has_none():
    tokenizer = _tokenizer(eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    set_special_tokens(tokenizer, Config(bos_token_id=None, eos_token_id=None, pad_token_id=None))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, 2, 0)


def test_special_tokens_that_do_not_exist():
    with pytest.raises(AssetError, match=r"eos_token_id is 99, .* ids 0 to 3"):
        set_special_tokens(_tokenizer(), Config(bos_token_id=None, eos_token_id=99))
    with pytest.raises(AssetError, match="neither a padding nor"):
        set_special_tokens(_tokenizer(), Config(bos_token_id=None, eos_token_id=None))


@pytest.mark.assets
def test_smollm2():
    folder = resolve_model(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.eos_token == "<|im_end|>"
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
