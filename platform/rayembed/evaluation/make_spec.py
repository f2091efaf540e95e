"""From a model's reference to its spec, by the loader that the reference names."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from rayembed.config.evaluation import BM25, ModelUnderTest
from rayembed.errors import ConfigError
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.mteb_spec import mteb_spec
from rayembed.evaluation.prompts import check_instructions
from rayembed.evaluation.rayembed_spec import rayembed_spec
from rayembed.evaluation.sentence_spec import sentence_spec
from rayembed.hardware import Precision


def make_spec(
    settings: ModelUnderTest,
    *,
    tracking_uri: str | None = None,
    own_tasks: Iterable[str] = (),
    on: Precision | str | None = None,
) -> ModelSpec:
    """The spec of the model that the settings name; no weights are loaded.

    Args:
        own_tasks: names of tasks that mteb does not have and instructions may be given for.
        tracking_uri: MLflow's address, for `models:/…`; None: `MLFLOW_TRACKING_URI`.
        on: what will compute, for the number type `auto`; see `hardware.settled`.

    Raises:
        ArtifactError: an incomplete folder, or a model that is not supported.
        AssetError: the reference leads nowhere.
        ConfigError: settings that do not fit the model; instructions for unknown tasks; `bm25`,
            which embeds nothing.
        TrackingError: MLflow is away.
    """
    check_instructions(settings.prompts, own_tasks)
    match loader_of(settings.reference):
        case "bm25":
            raise ConfigError("bm25 has no vectors; rayembed.evaluation.bm25.Bm25 searches itself")
        case "sentence-transformers":
            return sentence_spec(settings, on=on)
        case "mteb":
            return mteb_spec(settings, on=on)
        case "rayembed":
            return rayembed_spec(settings, tracking_uri=tracking_uri, on=on)


def loader_of(reference: str) -> Literal["bm25", "mteb", "rayembed", "sentence-transformers"]:
    """Loader of the model that a reference names.

    `org/name` is a folder of this machine where there is one, else a model of mteb or of the hub.
    """
    if reference == BM25:
        return "bm25"
    if reference.startswith("st:"):
        return "sentence-transformers"
    if reference.startswith("mteb:"):
        return "mteb"
    plain = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?: \(.+\))?", reference)
    if plain and not Path(reference).exists():
        return "mteb"
    return "rayembed"
