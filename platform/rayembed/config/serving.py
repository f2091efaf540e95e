"""Serving settings: address, request limits, replicas."""

from pydantic import Field, PositiveInt

from rayembed.config.backbone import DtypeSetting
from rayembed.config.settings import Settings
from rayembed.config.types import Reference


class Limits(Settings):
    """Limits of a server; requests beyond them are refused with a message, never truncated."""

    texts: PositiveInt = 2048
    """Maximum texts of one request, as in OpenAI's own server."""
    characters: PositiveInt = 100_000
    """Maximum characters of one text. The model reads the first tokens up to its own maximum
    length."""
    body_bytes: PositiveInt = 64 * 2**20
    """Maximum bytes of one request's body."""
    waiting_texts: PositiveInt = 16_384
    """Maximum texts queued in a replica; further requests are told to retry later."""


class ServingConfig(Settings):
    """Settings of a served model."""

    model: Reference = Field(min_length=1)
    """`models:/name@alias`, `models:/name/version`, or an asset reference of a model (a folder,
    `hf://org/name@revision`, `s3://…`, `gs://…`, `pypi://…`)."""
    name: str | None = None
    """Model name in requests; None: the registered name, or the last part of the reference."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback opens the server to the network (see
    `api_key_env`)."""
    port: int = Field(default=8000, ge=1, le=65535)
    api_key_env: str = "RAYEMBED_API_KEY"
    """Environment variable of the job with the bearer token that requests must have; if unset,
    everybody is served."""
    replicas: PositiveInt = 1
    """Copies of the model, each with its own queue; Ray Serve distributes requests."""
    cpus_per_replica: float = Field(default=1.0, gt=0.0)
    use_gpu: bool = False
    """Whether each replica has a GPU."""
    threads_per_replica: PositiveInt | None = None
    """Torch threads of a replica; None: `cpus_per_replica`, rounded down, at least 1."""
    dtype: DtypeSetting = "auto"
    """Number type of weights and activations; `auto`: the one that each replica's machine computes
    fast."""
    tokens_per_batch: PositiveInt = 16_384
    """Maximum tokens of pending requests that are embedded together; a longer request is processed
    alone. 1 embeds each request by itself."""
    limits: Limits = Limits()
    tracking_uri: Reference | None = None
    """MLflow's address for `models:/…`; None: the SQLite file in `storage_path`."""
    storage_path: Reference = Field(default="outputs", min_length=1)
    """Result storage of training jobs, which holds MLflow's SQLite file."""
