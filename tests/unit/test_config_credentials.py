"""Settings go into MLflow, files and model cards: what must not stand there is refused."""

import pytest

from rayembed.config.credentials import refuse_credentials
from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.recipes.catalogue import get_recipe

SETTINGS = [
    "placement.tracking_uri",
    "placement.storage_path",
    "data.root",
    "data.datasets.wiki-description.source.path",
    "data.datasets.wiki-description.mining.teacher",
    "model.backbone.path",
    "evaluation.wikipedia.source",
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
    with pytest.raises(ConfigError, match="baselines: the address"):
        override(get_recipe("biencoder"), ["evaluation.baselines=[bm25, 's3://k:s@bucket/x']"])


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
    ],
)
def test_forms_of_credentials(address):
    with pytest.raises(ValueError, match="Leave it out"):
        refuse_credentials(address)


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
    ],
)
def test_addresses_without_credentials_stay(address):
    assert refuse_credentials(address) == address
