"""MLflow model that serves an exported folder with OpenAI's embeddings schema.

MLflow runs this file where the model is loaded (models-from-code). It takes the folder through
sentence-transformers, so that its vectors are those of `SentenceTransformer(folder)`.

Request: `input` (a text or a list of texts), and optionally `model`, `dimensions`,
`encoding_format` (`float`, `base64`, and for small vectors `int8`, `uint8`, `binary`, `ubinary`:
see `openai_schema.encoded`), `user` as OpenAI has them, `role` (`query` or `document`,
the default) and `instruction` (the task definition put before the texts, in the model's template;
without a template as plain text behind the role's prefix, with a space after it; where it is not
there, the one instruction that the model learnt, if it learnt a single one; "": none).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException

from rayembed.assets.sentence_modules import is_own_format
from rayembed.config.instructions import plain_head
from rayembed.config.types import Role
from rayembed.registry.openai_schema import (
    EncodeOptions,
    RequestError,
    cut,
    encoded,
    read_encode_options,
    read_texts,
    response,
)

_TEXTS_PER_BATCH = 32
_TEXTS_OF_PROOF = 3
"""Texts of the proof that are embedded at load, of each role and instruction: the first are short.
"""


class OpenAIEmbeddings(mlflow.pyfunc.PythonModel):  # type: ignore[misc]  # mlflow is untyped
    """MLflow pyfunc that answers requests in OpenAI's embeddings schema."""

    def load_context(self, context: Any) -> None:
        """Load the exported folder, on a GPU if one is available.

        Raises:
            MlflowException: its vectors are not those of the folder's proof.
        """
        from sentence_transformers import SentenceTransformer

        settings = context.model_config or {}
        self.name = str(settings.get("name", ""))
        self.template: str | None = settings.get("instruction_template")
        self.dimensions = [int(width) for width in settings.get("dimensions", [])]
        folder = Path(context.artifacts["model"])
        own = _own_settings(folder)
        self.prefixes = _own_prefixes(folder)
        if is_own_format(folder):
            # By name, since it stands in a layer above this one. It travels with the MLflow model
            # as code, and runs nothing that the folder holds.
            loader = import_module("rayembed.models.sentence_module")
            self.model: Any = loader.as_sentence_transformer(folder)
        else:
            self.model = SentenceTransformer(str(folder))
            if own is not None:
                # The plain format has one maximum length, the larger one.
                self.model[0].query_length = own["query_max_length"]
                self.model[0].document_length = own["document_max_length"]
        self._check_proof(folder)

    def _check_proof(self, folder: Path) -> None:
        """Raise if the loaded model's vectors differ from the reference vectors in its folder's
        proof, on some of the texts.
        """
        # By name, since it stands in a layer above this one, too.
        proof = import_module("rayembed.proof.proof").read_proof(folder)
        if proof is None:
            return
        kinds: dict[tuple[Role, str | None], list[int]] = {}
        for i, text in enumerate(proof.texts):
            kinds.setdefault((text.role, text.instruction), []).append(i)
        chosen = [i for places in kinds.values() for i in places[:_TEXTS_OF_PROOF]]
        part = proof.part(chosen)

        def embed(texts: Sequence[Any]) -> np.ndarray:
            made = [
                self._embed([one.text], EncodeOptions(one.role, one.instruction, None, "float"))[0]
                for one in texts
            ]
            return np.concatenate(made)

        inner = getattr(self.model[0], "model", None)  # a graph has no parameters
        computed = getattr(inner, "number_type", None) or str(self.model.dtype)[len("torch.") :]
        check = import_module("rayembed.proof.check")
        checked = check.check(part, embed, check.tolerated(proof, computed))
        if not checked.same:
            changed = check.changed_packages(proof)
            changed = changed and f"; {changed}"
            raise MlflowException(
                f"the model in {str(folder)!r} gives other vectors here than where it was "
                f"registered (lowest cosine {checked.worst:.4f}, allowed "
                f"{checked.tolerance:g}, in the text of {part.texts[checked.wrong[0]].about!r})"
                f"{changed}. Install the versions in its requirements.txt, or remove its folder "
                "proof (the stored reference vectors) to load the model without this check"
            )

    # Of the annotation of a table alone MLflow makes no signature beside the one it is given.
    def predict(
        self,
        context: Any,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Embed the texts of one request, or of a table with a request in each row, and return the
        responses.

        A mapping, a text or a list of texts in place of a table is one request, too.

        Raises:
            MlflowException: the request does not hold (HTTP 400), or the model gives no finite
                numbers (500); the message says why.
        """
        texts: list[str] = []
        all_options: list[EncodeOptions] = []
        try:
            for request in _requests(model_input):
                found = read_texts(request.get("input"))
                texts += found
                all_options += [
                    read_encode_options({**request, **(params or {})}, self.dimensions)
                ] * len(found)
        except RequestError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None
        embeddings: list[Any] = [None] * len(texts)
        num_tokens = 0
        for options in dict.fromkeys(all_options):
            chosen = [i for i, other in enumerate(all_options) if other == options]
            embedded, tokens = self._embed([texts[i] for i in chosen], options)
            num_tokens += tokens
            for i, vector in zip(chosen, embedded, strict=True):
                embeddings[i] = encoded(vector, options.encoding_format)
        return response(embeddings, model=self.name, num_tokens=num_tokens)

    def _embed(self, texts: list[str], options: EncodeOptions) -> tuple[np.ndarray, int]:
        """Embed texts: vectors (N, D) float32, and the number of tokens read."""
        prompt = self._prompt(options)
        encode = self.model.encode_query if options.role == "query" else self.model.encode_document
        made = encode(
            texts,
            prompt=prompt,
            batch_size=_TEXTS_PER_BATCH,
            show_progress_bar=False,
            normalize_embeddings=self.model.truncate_dim is not None,  # cut vectors are no units
        )
        vectors = cut(np.asarray(made, dtype=np.float32), options.dimensions)
        if not np.isfinite(vectors).all():
            raise MlflowException(
                "the model gives numbers that are not finite for a text of this request: "
                "its weights are damaged, or its computation overflows in its number type"
            )
        num_tokens = 0
        for start in range(0, len(texts), _TEXTS_PER_BATCH):
            part = texts[start : start + _TEXTS_PER_BATCH]
            read = self.model.preprocess(part, prompt=prompt, task=options.role)
            num_tokens += int(read["attention_mask"].sum())
        return vectors, num_tokens

    def _prompt(self, options: EncodeOptions) -> str:
        """Literal prompt before each text with these options."""
        if options.instruction and self.template:
            return self.template.replace("{instruction}", options.instruction)
        if options.instruction is not None and self.prefixes is not None:
            return plain_head(self.prefixes[options.role], options.instruction)
        names = ("query",) if options.role == "query" else ("document", "passage", "corpus")
        prompts = self.model.prompts
        own: str = next((prompts[name] for name in names if name in prompts), None) or ""
        return plain_head(own, options.instruction or "")


def _own_prefixes(folder: Path) -> dict[str, str] | None:
    """Map roles to the prefixes of a rayembed model for texts without an instruction; None for
    other models.
    """
    own = _own_settings(folder)
    return own and {role: own.get(f"{role}_prefix") or "" for role in get_args(Role)}


def _own_settings(folder: Path) -> dict[str, Any] | None:
    """Read the settings of a rayembed model; None for other models."""
    path = folder / "rayembed.json"
    if not path.is_file():
        return None
    model: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["model"]
    return model


def _requests(model_input: Any) -> Iterable[dict[str, Any]]:
    """Convert MLflow's input (table, mapping or plain texts) to requests without empty fields."""
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


mlflow.models.set_model(OpenAIEmbeddings())
