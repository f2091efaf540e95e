"""Advice on how to correct a server, by mistake and by server software."""

import re
from collections.abc import Mapping, Sequence

from rayembed.proof.proof import Mistake, Proof

SOFTWARE = {
    "vllm": "vLLM",
    "tei": "Text Embeddings Inference",
    "llama.cpp": "llama.cpp",
    "llama-cpp-python": "llama-cpp-python",
    "ollama": "Ollama",
    "infinity": "infinity",
    "sentence-transformers": "sentence-transformers",
    "rayembed": "rayembed",
}
"""Software behind targets, and its name in messages."""

_POOLINGS = {
    "mean": {"vllm": "MEAN", "tei": "mean", "llama.cpp": "mean", "llama-cpp-python": "MEAN"},
    "CLS": {"vllm": "CLS", "tei": "cls", "llama.cpp": "cls", "llama-cpp-python": "CLS"},
    "last-token": {
        "vllm": "LAST",
        "tei": "last-token",
        "llama.cpp": "last",
        "llama-cpp-python": "LAST",
    },
}
"""Pooling in a mistake's words → its name in each software."""

_NO_PROMPTS = "it puts no prompt before a text: send the prompt as part of the text"

_ADVICE: Mapping[str, Mapping[str, str]] = {
    "prompt": {
        "vllm": _NO_PROMPTS,
        "tei": "name prompt_name in each request (query, document), or send the prompt as part "
        "of the text; --default-prompt-name is for servers of one role",
        "llama.cpp": _NO_PROMPTS,
        "llama-cpp-python": _NO_PROMPTS,
        "ollama": f"{_NO_PROMPTS} (TEMPLATE is for chats alone)",
        "infinity": _NO_PROMPTS,
        "sentence-transformers": "call encode_query and encode_document, or name prompt_name",
        "rayembed": "name role and instruction in each request, or the model NAME:query and "
        "NAME:document",
    },
    "pooling": {
        "vllm": 'start it with --pooler-config \'{{"pooling_type": "{pooling}"}}\'',
        "tei": "start it with --pooling {pooling}",
        "llama.cpp": "start it with --pooling {pooling}, or convert the GGUF from a folder with "
        "1_Pooling/config.json",
        "llama-cpp-python": "in Python, Llama(pooling_type=LLAMA_POOLING_TYPE_{pooling}); for its "
        "server, convert the GGUF from a folder with 1_Pooling/config.json",
        "ollama": "create the model from a GGUF whose pooling_type is right: convert it from a "
        "folder with 1_Pooling/config.json",
        "infinity": "copy 1_Pooling/config.json and modules.json of the folder along",
        "sentence-transformers": "copy 1_Pooling/config.json and modules.json of the folder along",
    },
    "eos": {
        "vllm": "its tokenizer.json must append the token: copy that of the folder, and leave "
        "add_special_tokens on in requests",
        "tei": "its tokenizer.json must append the token (post_processor): copy that of the folder",
        "llama.cpp": "start it with --override-kv tokenizer.ggml.add_eos_token=bool:true, or set "
        "it when the GGUF is converted",
        "llama-cpp-python": "start its server with --kv_overrides "
        "tokenizer.ggml.add_eos_token=bool:true, or set it when the GGUF is converted",
        "ollama": "set tokenizer.ggml.add_eos_token in the GGUF (gguf_new_metadata.py) and create "
        "the model again",
        "sentence-transformers": "copy tokenizer.json of the folder along",
    },
    "bos": {
        "vllm": "send texts without it, or add_special_tokens=false in the request",
        "llama.cpp": "send texts without it, or start it with --override-kv "
        "tokenizer.ggml.add_bos_token=bool:false",
        "ollama": "set tokenizer.ggml.add_bos_token=false in the GGUF and create the model again",
    },
    "no_bos": {
        "vllm": "leave add_special_tokens on in requests, and copy tokenizer.json of the folder",
        "llama.cpp": "start it with --override-kv tokenizer.ggml.add_bos_token=bool:true",
        "ollama": "set tokenizer.ggml.add_bos_token in the GGUF and create the model again",
    },
    "double_eos": {
        "vllm": "send texts without it, or add_special_tokens=false in the request",
        "llama.cpp": "send texts without it, or start it with --override-kv "
        "tokenizer.ggml.add_eos_token=bool:false",
        "ollama": "set tokenizer.ggml.add_eos_token=false in the GGUF and create the model again",
    },
    "length": {
        "vllm": "start it with --max-model-len {length}",
        "tei": "its limit is max_seq_length of sentence_bert_config.json: {length}",
        "llama.cpp": "start it with --ctx-size {length} --batch-size {length} --ubatch-size "
        "{length} for each slot (--parallel)",
        "llama-cpp-python": "start its server with --n_ctx {length} --n_batch {length} --n_ubatch "
        "{length}",
        "ollama": "set num_ctx to {length} (PARAMETER num_ctx in the Modelfile, or options)",
        "infinity": "its limit is max_seq_length of sentence_bert_config.json: {length}",
        "sentence-transformers": "set model.max_seq_length = {length}",
    },
    "normalisation": {
        "vllm": "start it with --pooler-config '{{\"normalize\": true}}' (use_activation in newer "
        "versions)",
        "tei": "leave normalize=false out of requests",
        "llama.cpp": "start it with --embd-normalize 2",
        "llama-cpp-python": "call Llama.embed(normalize=True); its server has no setting: divide "
        "each vector by its length, or take llama-server",
        "sentence-transformers": "pass normalize_embeddings=True, or add a Normalize module",
    },
    "dense": {
        "vllm": "take a version that loads 2_Dense of the folder, and copy modules.json along",
        "tei": "start it with --dense-path 2_Dense",
        "llama.cpp": "convert the GGUF with --sentence-transformers-dense-modules",
        "ollama": "create the model from a GGUF converted with "
        "--sentence-transformers-dense-modules",
        "sentence-transformers": "copy 2_Dense and modules.json of the folder along",
    },
    "lower": {
        "llama.cpp": "its WordPiece tokenizer always lower-cases: serve a cased model elsewhere",
        "ollama": "its WordPiece tokenizer always lower-cases: serve a cased model elsewhere",
        "sentence-transformers": "set do_lower_case=false in sentence_bert_config.json",
    },
    "mask": {
        "vllm": "start it with --hf-overrides '{{\"is_causal\": false}}'",
        "llama.cpp": "start it with --attention non-causal",
    },
    "limits": {
        "sentence-transformers": "set model[0].query_length and model[0].document_length, as the "
        "model card does",
    },
    "uncut": {
        "vllm": "start it with --hf-overrides '{{\"is_matryoshka\": true}}': it refuses dimensions "
        "without",
        "sentence-transformers": "load it with truncate_dim={width} (or set that in "
        "config_sentence_transformers.json), and encode with normalize_embeddings=True",
        "rayembed": "name dimensions={width} in each request",
    },
    "width": {
        "vllm": "leave dimensions out of requests, or ask for {width}",
        "sentence-transformers": "set truncate_dim to null in config_sentence_transformers.json",
        "rayembed": "leave dimensions out of requests, or ask for {width}",
    },
}
"""Kind of mistake → software → what to change; `{pooling}`, `{length}`, `{width}` are filled in."""

