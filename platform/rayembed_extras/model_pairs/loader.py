"""Form of references to pairs of models, `pair:QUERIES::DOCUMENTS`."""

from rayembed.errors import ConfigError
from rayembed.evaluation.model_spec import ModelLoader

SCHEME, SEPARATOR = "pair:", "::"
"""No shell expands these signs and YAML reads them as text; paths and addresses have no `::`."""


def parse_pair(reference: str) -> tuple[str, str]:
    """Divide the reference of a pair into the query model's and the document model's.

    Raises:
        ConfigError: it does not name two models.
    """
    parts = reference.removeprefix(SCHEME).split(SEPARATOR)
    if len(parts) != 2 or not all(parts) or any(part.startswith(SCHEME) for part in parts):
        raise ConfigError(
            f"cannot read the pair of models {reference!r}; write {SCHEME}QUERIES{SEPARATOR}"
            f"DOCUMENTS with a model reference on each side, such as "
            f"{SCHEME}models:/support@candidate{SEPARATOR}models:/support@champion"
        )
    return parts[0], parts[1]


PAIR = ModelLoader(
    lambda reference: reference.startswith(SCHEME),
    "rayembed_extras.model_pairs.pair_spec:pair_spec",
    names_others=True,
)
