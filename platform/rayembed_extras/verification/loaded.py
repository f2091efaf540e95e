"""Open verification targets in this process: model folders, GGUF files, and objects that embed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayembed.assets.folder_formats import format_of
from rayembed.assets.sentence_modules import is_own_format
from rayembed.config.types import Role
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.saved_folder import SETTINGS_FILE, read_settings
from rayembed.proof.proof import ProofText
from rayembed_extras.verification.measure import Embed, Target, TextsRefusedError

_BY_OBJECT = "its methods for queries and documents put the prompt"


def open_folder(folder: Path, *, prompts: str | None = None, device: str | None = None) -> Target:
    """Load a model folder as its users do: with sentence-transformers, or an exported graph with
    its runtime.

    Args:
        prompts: `client` gives each prompt as literal text; None: `server`, the folder's own.

    Raises:
        ArtifactError: no model that can be loaded.
        ConfigError: a package is not installed.
    """
    if (own := format_of(folder)) is not None:
        from rayembed.api.embedder import Embedder

        return _of_embedder(Embedder(own.load(folder), str(folder)), str(folder))
    from sentence_transformers import SentenceTransformer

    try:
        if is_own_format(folder):
            from rayembed.models.sentence_module import as_sentence_transformer

            model = as_sentence_transformer(folder, device=device)
        else:
            model = SentenceTransformer(str(folder), device=device)
            _set_lengths(model, folder)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ArtifactError(
            f"sentence-transformers cannot load {str(folder)!r}: {error}"
        ) from error
    return _of_sentence_transformer(model, str(folder), prompts)


def _set_lengths(model: Any, folder: Path) -> None:
    """Set the maximum length of each role as the model card does; sentence-transformers' own format
    stores only one.
    """
    if (folder / SETTINGS_FILE).is_file():
        lengths = read_settings(folder).max_lengths
        model[0].query_length, model[0].document_length = lengths["query"], lengths["document"]


def open_onnx(file: Path, *, lengths: Mapping[Role, int], prompts: str | None = None) -> Target:
    """Load an ONNX file with tokenizer, prompts and pooling of its folder.

    A graph in rayembed's own format is loaded as its folder is.

    Args:
        lengths: most tokens of a text by role, unless the folder states others.

    Raises:
        ArtifactError: it cannot be loaded.
        ConfigError: onnxruntime is not installed.
    """
    from rayembed_extras.verification.onnx_file import load_onnx

    if format_of(file.parent) is not None:
        return open_folder(file.parent, prompts=prompts)
    return _of_sentence_transformer(load_onnx(file, lengths), str(file), prompts)


def open_gguf(file: Path, *, lengths: Mapping[Role, int], prompts: str | None = None) -> Target:
    """Load a GGUF file with llama.cpp; prompts are sent as literal text.

    Args:
        lengths: most tokens of a text by role; llama.cpp has one limit, the larger of them.

    Raises:
        ArtifactError: llama.cpp cannot load it.
        ConfigError: llama-cpp-python is not installed, or `prompts` is `server`.
    """
    _check_client(prompts, "a GGUF file holds no prompts")
    try:
        from llama_cpp import Llama  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(
            f"the GGUF file {str(file)!r} needs llama-cpp-python, which is not installed: pip "
            "install llama-cpp-python. Or start llama-server --embedding and verify its address"
        ) from None
    length = max(lengths.values())
    room = {"n_ctx": length, "n_batch": length, "n_ubatch": length}
    try:
        model = Llama(model_path=str(file), embedding=True, verbose=False, **room)
    except (ValueError, RuntimeError, OSError) as error:
        raise ArtifactError(f"llama.cpp cannot load {str(file)!r}: {error}") from error

    def embed(texts: Sequence[ProofText]) -> np.ndarray:
        given = [one.prompt + one.text for one in texts]
        try:
            # Cut by llama-cpp-python, a text would lose its end token.
            found = model.embed(given, normalize=True, truncate=False)
        except ValueError as error:
            raise TextsRefusedError(str(error)) from None
        if found and found[0] and isinstance(found[0][0], list):
            raise ArtifactError(
                f"{str(file)!r} names no pooling, so that llama.cpp gives a vector for each token; "
                "convert it with its pooling_type, or start llama-server with --pooling"
            )
        return np.asarray(found)

    return Target(str(file), embed, "the client puts the prompt before a text", "llama.cpp")


def open_object(embedder: Any, *, prompts: str | None = None) -> Target:
    """Wrap an object that embeds: LangChain `Embeddings`, a `SentenceTransformer`, a rayembed
    `Embedder`, or a function from a list of texts to vectors.

    Raises:
        ConfigError: none of these, or a function that is to put prompts itself.
    """
    from rayembed.api.embedder import Embedder

    name = type(embedder).__name__
    if isinstance(embedder, Embedder):
        return _of_embedder(embedder, name)
    if hasattr(embedder, "embed_query") and hasattr(embedder, "embed_documents"):
        return _of_langchain(embedder, name, prompts)
    if hasattr(embedder, "encode_query") and hasattr(embedder, "encode_document"):
        return _of_sentence_transformer(embedder, name, prompts)
    if not callable(embedder):
        raise ConfigError(
            f"cannot verify a {name}; give a LangChain Embeddings object, a "
            "SentenceTransformer, or a function from a list of texts to their vectors"
        )
    _check_client(prompts, "a function is given texts alone")
    name = getattr(embedder, "__name__", name)

    def embed(texts: Sequence[ProofText]) -> np.ndarray:
        return _array(embedder([one.prompt + one.text for one in texts]))

    return Target(name, embed, "the function is given texts with their prompts")


def _of_embedder(embedder: Any, name: str) -> Target:
    def encode(texts: list[str], first: ProofText) -> Any:
        return embedder.encode(
            texts, role=first.role, instruction=first.instruction, allow_empty=True
        )

    embed = _by_group(encode, lambda one: (one.role, one.instruction))
    assumed = "rayembed puts the prompt of role and instruction"
    return Target(name, embed, assumed, "rayembed", in_process=True)


def _of_sentence_transformer(model: Any, name: str, prompts: str | None) -> Target:
    literal = prompts == "client"

    def encode(texts: list[str], first: ProofText) -> Any:
        by_role = model.encode_query if first.role == "query" else model.encode_document
        # Instructions have no name in a folder: they are given as literal prompts.
        given = first.prompt if literal or first.instruction is not None else None
        return by_role(texts, prompt=given, batch_size=len(texts), show_progress_bar=False)

    embed = _by_group(encode, lambda one: (one.role, one.instruction))
    assumed = (
        "given as literal text"
        if literal
        else "sentence-transformers puts the folder's own for queries and documents; "
        "instructions are given as literal text"
    )
    return Target(name, embed, assumed, "sentence-transformers", in_process=True)


def _of_langchain(embedder: Any, name: str, prompts: str | None) -> Target:
    literal = prompts == "client"

    def encode(texts: list[str], first: ProofText) -> Any:
        if first.role == "query":
            return [embedder.embed_query(text) for text in texts]
        return embedder.embed_documents(texts)

    def embed(texts: Sequence[ProofText]) -> np.ndarray:
        return by_role([_with_prompt(one) for one in texts] if literal else texts)

    by_role = _by_group(encode, lambda one: (one.role,))
    assumed = (
        "the client puts the prompt before a text"
        if literal
        else f"{_BY_OBJECT} before a text, as a vector store calls them (prompts='client' if the "
        "application does)"
    )
    return Target(name, embed, assumed, None, takes_instructions=literal)


def _with_prompt(text: ProofText) -> ProofText:
    return ProofText(text.prompt + text.text, text.role, "", text.instruction, text.about)


def _by_group(
    encode: Callable[[list[str], ProofText], Any], key: Callable[[ProofText], Any]
) -> Embed:
    """Return a function that embeds texts with equal keys in one call each, and restores the order
    of the texts.
    """

    def embed(texts: Sequence[ProofText]) -> np.ndarray:
        groups: dict[Any, list[int]] = {}
        for i, one in enumerate(texts):
            groups.setdefault(key(one), []).append(i)
        parts, order = [], []
        for places in groups.values():
            made = _array(encode([texts[i].text for i in places], texts[places[0]]))
            if len(made) != len(places):
                raise ArtifactError(
                    f"{len(made)} vectors were returned for {len(places)} texts; expected one "
                    "vector for each text"
                )
            parts.append(made)
            order += places
        return np.concatenate(parts)[np.argsort(order)]

    return embed


def _array(vectors: Any) -> np.ndarray:
    """Convert lists, arrays or tensors of any device to an (n, D) float64 array."""
    if hasattr(vectors, "detach"):
        vectors = vectors.detach().cpu().float().numpy()
    try:
        found = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 2:
        raise ArtifactError(
            f"a {type(vectors).__name__} was returned instead of vectors; expected a list of "
            "numbers for each text"
        )
    return found


def _check_client(prompts: str | None, why: str) -> None:
    if prompts == "server":
        raise ConfigError(f"prompts = 'server' cannot be used here: {why}; use 'client'")
