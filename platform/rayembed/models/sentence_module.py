"""Wrap a rayembed model as a module of sentence-transformers.

`SentenceTransformer(folder)` finds this class by its dotted path in `modules.json`. Since version 6
it asks for `trust_remote_code=True` whenever a class is not of sentence-transformers itself, unless
it was told of that class before, which importing this module does. Nothing else of the folder is
run either way: what rayembed writes is numbers and JSON.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule
from sentence_transformers.util import load_dir_path
from torch import Tensor

from rayembed.assets.finite import check_finite
from rayembed.assets.sentence_modules import OWN_MODULE
from rayembed.config.backbone import Dtype
from rayembed.config.types import Role
from rayembed.errors import DataError
from rayembed.models.loading.files import read_json
from rayembed.models.loading.load import computed_dtype, load_model
from rayembed.models.loading.saved_folder import SETTINGS_FILE
from rayembed.models.passes.encoding import corpus_context
from rayembed.models.transformer_model import TransformerModel


class SentenceModule(InputModule):  # type: ignore[misc] # the base class is not typed
    r"""The only module of a `SentenceTransformer`; it tokenises and embeds with a rayembed
    model.

    A prompt stands literally before the text, so that `Instruct: …\nQuery: ` gives what an
    instruction gives: NV-Embed keeps it out of the pool, Causal2Vec puts the Contextual token
    behind it and keeps it from the encoder. Texts encoded without `encode_query` or
    `encode_document` count as queries when they have a prompt, else as documents, which decides
    their maximum length alone. Empty texts are embedded by their special tokens, as
    sentence-transformers does.

    CDE embeds a corpus's texts in the context of some of its documents: `model[0].set_corpus(…)`
    names them, for queries and documents alike, and is saved with the model.
    """

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.model = model

    @property
    def tokenizer(self) -> Any:
        """The underlying tokenizer of transformers."""
        return self.model.tokenizer.pretrained

    @property
    def max_seq_length(self) -> int:
        """Maximum tokens of a text in any role; the setter changes all roles."""
        return max(self.model.tokenizer.max_lengths.values())

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self.model.tokenizer.max_lengths = {"query": value, "document": value}

    def get_embedding_dimension(self) -> int:
        """Return the width of the vectors."""
        return self.model.dimensions[0]

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, task: str | None = None, **_: Any
    ) -> dict[str, Tensor]:
        """Tokenise and collate the texts to a micro-batch.

        Raises:
            DataError: an input that is not a text.
        """
        for text in inputs:
            if not isinstance(text, str):
                raise DataError(f"only texts can be embedded, not {type(text).__name__}")
        role: Role = "query" if task == "query" or (task is None and prompt) else "document"
        tokenizer = self.model.tokenizer
        prompts = [prompt or ""] * len(inputs)
        return tokenizer.collate(tokenizer.with_prompts(inputs, prompts, role, allow_empty=True))

    def set_corpus(self, documents: Sequence[str], *, seed: int = 0) -> None:
        """Set the corpus whose documents are the context of all later texts (CDE).

        Args:
            documents: of the corpus, of which as many are drawn as the model takes; `[]`: without
                a corpus.
            seed: of the draw.

        Raises:
            DataError: a model that takes no context, or a single text.
        """
        if isinstance(documents, str):
            raise DataError(
                "set_corpus needs a sequence of texts, the documents of the corpus, but got the "
                f"single text {documents!r}"
            )
        if not self.model.uses_context:
            raise DataError(f"a model of kind {self.model.config.kind!r} does not use a corpus")
        self.model.set_corpus(corpus_context(self.model, documents, seed=seed))

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Embed a micro-batch; add `sentence_embedding`, (B, D) float32 unit vectors, to its
        features.
        """
        features["sentence_embedding"] = self.model(features).embeddings
        return features

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the model's files into the folder that sentence-transformers saves to.

        Raises:
            ArtifactError: a weight is not finite, or what the model gives for a text.
        """
        check_finite(self.model.state_dict().items(), "the model")
        self.model.check_passes("the model")
        self.model.write_files(Path(output_path))

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        **options: Any,
    ) -> "SentenceModule":
        """Load a module that `save` wrote, from a folder or a hub repository."""
        names = ("token", "cache_folder", "revision", "local_files_only")
        where = {name: options[name] for name in names if name in options}
        folder = load_dir_path(model_name_or_path, subfolder=subfolder, **where)
        # Where it will be moved is not told: to a GPU, where there is one.
        return cls(load_model(folder, dtype=computed_dtype(Path(folder))))


# The type that `modules.json` names, as the loader of sentence-transformers looks it up before it
# asks for the flag: the class is here already, so that none is imported on the folder's word.
SentenceTransformer._module_classes = {
    **SentenceTransformer._module_classes,
    OWN_MODULE: SentenceModule,
}


def as_sentence_transformer(
    folder: str | Path,
    *,
    device: str | None = None,
    truncate_dim: int | None = None,
    dtype: Dtype | None = None,
) -> SentenceTransformer:
    """Make a `SentenceTransformer` from a model that rayembed saved, with its prompts.

    What `SentenceTransformer(folder)` gives, in rayembed's own number type; a plain bi-encoder also
    keeps its own maximum length of each role.

    Args:
        device: None: a GPU where there is one.
        truncate_dim: width at which vectors are cut; None: whole ones.
        dtype: number type; None: as saved, but float32 where the device emulates bfloat16.

    Raises:
        ArtifactError: no saved model there.
    """
    folder = Path(folder)
    read_json(folder / SETTINGS_FILE)
    prompts = read_json(folder / "config_sentence_transformers.json").get("prompts")
    dtype = dtype or computed_dtype(folder, on=device)
    return SentenceTransformer(
        modules=[SentenceModule(load_model(folder, dtype=dtype))],
        prompts=prompts,
        similarity_fn_name="cosine",
        device=device,
        truncate_dim=truncate_dim,
    )
