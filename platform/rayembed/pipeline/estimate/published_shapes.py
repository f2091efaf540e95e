"""Shapes of published models, so that the sizes of what recipes name are known without the hub."""

from typing import Any

from rayembed.samples.assets import MINILM, SMOLLM2

_MISTRAL_7B = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_LLAMA2_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_SHEARED_LLAMA_1_3B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
_QWEN2_5_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
_NOMIC_BERT = {
    "model_type": "nomic_bert",
    "vocab_size": 30528,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
_SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
_MINILM_L6 = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
}
_BERT_BASE = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
_XLM_R_BASE = {
    "model_type": "xlm-roberta",
    "vocab_size": 250002,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
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

PUBLISHED: dict[str, dict[str, Any]] = {
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
    "hf://HuggingFaceTB/SmolLM2-135M": _SMOLLM2_135M,
    "hf://HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "hf://sentence-transformers/all-MiniLM-L6-v2": _MINILM_L6,
}
"""Reference → the settings of its configuration that decide its size."""
