"""Configurations of published models, so that recipes can be sized without access to the hub."""

from typing import Any

from rayembed.recipes.sample import MINILM, SMOLLM2

Settings = dict[str, Any]


def _shape(family: str, words: int, width: int, inner: int, layers: int, heads: int) -> Settings:
    return {
        "model_type": family,
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


_MISTRAL_7B = {**_shape("mistral", 32000, 4096, 14336, 32, 32), "num_key_value_heads": 8}
_LLAMA2_7B = {**_shape("llama", 32000, 4096, 11008, 32, 32), "num_key_value_heads": 32}
_SHEARED_LLAMA_1_3B = {**_shape("llama", 32000, 2048, 5504, 24, 16), "num_key_value_heads": 16}
_QWEN2_5_1_5B = {**_shape("qwen2", 151936, 1536, 8960, 28, 12), "num_key_value_heads": 2}
_NOMIC_BERT = _shape("nomic_bert", 30528, 768, 3072, 12, 12)
_SMOLLM2_135M = {**_shape("llama", 49152, 576, 1536, 30, 9), "num_key_value_heads": 3}
_MINILM_L6 = _shape("bert", 30522, 384, 1536, 6, 12)
_BERT_BASE = _shape("bert", 30522, 768, 3072, 12, 12)
_XLM_R_BASE = {
    **_shape("xlm-roberta", 250002, 768, 3072, 12, 12),
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}
_MNOMIC_BERT = {
    "model_type": "nomic_bert",
    "activation_function": "gelu",
    "vocab_size": 250048,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": 3072,
    "n_positions": 2048,
    "rotary_emb_base": 10_000,
}

PUBLISHED: dict[str, Settings] = {
    SMOLLM2: _SMOLLM2_135M,
    MINILM: _MINILM_L6,
    "hf://mistralai/Mistral-7B-v0.1": _MISTRAL_7B,
    "hf://mistralai/Mistral-7B-Instruct-v0.2": _MISTRAL_7B,
    "hf://meta-llama/Llama-2-7b-chat-hf": _LLAMA2_7B,
    "hf://princeton-nlp/Sheared-LLaMA-1.3B": _SHEARED_LLAMA_1_3B,
    "hf://Qwen/Qwen2.5-1.5B-Instruct": _QWEN2_5_1_5B,
    "hf://intfloat/e5-base-v2": _BERT_BASE,
    "hf://nomic-ai/nomic-bert-2048": _NOMIC_BERT,
    "hf://nomic-ai/nomic-xlm-2048": _MNOMIC_BERT,
    "hf://FacebookAI/xlm-roberta-base": _XLM_R_BASE,
    "hf://HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "hf://sentence-transformers/all-MiniLM-L6-v2": _MINILM_L6,
}
"""Reference → the settings of its configuration that decide its size."""
