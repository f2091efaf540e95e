"""Load an ONNX file that another tool exported, with tokenizer and later modules of its folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule

from rayembed.assets.sentence_modules import foreign_modules
from rayembed.config.table import load
from rayembed.config.types import Role
from rayembed.errors import ArtifactError, ConfigError

_TOKENIZER = "tokenizer.json"
_VECTORS = "sentence_embedding"
"""Output of graphs that pool by themselves, and sentence-transformers' name of a vector."""
_TYPES = "token_type_ids"
_POSITIONS = "position_ids"
_INPUTS = ("input_ids", "attention_mask", _TYPES, _POSITIONS)
"""Inputs of graphs that are made of tokens alone."""
_NUMBERS = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
}
"""onnxruntime's name of an input's number type, and numpy's."""


def home_of(file: Path) -> Path:
    """Return the folder of an ONNX file that has the tokenizer: its own, or the one above it.

    Raises:
        ArtifactError: none of both has one.
    """
    for folder in (file.parent, file.parent.parent):
        if (folder / _TOKENIZER).is_file():
            return folder
    raise ArtifactError(
        f"no {_TOKENIZER} next to {str(file)!r} or in the folder above it; copy the model's "
        "tokenizer, modules.json and 1_Pooling there"
    )


def load_onnx(file: Path, lengths: Mapping[Role, int]) -> Any:
    """Load an ONNX file as a `SentenceTransformer`, with the modules that follow in its folder's
    `modules.json`.

    Args:
        lengths: maximum tokens of a text by role, the longest of which sentence_bert_config.json
            states; another number there is that of both roles.

    Raises:
        ArtifactError: the graph or a module cannot be loaded, the graph needs other inputs than
            tokens give, or it pools nothing and no pooling is named.
        ConfigError: onnxruntime is not installed.
    """
    home = home_of(file)
    if foreign := foreign_modules(home):
        raise ArtifactError(
            f"the modules {foreign} of {str(home)!r} are code that it brings itself"
        )
    stated = _read(home / "sentence_bert_config.json").get("max_seq_length")
    if stated and int(stated) != max(lengths.values()):
        lengths = {"query": int(stated), "document": int(stated)}
    graph = _OnnxModule(file, home, lengths)
    behind = [one for one in _modules(home) if not (graph.pools and _pools(one))]
    if not graph.pools and not any(map(_pools, behind)):
        raise ArtifactError(
            f"{str(file)!r} gives a vector for each token, and {str(home)!r} names no pooling: "
            "copy modules.json and 1_Pooling of the model there"
        )
    prompts = _read(home / "config_sentence_transformers.json").get("prompts")
    return SentenceTransformer(modules=[graph, *behind], prompts=prompts, device="cpu")


def _pools(module: Any) -> bool:
    return type(module).__name__ in ("Pooling", "Dense")


def _modules(home: Path) -> Iterator[Any]:
    """Load the modules of a folder that follow its transformer."""
    path = home / "modules.json"
    if not path.is_file():
        return
    for entry in json.loads(path.read_text(encoding="utf-8"))[1:]:
        module, _, name = str(entry["type"]).rpartition(".")
        try:
            yield load(f"{module}:{name}").load(str(home / entry["path"]))
        except (OSError, ValueError, TypeError, ImportError) as error:
            raise ArtifactError(
                f"cannot load {entry['type']} from {str(home / entry['path'])!r}: {error}"
            ) from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {str(path)!r}: {error}") from error
    return dict(found)


class _OnnxModule(InputModule):  # type: ignore[misc] # the base class is not typed
    """Module of sentence-transformers that tokenises texts and runs a graph of onnxruntime."""

    def __init__(self, file: Path, home: Path, lengths: Mapping[Role, int]) -> None:
        super().__init__()
        from transformers import AutoTokenizer

        try:
            import onnxruntime
        except ImportError:
            raise ConfigError(
                f"the ONNX file {str(file)!r} needs onnxruntime, which is not installed: pip "
                "install onnxruntime"
            ) from None
        try:
            self._session = onnxruntime.InferenceSession(
                str(file), providers=["CPUExecutionProvider"]
            )
            self.tokenizer = AutoTokenizer.from_pretrained(str(home), trust_remote_code=False)
        except Exception as error:
            # onnxruntime's errors have no common class.
            raise ArtifactError(f"cannot load the graph {str(file)!r}: {error}") from error
        self._lengths = lengths
        self._inputs = {one.name: one.type for one in self._session.get_inputs()}
        unknown = [
            f"{name} ({kind})"
            for name, kind in self._inputs.items()
            if name not in _INPUTS or kind not in _NUMBERS
        ]
        if unknown:
            raise ArtifactError(
                f"the graph {str(file)!r} has the inputs {', '.join(unknown)}, which the tokens of "
                f"a text do not give; allowed: {', '.join(_INPUTS)}, as integers, floats or "
                "booleans. Export the model again without them, or serve it and verify its address"
            )
        outputs = {one.name: one for one in self._session.get_outputs()}
        self._output = _VECTORS if _VECTORS in outputs else next(iter(outputs))
        self.pools = len(outputs[self._output].shape) == 2

    @property
    def max_seq_length(self) -> int:
        """Maximum tokens of a text in any role."""
        return max(self._lengths.values())

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, task: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Tokenise texts after their prompt, cut to the maximum length of their role (`task`)."""
        given = [(prompt or "") + text for text in inputs]
        length = self._lengths["query" if task == "query" else "document"]
        options: dict[str, Any] = {"truncation": True, "max_length": length}
        made = self.tokenizer(given, padding=True, return_tensors="pt", **options)
        features = dict(made)
        if prompt:
            ids = self.tokenizer(prompt)["input_ids"]
            features["prompt_length"] = len(ids) - (ids[-1] in self.tokenizer.all_special_ids)
        return features

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Run the graph; add its vectors of tokens or of texts to the features."""
        mask = features["attention_mask"]
        given = {**features, _POSITIONS: (mask.cumsum(1) - 1).clamp(min=0)}
        given.setdefault(_TYPES, torch.zeros_like(mask))
        fed: dict[str, Any] = {
            name: np.asarray(given[name], _NUMBERS[kind]) for name, kind in self._inputs.items()
        }
        made = torch.from_numpy(self._session.run([self._output], fed)[0]).float()
        features[_VECTORS if self.pools else "token_embeddings"] = made
        return features

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Refuse: the graph is verified, and saved nowhere."""
        raise NotImplementedError(output_path)
