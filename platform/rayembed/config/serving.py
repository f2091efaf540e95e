"""How a model is served: where it listens, what it takes, how many copies of it run."""

from pydantic import Field, PositiveInt, field_validator

from rayembed.config.backbone import DtypeSetting
from rayembed.config.credentials import refuse_credentials
from rayembed.config.settings import Settings


class Limits(Settings):
    """What a server takes; more is refused with a message, never cut silently."""

    texts: PositiveInt = 2048
    """Of one request, as OpenAI's own server has it."""
    characters: PositiveInt = 100_000
    """Of one text. The model reads the first tokens up to its own maximum length."""
    body_bytes: PositiveInt = 64 * 2**20
    """Of one request's body."""
    waiting_texts: PositiveInt = 16_384
    """That may wait for the model in one copy of it; requests beyond are told to come later."""


class ServingConfig(Settings):
    """A served model."""

    model: str = Field(min_length=1)
    """`models:/name@alias`, `models:/name/version`, or an asset reference of a model (a folder,
    `hf://org/name@revision`, `s3://…`, `gs://…`, `pypi://…`)."""
    name: str | None = None
    """What requests call it; None: the registered name, or the last part of the reference."""
    host: str = "127.0.0.1"
    """Address to listen on; others than loopback let the network in (see `api_key_env`)."""
    port: int = Field(default=8000, ge=1, le=65535)
    api_key_env: str = "RAYEMBED_API_KEY"
    """Environment variable of the job with the bearer token that requests must bring; where it is
    not set everybody is served."""
    replicas: PositiveInt = 1
    """Copies of the model, each with its own queue; Ray Serve shares requests among them."""
    cpus_per_replica: float = Field(default=1.0, gt=0.0)
    use_gpu: bool = False
    """Whether each copy has a GPU."""
    threads_per_replica: PositiveInt | None = None
    """Threads of torch; None: `cpus_per_replica`, rounded down, at least 1."""
    dtype: DtypeSetting = "auto"
    """Of weights and activations; `auto`: what the machine of each copy computes fast."""
    tokens_per_batch: PositiveInt = 16_384
    """Requests that wait together are embedded together up to so many tokens; one longer request
    goes alone. 1 embeds each request by itself."""
    limits: Limits = Limits()
    tracking_uri: str | None = None
    """MLflow's address for `models:/…`; None: the SQLite file in `storage_path`."""
    storage_path: str = Field(default="outputs", min_length=1)
    """Where training jobs put their results, with MLflow's SQLite file."""

    _no_credentials = field_validator("model", "tracking_uri", "storage_path")(refuse_credentials)
