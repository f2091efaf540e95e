"""Run the serving job: load a model as the arguments say, and answer requests until stopped."""

import logging
import os
import signal
import threading

from rayembed.assets.resolver import resolve_model
from rayembed.display.progress import doing
from rayembed.errors import ConfigError, require_packages
from rayembed.pipeline.job import Job, JobContext, Reader, option
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry.indexes import open_index
from rayembed.registry.registered_model import SCHEME, parse_reference, pinned_reference
from rayembed.registry.tracking_uri import resolve_tracking_uri
from rayembed_extras.serving.settings import ServedModel, ServingConfig, named_reference

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def pin(config: ServingConfig) -> ServingConfig:
    """Resolve MLflow's address, and replace each model alias by its current version.

    So all copies of a model are of one version, also those that start later.

    Raises:
        RayembedError: no such version, model or index, or no model that can be served.
    """
    tracking_uri = None
    named = [one.index for one in config.models if one.index is not None]
    if named:
        storage = absolute_storage(config.storage_path)
        config = config.model_copy(update={"storage_path": storage})
    for name in named:
        open_index(config.storage_path, name, "")  # raises where there is none
    if [parse_reference(one.model) for one in config.models if one.model.startswith(SCHEME)]:
        storage = absolute_storage(config.storage_path)
        tracking_uri = resolve_tracking_uri(config.tracking_uri, storage, make_folder=False)
    models = tuple(_pinned(model, tracking_uri) for model in config.models)
    return config.model_copy(update={"models": models, "tracking_uri": tracking_uri})


def _pinned(served: ServedModel, tracking_uri: str | None) -> ServedModel:
    if not served.model.startswith(SCHEME):
        from rayembed.models.loading.load import check_loadable

        config = check_loadable(resolve_model(served.model), embeds=False)
        for name in ("index", "token_arrays"):
            if not config.embeds and getattr(served, name) is not None:
                raise ConfigError(
                    f"models.{served.name}.{name} has no effect: the model {served.model!r} is a "
                    "reranker, which gives no vectors; leave it out"
                )
        return served
    pinned = pinned_reference(served.model, tracking_uri)
    if pinned != served.model:
        logger.info("serving the model %s, which now resolves to %s", served.model, pinned)
    return served.model_copy(update={"model": pinned})


def _embeds(served: ServedModel) -> bool:
    """Whether the model gives vectors, as all registered ones do."""
    from rayembed.models.loading.load import settings_of

    registered = served.model.startswith(SCHEME)
    return registered or settings_of(resolve_model(served.model)).embeds


def _serve(config: ServingConfig, context: JobContext) -> None:
    """Serve until the process is signalled to stop, then remove the application."""
    require_packages("a server", "serving", "fastapi", "starlette", "uvicorn")
    config = pin(config)
    keys = [key.strip() for key in os.environ.get(config.api_key_env, "").split(",")]
    keys = [key for key in keys if key]
    if config.host not in _LOOPBACK and not keys:
        logger.warning(
            "no token protects the server at %s:%d, so every client that reaches it can use it; "
            "set the environment variable %s to require a token",
            config.host,
            config.port,
            config.api_key_env,
        )
    # Ray and the web server; nothing before needs them.
    from rayembed.pipeline.run.on_ray import connect as connect_to_ray
    from rayembed_extras.serving import on_ray
    from rayembed_extras.serving.app import digest

    connect_to_ray()
    try:
        on_ray.start(config, key_digests=frozenset(digest(key) for key in keys))
        address = f"http://{config.host}:{config.port}/v1"
        for model in config.models:
            context.out.write(
                f"{model.model} is served as {model.name!r} at {address}/"
                f"{'embeddings' if _embeds(model) else 'rerank'}\n"
            )
        if _embeds(config.models[0]):
            context.out.write(
                f"  OpenAI(base_url={address!r}, api_key=…).embeddings.create("
                f"model='{config.models[0].name}:query', input=[…])\n"
            )
        context.out.write("stop it with Ctrl-C\n")
        context.out.flush()
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # until now they ended the start
            signal.signal(number, lambda *_: stopped.set())
        with doing(""):  # a server that waits for requests is no long task
            stopped.wait()
    finally:
        on_ray.stop()
    context.err.write("stopped\n")


_READER = Reader(
    kind=ServingConfig,
    examples="models.0.use_gpu=true models.NAME.replicas=2 limits.texts=512",
    own=(
        option(
            "--model [NAME=]REFERENCE",
            "models:/name@champion, models:/name/3, a folder, hf://org/name@revision, …; NAME: "
            "what requests call it; default: as registered",
            sets="models",
            often=True,
            required=True,
            type=named_reference,
        ),
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
