"""Code of the registered MLflow model: OpenAI's embeddings schema around an exported folder.

MLflow runs this file where the model is loaded (models-from-code). It takes the folder through
sentence-transformers, so that its vectors are those of `SentenceTransformer(folder)`.

Request: `input` (a text or a list of texts), and optionally `model`, `dimensions`,
`encoding_format` (`float` or `base64`), `user` as OpenAI has them, `role` (`query` or `document`,
the default) and `instruction` (the task definition put before the texts, in the model's template;
without a template as plain text behind the role's prompt, with a space after it).
"""

import base64
import json
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException

from rayembed.config.model import plain_head

_ROLES = ("query", "document")
_FORMATS = ("float", "base64")
_TEXTS_PER_BATCH = 32


class _Way(NamedTuple):
    """How a text is embedded; texts of one way go through the model together."""

    role: str
    instruction: str
    dimensions: int | None
    encoding_format: str


class OpenAIEmbeddings(mlflow.pyfunc.PythonModel):  # type: ignore[misc]  # mlflow is untyped
    """A pyfunc that answers requests of OpenAI's embeddings schema."""

    def load_context(self, context: Any) -> None:
        """Load the exported folder; on a GPU where there is one."""
        from sentence_transformers import SentenceTransformer

        settings = context.model_config or {}
        self.name = str(settings.get("name", ""))
        self.template: str | None = settings.get("instruction_template")
        self.dimensions = [int(width) for width in settings.get("dimensions", [])]
        folder = Path(context.artifacts["model"])
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        kinds = [str(module["type"]) for module in modules]
        # sentence-transformers asks for this flag for every class that is not its own. Ours travels
        # with the MLflow model as code; nothing is run that the folder holds.
        ours = any(kind.startswith("rayembed.") for kind in kinds)
        self.model = SentenceTransformer(str(folder), trust_remote_code=ours)

    # Of the annotation of a table alone MLflow makes no signature beside the one it is given.
    def predict(
        self,
        context: Any,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response to one request, or to all requests of a table with one in each row.

        A mapping, a text or a list of texts in place of a table is one request, too.

        Raises:
            MlflowException: the request does not hold; the message says why (HTTP 400).
        """
        texts: list[str] = []
        ways: list[_Way] = []
        for request in _requests(model_input):
            found = _texts(request.get("input"))
            texts += found
            ways += [self._way({**request, **(params or {})})] * len(found)
        vectors: list[Any] = [None] * len(texts)
        num_tokens = 0
        for way in dict.fromkeys(ways):
            chosen = [i for i, other in enumerate(ways) if other == way]
            embedded, tokens = self._embed([texts[i] for i in chosen], way)
            num_tokens += tokens
            for i, vector in zip(chosen, embedded, strict=True):
                vectors[i] = _encoded(vector, way.encoding_format)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": vector}
                for i, vector in enumerate(vectors)
            ],
            "model": self.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _way(self, request: Mapping[str, Any]) -> _Way:
        role = str(request.get("role", "document"))
        if role not in _ROLES:
            raise _refused(f"role = {role!r}; allowed: {', '.join(_ROLES)}")
        instruction = str(request.get("instruction", ""))
        encoding_format = str(request.get("encoding_format", "float"))
        if encoding_format not in _FORMATS:
            raise _refused(f"encoding_format = {encoding_format!r}; allowed: {_FORMATS}")
        dimensions = request.get("dimensions")
        if dimensions is not None:
            if dimensions not in self.dimensions:
                raise _refused(f"dimensions = {dimensions}; this model has {self.dimensions}")
            dimensions = int(dimensions)
        return _Way(role, instruction, dimensions, encoding_format)

    def _embed(self, texts: list[str], way: _Way) -> tuple[np.ndarray, int]:
        """Vectors (N, D) float32 of the texts, and how many tokens the model read."""
        prompt = self._prompt(way)
        encode = self.model.encode_query if way.role == "query" else self.model.encode_document
        vectors = np.asarray(
            encode(texts, prompt=prompt, batch_size=_TEXTS_PER_BATCH, show_progress_bar=False),
            dtype=np.float32,
        )
        if way.dimensions is not None and way.dimensions < vectors.shape[1]:
            vectors = vectors[:, : way.dimensions]
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        num_tokens = 0
        for start in range(0, len(texts), _TEXTS_PER_BATCH):
            part = texts[start : start + _TEXTS_PER_BATCH]
            read = self.model.preprocess(part, prompt=prompt, task=way.role)
            num_tokens += int(read["attention_mask"].sum())
        return vectors, num_tokens

    def _prompt(self, way: _Way) -> str:
        """The literal text before each text of this way."""
        if way.instruction and self.template:
            return self.template.replace("{instruction}", way.instruction)
        names = ("query",) if way.role == "query" else ("document", "passage", "corpus")
        prompts = self.model.prompts
        own: str = next((prompts[name] for name in names if name in prompts), None) or ""
        return plain_head(own, way.instruction)


def _requests(model_input: Any) -> Iterable[dict[str, Any]]:
    """What was asked, without absent fields: MLflow hands over tables, mappings or plain texts."""
    if hasattr(model_input, "to_dict"):
        rows: list[Any] = model_input.to_dict(orient="records")
    elif isinstance(model_input, Mapping):
        rows = [model_input]
    else:
        rows = [{"input": model_input}]
    for row in rows:
        # In a table an absent value is None or NaN, which alone is not equal to itself.
        yield {
            key: value
            for key, value in row.items()
            if value is not None and not (isinstance(value, float) and np.isnan(value))
        }


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, np.ndarray):
        texts = texts.tolist()
    if isinstance(texts, numbers.Number):
        texts = [texts]  # MLflow makes a table of a list of numbers, one in each row
    if not isinstance(texts, list | tuple) or not texts:
        raise _refused(f"'input' must be a text or a list of texts, not empty: {value!r}")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise _refused(f"input[{i}] = {text!r} must be a text; token numbers are not taken")
        if not text.strip():
            raise _refused(f"input[{i}] is an empty text, which has no embedding")
    return list(texts)


def _encoded(vector: np.ndarray, encoding_format: str) -> list[float] | str:
    """The vector as numbers, or as OpenAI's base64 of little-endian float32."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]


def _refused(message: str) -> MlflowException:
    return MlflowException.invalid_parameter_value(message)


mlflow.models.set_model(OpenAIEmbeddings())
