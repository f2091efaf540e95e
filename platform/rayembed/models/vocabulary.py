"""Check that a model has an embedding for each token of its tokenizer."""

from typing import Any

from rayembed.errors import ArtifactError
from rayembed.models.tokens import TextTokenizer


def check_vocabulary(pretrained: Any, words: int, where: str) -> frozenset[int]:
    """Raise if the tokenizer has tokens without an embedding; return the ids of special
    placeholders (for images) without one, which are allowed.

    Such ids fail a pass: Gemma 3's text models have tokenizers with one for images.

    Args:
        words: number of the model's embeddings.
        where: what to call the model in messages.

    Raises:
        ArtifactError: other tokens have no embedding.
    """
    added = pretrained.added_tokens_decoder
    largest = max(
        [pretrained.backend_tokenizer.get_vocab_size(with_added_tokens=False) - 1, *added]
    )
    if largest < words:
        return frozenset()
    kinds = ("image", "audio", "video")
    placeholders = {
        number
        for number, token in added.items()
        if token.special and any(kind in token.content for kind in kinds)
    }
    missing = [i for i in range(words, largest + 1) if i not in placeholders]
    if missing:
        shown = [pretrained.convert_ids_to_tokens(i) for i in missing[:3]]
        raise ArtifactError(
            f"the tokenizer of {where} has {len(missing)} tokens whose ids are beyond the model's "
            f"{words} embeddings, such as {shown}; resize the model's embeddings "
            "(resize_token_embeddings in transformers), or use the tokenizer that the model was "
            "trained with"
        )
    return frozenset(range(words, largest + 1))


def check_words(model: Any) -> None:
    """Check for each part of a model that every token of its tokenizer has an embedding.

    Args:
        model: a `transformer_model.TransformerModel`.

    Raises:
        ArtifactError: a token has none.
    """
    for name, part in model.parts.items():
        words = part.get_input_embeddings().num_embeddings
        pretrained = model.part_tokenizers[name]
        missing = check_vocabulary(pretrained, words, f"the {name}")
        if isinstance(model.tokenizer, TextTokenizer) and pretrained is model.tokenizer.pretrained:
            model.tokenizer.without_embedding = missing
