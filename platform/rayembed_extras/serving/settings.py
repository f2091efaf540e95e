"""Serving settings: address, request limits, replicas."""

import re
from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.backbone import DtypeSetting, Tf32
from rayembed.config.settings import Settings
from rayembed.config.types import (
    ModelReference,
    PlainName,
    Reference,
    StoragePath,
    UseGpu,
    unique_names,
)


class Limits(Settings):
    """Limits of a server; requests beyond them are refused with a message."""

    texts: PositiveInt = 2048
    """Maximum texts of one request, as in OpenAI's own server."""
    characters: PositiveInt = 100_000
    """Maximum characters of one text. The model reads the first tokens up to its own maximum
    length; the answer lists the texts that were longer, and `truncate` false refuses them."""
    body_bytes: PositiveInt = 32 * 2**20
    """Maximum bytes of one request's body: 2,048 texts of 16,000 ASCII characters, or of 2,700
    characters escaped by the client (`\\uXXXX`). While a body is parsed the server answers nothing
    else: a tenth of a second for 32 MiB of texts, up to two where they are brackets."""
    waiting_bytes: PositiveInt = 512 * 2**20
    """Maximum total bytes of bodies that are still being received. Above it the
    largest one gets an error that asks to retry later, so that slow clients do not block small
    requests."""
    body_seconds: PositiveFloat = 60.0
    """Maximum seconds from a request's first byte until its body is complete."""
    results: PositiveInt = 1000
    """Maximum results of a search (`k`) for one query."""
    bm25_rows: PositiveInt = 100_000
    """Maximum rows of an index over which a hybrid search builds BM25 in memory, at its first
    request. LanceDB tables with a full-text index have no limit."""
    waiting_texts: PositiveInt = 16_384
    """Maximum texts queued in a replica; further requests get an error that asks to retry later."""
    request_seconds: PositiveFloat = 300.0
    """Maximum seconds of one request, from its first byte on; then the client gets an error and the
    work is cancelled."""

    @model_validator(mode="after")
    def _check_bytes(self) -> Self:
        if self.waiting_bytes < self.body_bytes:
            raise ValueError(
                f"waiting_bytes {self.waiting_bytes} is below body_bytes {self.body_bytes}, so "
                "the largest request bodies could never be received; raise waiting_bytes or "
                "lower body_bytes"
            )
        return self


class Autoscaling(Settings):
    """Range of the number of copies that Ray Serve adds and removes with the number of ongoing
    requests.
    """

    max_replicas: PositiveInt = 2
    """Maximum copies of the model; `replicas` is the minimum."""
    target_requests: PositiveFloat = 16.0
    """Ongoing requests for each copy that Serve aims at."""


class ServedModel(Settings):
    """Settings of one served model and its copies."""

    name: str = Field(pattern=r"^[^:\x00-\x1f\x7f\x85\u2028\u2029]+$")
    """Name in requests, without colon, line break or other control character."""
    model: ModelReference = Field(min_length=1)
    """`models:/name@alias`, `models:/name/version`, or an asset reference of a model (a folder,
    `hf://org/name@revision`, `s3://…`, `gs://…`, `pypi://…`)."""
    replicas: PositiveInt = 1
    """Copies of the model, each with its own queue; Ray Serve distributes requests."""
    autoscaling: Autoscaling | None = None
    """More copies under load; None: always `replicas`."""
    cpus_per_replica: float = Field(default=1.0, gt=0.0)
    use_gpu: UseGpu = "auto"
    """Whether each replica has a GPU. `auto`: where the cluster's live nodes have GPUs for all
    replicas of the server."""
    threads_per_replica: PositiveInt | None = None
    """Torch threads of a replica; None: `cpus_per_replica`, rounded down, at least 1."""
    dtype: DtypeSetting | Tf32 = "auto"
    """Number type of weights and activations; `auto`: as saved (float16 becomes float32), but
    float32 if the replica's machine emulates bfloat16, as in loading and scoring. `tf32`: float32,
    but a GPU rounds what its products take, which is several times faster; vectors differ from
    those of an index in the last of three digits."""
    tokens_per_batch: PositiveInt | None = None
    """Maximum tokens embedded together, from one request or several: a larger request takes several
    batches, with other requests' batches between them. None: 16384 on a GPU, 2048 on a CPU. 1
    embeds each text by itself."""
    token_arrays: ModelReference | None = None
    """Tokenizer of numbers in an `input`: `model` for the model's own, or an asset reference of
    another one (a folder or file with a tokenizer.json). None: refused, since numbers of another
    tokenizer are another text."""

    index: PlainName | None = None
    """Index to which the model's vectors belong, of the same `storage_path`. Queries get the
    dimensions and instruction of the index, and its adapter where another model made it;
    `/search` searches it. A model that does not fit is not ready."""

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.autoscaling is not None and self.autoscaling.max_replicas < self.replicas:
            raise ValueError(
                f"autoscaling.max_replicas {self.autoscaling.max_replicas} is below replicas "
                f"{self.replicas}; raise autoscaling.max_replicas or lower replicas"
            )
        return self


def named_reference(text: str) -> dict[str, str]:
    """Split `NAME=REFERENCE` into both; a plain reference is named by its last part.

    The name of `models:/name@alias` and `models:/name/3` is `name`.
    """
    found = re.fullmatch(r"([^:/=]+)=(.+)", text)
    if found:
        return {"name": found[1], "model": found[2]}
    if text.startswith("models:/"):
        return {"name": re.split("[@/]", text.removeprefix("models:/"))[0], "model": text}
    last = text.partition("?")[0].rstrip("/").rpartition("/")[2]
    return {"name": last.partition("@")[0], "model": text}


class ServingConfig(Settings):
    """Settings of a server of one or several models."""

    models: Annotated[tuple[ServedModel, ...], unique_names("models")] = Field(min_length=1)
    """The models; requests choose one by name."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback opens the server to the network (see
    `api_key_env`)."""
    port: int = Field(default=8000, ge=1, le=65535)
    api_key_env: str = "RAYEMBED_API_KEY"
    """Environment variable of the job with the bearer token that requests must send, or several
    tokens separated by commas, each sufficient; if unset, no token is needed."""
    limits: Limits = Limits()
    tracking_uri: Reference | None = None
    """MLflow's address for `models:/…`; None: the SQLite file in `storage_path`."""
    storage_path: StoragePath = Field(default="outputs", min_length=1)
    """Result storage of jobs, which holds MLflow's SQLite file and the records of indexes."""
