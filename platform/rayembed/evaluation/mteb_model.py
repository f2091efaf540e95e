"""Metadata of a model for mteb."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mteb.models import ModelMeta


def model_meta(name: str, revision: str, **known: Any) -> "ModelMeta":
    """Metadata of a model for mteb; names without an organisation get `rayembed/`.

    The name and the revision are what mteb finds results by, so both must tell models apart.
    """
    from mteb.models import ModelMeta

    unknown = dict.fromkeys(
        (
            "loader",
            "release_date",
            "n_parameters",
            "memory_usage_mb",
            "max_tokens",
            "embed_dim",
            "license",
            "public_training_code",
            "public_training_data",
            "training_datasets",
            "similarity_fn_name",
        )
    )
    stated = {
        "name": name if "/" in name else f"rayembed/{name}",
        "revision": revision,
        "languages": ["eng-Latn"],
        "open_weights": True,
        "framework": ["PyTorch"],
        "use_instructions": False,
    }
    return ModelMeta(**{**unknown, **stated, **known})
