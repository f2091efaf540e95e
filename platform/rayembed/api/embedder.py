"""A loaded model: texts in, vectors out."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayembed.api.calls import EncodingProgress, check_addresses, reference_of
from rayembed.config.types import Role
from rayembed.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    import numpy as np

    from rayembed.registry.indexes import IndexSpace, NamedIndex


class Embedder:
    """A model that turns texts into vectors."""

    def __init__(self, model: Any, reference: str, index: "NamedIndex | None" = None) -> None:
        self.model = model
        """The underlying model, a `models.contract.EmbeddingModel`."""
        self.reference = reference
        self.index = index
        """Index to which all vectors belong; None: none."""

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        role: Role = "document",
        instruction: str | None = None,
        tokens_per_batch: int | None = None,
        allow_empty: bool = False,
    ) -> "np.ndarray":
        """Encode texts to float32 unit vectors: (D,) of one text, (N, D) of a sequence of them.

        A call of more than a few seconds shows its progress. Of a model that was loaded for an
        index, vectors belong to the index: D is the index's, an adapter maps queries, and without
        an instruction the index's own applies. Documents are computed in the number type of the
        index's documents, queries in that of the model: they may be of different types, since a
        cosine differs by rounding alone.

        Args:
            role: `query` or `document`, which decides prefixes and lengths.
            instruction: task definition before each text; None: the one that the model learnt for
                the role, if it is a single one; "": none.
            tokens_per_batch: padded tokens of a forward pass; None: by hardware.
            allow_empty: give a text without a visible character (empty, spaces, zero-width
                characters) the vector of the model's special tokens, in place of an error.

        Raises:
            ArtifactError: the model gives no finite numbers for texts, at the first batch of them.
            ConfigError: no such role; or the model was loaded for an index, which another model
                has made since, or documents are given and the model has an adapter for queries
                alone.
            DataError: what is given is no text, or a text has no visible character.
        """
        from rayembed.models.passes.encoding import encode

        space = None if self.index is None else self.index.space()
        if space is not None:
            space.check_role(role)
            instruction = space.instruction_of(role) if instruction is None else instruction
        with EncodingProgress() as progress, self._casting(space, role):
            vectors = encode(
                self.model,
                texts,
                role=role,
                instruction=instruction,
                tokens_per_batch=tokens_per_batch,
                allow_empty=allow_empty,
                progress=progress,
                finite=True,
            )
        if space is None:
            return vectors
        placed = space.vectors(vectors.reshape(-1, vectors.shape[-1]), role)
        return placed.reshape(*vectors.shape[:-1], space.dimensions)

    def _casting(self, space: "IndexSpace | None", role: Role) -> AbstractContextManager[Any]:
        """Compute linear layers in bfloat16, as `rayembed index` did, for documents of an index."""
        import torch

        if space is None or role != "document" or space.dtype != "bfloat16":
            return nullcontext()
        casting: Any = torch.autocast(self.model.device.type, torch.bfloat16)
        cast: AbstractContextManager[Any] = casting
        return cast

    def encode_query(self, texts: str | Sequence[str], **options: Any) -> "np.ndarray":
        """Encode queries to vectors; see `encode`."""
        return self.encode(texts, role="query", **options)

    def encode_document(self, texts: str | Sequence[str], **options: Any) -> "np.ndarray":
        """Encode documents to vectors; see `encode`."""
        return self.encode(texts, role="document", **options)

    def similarity(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Any
    ) -> "np.ndarray":
        """Cosine similarities of queries (rows) and documents (columns); a side given as a single
        text adds no axis.

        Options are those of `encode`.
        """
        import numpy as np

        vectors = self.encode_query(queries, **options)
        products = vectors @ self.encode_document(documents, **options).T
        found: np.ndarray = np.clip(products, -1, 1)
        return found

    def __repr__(self) -> str:
        width = self.model.dimensions[0] if self.index is None else self.index.space().dimensions
        return f"Embedder({self.reference!r}, width {width})"


def load(
    model: str | Path,
    *,
    output: str | Path = "outputs",
    device: str | None = None,
    for_index: str | None = None,
) -> Embedder:
    """Load a model for encoding.

    Args:
        model: folder of an export, an asset reference (`hf://org/name@revision`, `s3://…`), a
            registered model (`models:/name@alias`), or a short name (`all-MiniLM-L6-v2`).
        output: what `train` and `index` were given, in which the registry of a registered model
            and the records of indexes lie; MLFLOW_TRACKING_URI names a server.
        device: that encodes, such as `cuda:1` or `cpu`; None: a GPU where there is one. The model
            has its saved number type, but float32 where the device emulates bfloat16.
        for_index: name of an index to which all vectors shall belong. Where another model made it,
            the adapter that `rayembed upgrade` recorded for this one maps queries, and documents
            are refused. Where the index's documents were computed in float32, the model is loaded
            in float32; where in bfloat16, documents are computed so, too, also on a device that
            emulates it, which is slow.

    Raises:
        ConfigError: a GPU is asked for, and torch sees none; there is no such index, or another
            model made it and there is no adapter for this one.
        RayembedError: there is no such model, or it is not supported.
    """
    from rayembed.assets.resolver import resolve_model
    from rayembed.machine.device import set_allocator
    from rayembed.machine.hardware import default_device
    from rayembed.models.loading.load import load_model

    check_addresses(model=model, output=output, for_index=for_index)
    set_allocator()
    device = device or default_device()
    if device.startswith("cuda") and default_device() == "cpu":
        raise ConfigError(
            f"device={device!r}, but torch sees no GPU on this machine; leave device out, or give "
            "'cpu'"
        )
    reference = reference_of(model)
    if reference.startswith("models:/"):
        from rayembed.registry import registered_model as registry
        from rayembed.registry.tracking_uri import resolve_tracking_uri

        uri = resolve_tracking_uri(
            os.environ.get("MLFLOW_TRACKING_URI"), str(Path(output).absolute()), make_folder=False
        )
        try:
            folder = registry.find_folder(reference, uri)
        except ArtifactError as error:
            raise ArtifactError(
                f"{error} (looked in MLflow at {uri}; output= or MLFLOW_TRACKING_URI selects "
                "another address)"
            ) from None
    else:
        folder = resolve_model(reference)
    if for_index is None:
        return Embedder(load_model(folder, device=device), reference)
    index = _index_for(for_index, folder, output)
    space = index.space()
    exact = space.adapter is None and space.dtype == "float32"
    loaded = load_model(folder, dtype="float32" if exact else None, device=device)
    return Embedder(loaded, reference, index)


def _index_for(name: str, folder: Path, output: str | Path) -> "NamedIndex":
    """Open an index for the model in a folder."""
    from rayembed.models.loading.files import weights_fingerprint
    from rayembed.pipeline.storage import absolute_storage
    from rayembed.registry.indexes import open_index

    return open_index(absolute_storage(str(output)), name, weights_fingerprint(folder))
