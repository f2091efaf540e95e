"""Settings go into MLflow, files and model cards: what must not stand there is refused."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import rayembed.config
from rayembed.config.backbone import BackboneConfig
from rayembed.config.credentials import (
    check_address,
    refuse_credentials,
    without_credentials,
)
from rayembed.config.override import override
from rayembed.config.settings import Settings
from rayembed.config.table import COMPANIONS
from rayembed.config.types import Reference
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe

PLATFORM = Path(rayembed.__file__).parents[1]
SETTINGS = [
    "placement.tracking_uri",
    "placement.storage_path",
    "data.root",
    "data.datasets.wiki-description.source.path",
    "data.datasets.wiki-description.mining.teacher",
    "model.backbone.path",
    "evaluation.own_sets.WikiSentenceRetrieval.path",
    "evaluation.own_sets.WikiTopicClassification.train",
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_password_in_an_address_is_refused_and_not_repeated(setting):
    run = get_recipe("nvembed-quickstart")
    with pytest.raises(ConfigError, match=f"{setting.rpartition('.')[2]}: the address") as error:
        override(run, [f"{setting}=s3://KEYID:hunter2@bucket/x"])
    assert "hunter2" not in str(error.value)
    assert "AWS_SECRET_ACCESS_KEY" in str(error.value)
    assert "MLFLOW_TRACKING_PASSWORD" in str(error.value)


def test_a_password_of_a_baseline_is_refused():
    with pytest.raises(ConfigError, match=r"baselines\.1: the address"):
        override(get_recipe("biencoder"), ["evaluation.baselines=[bm25, 's3://k:s@bucket/x']"])


def test_what_is_no_assignment_does_not_repeat_a_password():
    with pytest.raises(ConfigError, match="expected path") as error:
        override(get_recipe("biencoder"), ["s3://KEYID:hunter2@bucket/x"])
    assert "hunter2" not in str(error.value)


ADDRESS = "s3://KEYID:hunter2@bucket/x"

PLAIN_TEXTS = {
    # Which member of a table, in the base class of its settings.
    "kind",
    # Words that stand before texts, and what they are about.
    "document_instruction", "document_prefix", "instruction", "instructions", "prompt_end",
    "prompt_start", "query_instruction", "query_prefix", "topic",
    # Columns of a file, and what is written in them.
    "column", "contradiction", "document", "document_id", "entailment", "first", "hypothesis", "id",
    "label", "values",
    "language", "names", "negatives", "positive", "premise", "query", "query_id", "score", "second",
    "text", "title",
    # Names of other things: tasks and their splits, experiments, layers, domains of a sweep.
    "GuardConfig.own_sets",
    "benchmarks", "experiment", "languages", "revision", "split", "target_modules",
    # Names in some classes, references in others.
    "MtebValidation.tasks", "Scores.tasks", "BeirSource.query",
}  # fmt: skip
"""Settings of the core that take any text and name no place."""

PLAIN_TEXTS_OF = {
    "backbone": {"BackboneRun.tasks"},
    "compression": {
        *("CalibrationConfig.documents", "CalibrationConfig.queries", "CpuGraph.skip"),
        *("CompressionPlacement.registered_model", "Quantised.skip"),
    },
    "index_upgrades": {"UpgradeRun.store_index"},
    "indexing": {
        *("Documents.metadata", "PgvectorStore.schema_name", "QdrantStore.payload_indexes"),
        "StoreSettings.index",
        # Of a record that jobs write, from settings that are checked.
        *("MadeBy.dtype", "MadeBy.number_type", "MadeBy.weights", "Manifest.before"),
        *("Manifest.current", "Manifest.name", "Manifest.store", "TableRecord.adapter"),
        *("TableRecord.counts", "TableRecord.documents", "TableRecord.metadata"),
        *("TableRecord.index", "TableRecord.table", "TableRecord.updated"),
    },
    "pruning": {"Pruning.skip"},
    "serving": {"ServingConfig.api_key_env", "host"},
    "sources": {"subset", "task"},
    "sweeps": {"_OfRecipe.recipe", "_OfRecipe.set", "space"},
    "synthesis": {"OpenAICompatible.model", "quantization", "topics", "wanted"},
}
"""Those of optional features and of the papers, by their folder."""


def classes_of_settings() -> list[type[Settings]]:
    for module in pkgutil.iter_modules(rayembed.config.__path__):
        importlib.import_module(f"rayembed.config.{module.name}")
    for package in COMPANIONS:
        for path in (PLATFORM / package).rglob("*.py"):
            if re.search(r"(Settings|Document)\)", path.read_text()):
                name = ".".join(path.relative_to(PLATFORM).with_suffix("").parts)
                importlib.import_module(name)
    found = list(Settings.__subclasses__())
    for cls in found:
        found += [below for below in cls.__subclasses__() if below not in found]
    return [cls for cls in found if cls.__module__.startswith("rayembed")]


def takes_the_address(cls: type[Settings], name: str) -> bool:
    """Whether the setting accepts the address, alone, in a list, or in a mapping."""
    for value in (ADDRESS, [ADDRESS], {"key": ADDRESS}, {"en": ADDRESS}):
        try:
            cls.__pydantic_validator__.validate_assignment(cls.model_construct(), name, value)
        except ValidationError as error:
            if any(item["loc"][:1] == (name,) for item in error.errors()):
                continue
        except AttributeError:
            pass  # its own check passed; one of the whole class misses the other settings
        return True
    return False


def owner_of(cls: type[Settings], name: str) -> str:
    """Name of the class that declares the setting."""
    return next(base.__name__ for base in reversed(cls.__mro__) if name in _declared(base))


def _declared(cls: type) -> dict[str, Any]:
    return inspect.get_annotations(cls)


def test_every_text_of_every_class_is_a_reference_or_known_to_name_no_place():
    classes = classes_of_settings()
    assert len(classes) > 60
    accepted = {
        f"{owner_of(cls, name)}.{name}"
        for cls in classes
        for name in cls.model_fields
        if takes_the_address(cls, name)
    }
    folders = {path.name for package in COMPANIONS for path in (PLATFORM / package).glob("*")}
    plain = PLAIN_TEXTS.union(*(PLAIN_TEXTS_OF[name] for name in folders & {*PLAIN_TEXTS_OF}))
    unknown = {n for n in accepted if not {n, n.partition(".")[2]} & plain}
    assert not unknown, "make it a Reference, or name it among PLAIN_TEXTS"
    used = {text for n in accepted for text in (n, n.partition(".")[2])}
    assert used >= plain, "the list names what is no setting any more"


def test_a_new_setting_of_any_shape_is_found():
    class Forgotten(Settings):
        place: str
        places: tuple[str, ...]
        by_name: dict[str, str]
        told: Reference
        each: tuple[Reference, ...]
        named: dict[str, Reference] | None

    taken = [name for name in Forgotten.model_fields if takes_the_address(Forgotten, name)]
    assert taken == ["place", "places", "by_name"]


def test_a_password_behind_the_name_of_a_loader_is_refused():
    for loader in ("st:", "mteb:"):
        with pytest.raises(ValueError, match="Leave it out"):
            refuse_credentials(f"{loader}{ADDRESS}")


@pytest.mark.parametrize(
    "address",
    [
        "http://user:hunter2@mlflow:5000",
        "https://hunter2@mlflow",
        "postgresql+psycopg2://mlflow:hunter2@db:5432/mlflow",
        "postgresql://mlflow:12hunter@db/mlflow",
        "s3://KEYID:hun/ter2@bucket/prefix",
        "s3://bucket/prefix?access_key=A&secret_key=hunter2",
        "mysql://db/mlflow?user=a&password=hunter2",
        "https://host/file?X-Amz-Signature=hunter2",
        "gs://bucket/x?access_token=hunter2",
        "s3://bucket/x?endpoint_override=http%3A%2F%2Fu%3Ahunter2@host",
        # An unquoted slash after digits is no port of a bucket, and a key may stand alone.
        "s3://KEYID:12/hunter2@bucket/x",
        "s3://hunter2@bucket/x",
        "http://user%3Ahunter2%40mlflow:5000",
        "s3%3A//KEYID:hunter2@bucket",
        # As pathlib leaves it.
        "s3:/KEYID:hunter2@bucket/x",
        "HTTPS://host/file?Sig=hunter2",
        "https://host/file?a=1&token=hunter2",
        "https://host/file?a=1;session_token=hunter2",
        "https://host/file?api-key=hunter2",
        "https://host/file?key=hunter2",
        "https://host/file?X-Amz-Security-Token=hunter2",
        "https://host/file?X-Goog-Signature=hunter2",
        "https://host/file?AWSAccessKeyId=hunter2",
        "https://host/file?se%63ret=hunter2",
        "https://host/file?secret%5Fkey=hunter2",
        "https://host/file#access_token=hunter2",
        "sets=s3://KEYID:hunter2@bucket/x",
        "http://u:hunter2@\u2100host/x",
        "http://[u:hunter2@host/x",
        "https://host/x?subscription-key=hunter2",
        "https://host/x?code=hunter2",
        "https://host/x?accessToken=hunter2",
        "s3://KEY%253Ahunter2%2540b/x",
        "s3://KEY%25253Ahunter2%252540b/x",
        "//u:hunter2@host/x",
        "st://u:hunter2@host/x",
        "of //u:hunter2@host/x",
    ],
)
def test_forms_of_credentials(address):
    with pytest.raises(ValueError, match="Leave it out") as error:
        refuse_credentials(address)
    assert "hunter2" not in str(error.value)
    with pytest.raises(ConfigError, match="--model: the address") as refused:
        check_address(address, "--model")
    assert "hunter2" not in str(refused.value)
    assert without_credentials(f"of {address} and more") == "…"


@pytest.mark.parametrize(
    "address",
    [
        None,
        "databricks",
        "http://mlflow:5000",
        "http://mlflow:5000/path@x",
        "postgresql://mlflow@db:5432/mlflow",
        "sqlite:////a:b@c/mlflow.db",
        "hf://org/name@main",
        "pypi://package==1.0/path?sha256=00",
        "s3://bucket/a:b?endpoint_override=http://localhost:9000&region=eu",
        "C:/a:b@c",
        "/shared/outputs",
        "gs://bucket/a@b:c",
        "models:/name@champion",
        "st:models/folder:a@b",
        "https://host/v1?tasks=a&page=2",
        "s3://bucket/keys/secret=1/part.parquet?region=eu",
        "https://host/v1?max_tokens=5",
        "https://host/v1?pagination_token=3&next_page_token=4&page-token=5",
        "https://host/v1?tokenizer=abc&keys=a&monkey=b&codes=c",
        "//host/share",
        "/folder//a:b@c",
        "s3://bucket/100%25/x",
        "",
    ],
)
def test_addresses_without_credentials_stay(address):
    assert refuse_credentials(address) == address


def test_a_raw_error_of_pydantic_repeats_no_address():
    with pytest.raises(ValidationError, match="Leave it out") as error:
        BackboneConfig(path=ADDRESS)
    assert "hunter2" not in str(error.value)