_KINDS = {
    "no_prompt": "prompt",
    "wrong_role": "prompt",
    "mean_pooling": "pooling",
    "cls_pooling": "pooling",
    "last_token_pooling": "pooling",
    "no_head": "head",
    "no_dense": "dense",
    "no_eos": "eos",
    "no_bos": "no_bos",
    "double_bos": "bos",
    "double_eos": "double_eos",
    "no_normalisation": "normalisation",
    "lower_cased": "lower",
    "causal_mask": "mask",
    "one_limit": "limits",
    "not_cut": "uncut",
}


def length_advice(limit: int) -> str:
    """Advice for servers that cut texts before the model's maximum length in tokens."""
    return (
        f"set the server's length limit to {limit} tokens (max_seq_length, max_model_len, ctx-size)"
    )


def advice_for(proof: Proof, mistakes: Sequence[Mistake], software: str | None) -> tuple[str, ...]:
    """Return advice for each mistake: general advice, and advice for the server's software.

    Args:
        software: a key of `SOFTWARE`; None: unknown, so that all known advice is given.
    """
    lines: list[str] = []
    for mistake in mistakes:
        lines.append(mistake.advice)
        for name, text in _of_kind(mistake.name).items():
            if software in (None, name) and (filled := _filled(text, name, proof, mistake)):
                lines.append(f"{SOFTWARE[name]}: {filled}")
    return tuple(dict.fromkeys(lines))


def _of_kind(name: str) -> Mapping[str, str]:
    kind = _KINDS.get(name, "")
    if name.startswith("cut_"):
        kind = "length" if name.startswith("cut_at_") else "width"
    return _ADVICE.get(kind, {})


def _filled(text: str, software: str, proof: Proof, mistake: Mistake) -> str | None:
    """Fill the model's values into an advice text; None if the software has no name for the model's
    pooling.
    """
    found = re.search(r"where the model has (\S+) pooling", mistake.what)
    pooling = _POOLINGS.get(found[1] if found else "", {}).get(software)
    if "{pooling}" in text and pooling is None:
        return None
    length, width = max(proof.lengths.values()), proof.dimensions[0]
    return text.format(pooling=pooling, length=length, width=width)
