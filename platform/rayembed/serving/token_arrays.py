"""Token numbers as input, as OpenAI's API takes them: back into text by the tokenizer they are of.

Nothing in a request says of which tokenizer its numbers are. Those of another one would be another
text, and the answer vectors of that; so the server's settings say it, or the numbers are refused.
"""

import reprlib
from typing import Any

from tokenizers import Tokenizer

from rayembed.assets.resolver import resolve
from rayembed.errors import AssetError
from rayembed.registry.openai_schema import RequestError

_REFUSED = (
    "token numbers are not taken, since nothing says of which tokenizer they are; send texts "
    "(LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False), or have the server's "
    "setting token_arrays name the tokenizer"
)


def model_tokenizer(model: Any) -> Tokenizer:
    """Tokenizer of a loaded model's own text."""
    found: Tokenizer = model.tokenizer.pretrained.backend_tokenizer
    return found


def named_tokenizer(reference: str) -> Tokenizer:
    """Tokenizer of a tokenizer.json: the file or a folder that has it.

    Raises:
        AssetError: there is none.
    """
    path = resolve(reference)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise AssetError(
            f"token_arrays = {reference!r} holds no tokenizer.json that can be read: {error}"
        ) from error


def arrays_as_texts(value: Any, field: str, tokenizer: Tokenizer | None) -> Any:
    """The value with each array of token numbers as its text; whatever else it has stays.

    Special tokens are left out: the model puts its own around a text.

    Args:
        value: of the field: one array, or a list of arrays and texts.
        tokenizer: of the numbers; None: they are refused.

    Raises:
        RequestError: numbers without a tokenizer, or one that it does not have.
    """
    if not isinstance(value, list) or not value:
        return value
    if isinstance(value[0], int):
        return [_text(value, f"{field} = ", field, tokenizer)]
    return [
        _text(one, f"{field}[{i}] = ", field, tokenizer) if isinstance(one, list) else one
        for i, one in enumerate(value)
    ]


def _text(ids: list[Any], where: str, field: str, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        raise RequestError(f"{where}{reprlib.repr(ids)}: {_REFUSED}", field)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    for number in ids:
        if type(number) is not int or not 0 <= number < size:
            raise RequestError(
                f"{where}{reprlib.repr(ids)} has {reprlib.repr(number)}, which is no token of the "
                f"{size} that this server's setting token_arrays names",
                field,
            )
    found: str = tokenizer.decode(ids, skip_special_tokens=True)
    return found
