"""The serving job from its arguments to a model that answers until it is stopped."""

import logging
import os
import signal
import threading

from rayembed.assets.resolver import resolve_model
from rayembed.config.serving import ServingConfig
from rayembed.pipeline.job import Job, JobContext, Reader, option
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry.mlflow_run import as_tracking_error
from rayembed.registry.registered_model import SCHEME, connect, get_version, parse_reference
from rayembed.registry.tracking_uri import resolve_tracking_uri

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def pin(config: ServingConfig) -> tuple[ServingConfig, str, str | None]:
    """The config with an alias as the version that it now is, the served name, MLflow's address.

    So all copies of the model are of one version, also those that start later.

    Raises:
        RayembedError: no such version or model, or no model that can be served.
    """
    if not config.model.startswith(SCHEME):
        from rayembed.models.load import check_loadable

        check_loadable(resolve_model(config.model))
        last = config.model.partition("?")[0].rstrip("/").rpartition("/")[2]
        return config, config.name or last.partition("@")[0], None
    reference = parse_reference(config.model)
    storage = absolute_storage(config.storage_path)
    tracking_uri = resolve_tracking_uri(config.tracking_uri, storage, make_folder=False)
    client = connect(tracking_uri)
    with as_tracking_error(tracking_uri):
        version = get_version(client, reference)
    pinned = f"{SCHEME}{reference.name}/{version.version}"
    if pinned != config.model:
        logger.info("%s is %s", config.model, pinned)
    pinned_config = config.model_copy(update={"model": pinned})
    return pinned_config, config.name or reference.name, tracking_uri


def _serve(config: ServingConfig, context: JobContext) -> None:
    """Return when the process was told to stop, after the application was taken away."""
    config, name, tracking_uri = pin(config)
    keys = [key.strip() for key in os.environ.get(config.api_key_env, "").split(",")]
    keys = [key for key in keys if key]
    if config.host not in _LOOPBACK and not keys:
        logger.warning(
            "everybody who reaches %s:%d is served; set %s to a token to ask for it",
            config.host,
            config.port,
            config.api_key_env,
        )
    # Ray and the web server; nothing before needs them.
    from rayembed.pipeline.on_ray import connect as connect_to_ray
    from rayembed.serving import on_ray
    from rayembed.serving.app import digest

    connect_to_ray()
    try:
        on_ray.start(
            config,
            name=name,
            tracking_uri=tracking_uri,
            key_digests=frozenset(digest(key) for key in keys),
        )
        address = f"http://{config.host}:{config.port}/v1"
        context.out.write(
            f"{config.model} is served as {name!r} at {address}/embeddings; stop it with Ctrl-C\n"
            f"  OpenAI(base_url={address!r}, api_key=…).embeddings.create("
            f"model='{name}:query', input=[…])\n"
        )
        context.out.flush()
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # until now they ended the start
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()
    finally:
        on_ray.stop()
    context.err.write("stopped\n")


_READER = Reader(
    kind=ServingConfig,
    examples="use_gpu=true replicas=2 tokens_per_batch=65536 limits.texts=512",
    own=(
        option(
            "--model REFERENCE",
            "models:/name@champion, models:/name/3, a folder, hf://org/name@revision, …",
            sets="model",
            required=True,
        ),
        option("--name NAME", "what requests call the model; default: as registered"),
        option("--host HOST", "address to listen on; default: 127.0.0.1", sets="host"),
        option("--port PORT", "port to listen on; default: 8000", sets="port", type=int),
        option(
            "--tracking-uri URI",
            "MLflow's address for models:/…; default: the SQLite file in outputs/",
            sets="tracking_uri",
        ),
    ),
)

run_serve_job = Job(options=_READER.options, read=_READER, run=_serve, stopped="stopped")
"""The job that serves a model until it is stopped."""
