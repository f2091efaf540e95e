"""Serve models as an application of Ray Serve."""

import asyncio
import logging
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from rayembed.errors import PlacementError, WorkerError
from rayembed.machine.device import SeenGpus, settled_gpu
from rayembed.machine.gpu_check_on_ray import live_gpus, live_nodes
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import computed_dtype, load_model
from rayembed.registry.index_tags import indexes_of
from rayembed.registry.indexes import open_index
from rayembed.registry.registered_model import find_folder
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.pair_service import PairService
from rayembed_extras.serving.routes import model_tokenizer, named_tokenizer
from rayembed_extras.serving.service import Answer, EmbeddingService, ServiceError, State
from rayembed_extras.serving.settings import Limits, ServedModel, ServingConfig

APPLICATION = "rayembed-embeddings"
"""Name of the Serve application."""

_NOT_LOADED, _END = "the model could not be loaded: ", " (end of the reason)"
"""Markers around the reason in Serve's message about a copy that did not start; the message is a
traceback."""

_SWITCH_SECONDS = 0.0005
"""Seconds after which a thread that tokenises or writes JSON yields to the event loop, a tenth of
Python's default: `/health` during a full-size request took at most 47 to 73 ms, with the default 47
to 153."""


class Replica:
    """One copy of a model; accepts requests once the model is loaded.

    Where it is the server's only one, requests come to it over HTTP, else from the `Front`.
    """

    def __init__(
        self,
        model: ServedModel,
        limits: Limits,
        tracking_uri: str | None,
        key_digests: frozenset[str],
        storage_path: str = "outputs",
    ) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        # Ray shows an actor's output in the job's log.
        logging.basicConfig(level="WARNING")
        logging.getLogger("rayembed.machine.hardware").setLevel(logging.INFO)
        self._limits, self._key_digests = limits, key_digests
        try:
            self._service = load(model, limits, tracking_uri, storage_path)
        except Exception as error:
            raise WorkerError(f"{_NOT_LOADED}{error}{_END}") from error

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application that Ray Serve calls for each request."""
        services = {self._service.name: self._service}
        return make_app(services, self._limits, key_digests=self._key_digests)

    def check_health(self) -> None:
        """Raise if Serve should replace this copy."""
        if not self._service.healthy:
            raise WorkerError(
                "the last batches of this copy of the model all failed; Ray Serve replaces the copy"
            )

    async def answer(self, path: str, body: dict[str, Any]) -> Answer | ServiceError:
        """Answer a request as the local service does, but return refusals, because Ray would wrap a
        raised error.
        """
        try:
            return await self._service.answer(path, body)
        except ServiceError as error:
            return error

    async def describe(self) -> dict[str, Any]:
        """Return the model's entry in OpenAI's list, as the local service does."""
        return await self._service.describe()

    async def state(self) -> State:
        """Return the health and counters of the local service."""
        return await self._service.state()


class Front:
    """Receives the HTTP requests of a server of several models and forwards them to the models'
    copies.
    """

    def __init__(
        self, handles: Mapping[str, Any], limits: Limits, key_digests: frozenset[str]
    ) -> None:
        self._services = {name: RemoteService(handle) for name, handle in handles.items()}
        self._limits, self._key_digests = limits, key_digests

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application that Ray Serve calls for each request."""
        return make_app(self._services, self._limits, key_digests=self._key_digests)


def load(
    served: ServedModel, limits: Limits, tracking_uri: str | None, storage_path: str = "outputs"
) -> EmbeddingService:
    """Load a served model for embedding, on its device.

    Args:
        storage_path: with the record of the model's index.

    Raises:
        RayembedError: it cannot be fetched or loaded, or there is no such index.
    """
    import torch

    torch.set_num_threads(served.threads_per_replica or max(1, int(served.cpus_per_replica)))
    folder = find_folder(served.model, tracking_uri)
    device = "cuda" if served.use_gpu is True else "cpu"
    dtype = computed_dtype(folder, served.dtype, device)
    model = load_model(folder, dtype=dtype, device=device)
    if served.dtype == "tf32" and served.use_gpu:  # this process serves no other model
        torch.set_float32_matmul_precision("high")
    tokenizer = None
    if served.token_arrays == "model":
        tokenizer = model_tokenizer(model)
    elif served.token_arrays is not None:
        tokenizer = named_tokenizer(served.token_arrays)
    if not model.config.embeds:
        return PairService(
            served.name,
            model,
            source=served.model,
            tokens_per_batch=served.tokens_per_batch,
            limits=limits,
        )
    index = None
    if served.index is not None:
        weights = weights_fingerprint(folder)
        index = open_index(storage_path, served.index, weights, bm25_rows=limits.bm25_rows)
    return EmbeddingService(
        served.name,
        model,
        source=served.model,
        tokens_per_batch=served.tokens_per_batch,
        token_arrays=tokenizer,
        limits=limits,
        folder=folder,
        index=index,
        named_indexes=indexes_of(served.model, tracking_uri),
    )


def start(config: ServingConfig, *, key_digests: frozenset[str]) -> None:
    """Start serving and wait until the models answer at the config's address.

    A Ray cluster must be joined already. An application that is served there under our name is
    replaced.

    Args:
        config: its `tracking_uri`, where it has models of `models:/`, every node must reach.
        key_digests: see `make_app`.

    Raises:
        PlacementError: the port is taken, or the cluster does not have what the copies need.
        WorkerError: a model could not be loaded.
    """
    serves = _serves()
    if not serves:
        _check_port(config.host, config.port)
    serve.start(
        http_options=HTTPOptions(host=config.host, port=config.port), proxy_location="HeadOnly"
    )
    # What serves already holds the GPUs, which could not be checked.
    checks = not serves and any(model.use_gpu is not False for model in config.models)
    config = with_devices(config, live_gpus(check=checks))
    for model in config.models:
        _check_resources(model)
    try:
        serve.run(_application(config, key_digests), name=APPLICATION, route_prefix="/")
    except (ray.exceptions.RayError, RayServeException, RuntimeError) as error:
        reason = _load_failure(str(error))
        problem = f"{_NOT_LOADED}{reason}" if reason else f"Ray Serve could not start it: {error}"
        raise WorkerError(problem) from error


def with_devices(config: ServingConfig, seen: SeenGpus) -> ServingConfig:
    """Return the settings with `use_gpu=auto` resolved, and log a line for each model.

    All models that leave it open have GPUs, or none has: a copy without one would wait for ever.

    Raises:
        PlacementError: a model asks for a GPU and there is none.
    """
    needed = sum(_most_copies(model) for model in config.models if model.use_gpu is not False)
    models = []
    for model in config.models:
        setting = f"models.{model.name}.use_gpu"
        use_gpu = settled_gpu(model.use_gpu, seen, setting, needed=needed, users="copies")
        models.append(model.model_copy(update={"use_gpu": use_gpu}))
    return config.model_copy(update={"models": tuple(models)})


def _most_copies(model: ServedModel) -> int:
    return model.replicas if model.autoscaling is None else model.autoscaling.max_replicas


def _application(config: ServingConfig, key_digests: frozenset[str]) -> Any:
    """Build Serve's application: a single model that receives requests itself, or a front with
    several models.
    """
    # Texts are counted by the services; Serve must not keep requests from waiting together.
    shared = {"max_ongoing_requests": config.limits.waiting_texts}
    alone = len(config.models) == 1
    bound = {}
    for place, model in enumerate(config.models):
        deployment = serve.deployment(
            name=f"{place}-" + re.sub(r"[^\w.-]", "-", model.name),
            **_replicas(model),
            **shared,
            # Somebody waits for the first start, so a failure is reported at once.
            max_constructor_retry_count=1,
            ray_actor_options={
                "num_cpus": model.cpus_per_replica,
                "num_gpus": 1 if model.use_gpu is True else 0,
            },
        )(serve.ingress()(Replica) if alone else Replica)
        shared_settings = (config.limits, config.tracking_uri, key_digests, config.storage_path)
        arguments = (model, *shared_settings)
        bound[model.name] = deployment.bind(*arguments)
    if alone:
        return bound[config.models[0].name]
    front = serve.deployment(name="front", **shared, ray_actor_options={"num_cpus": 0})
    return front(serve.ingress()(Front)).bind(bound, config.limits, key_digests)


def stop() -> None:
    """Stop serving; Serve itself ends with its last application."""
    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()


def _replicas(model: ServedModel) -> dict[str, Any]:
    """Build Ray Serve's options for the number of copies of a model."""
    if model.autoscaling is None:
        return {"num_replicas": model.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": model.replicas,
            "initial_replicas": model.replicas,
            "max_replicas": model.autoscaling.max_replicas,
            "target_ongoing_requests": model.autoscaling.target_requests,
        }
    }


def _load_failure(message: str) -> str:
    """Find the reason why a copy did not load its model, in Ray Serve's message or status."""
    application = serve.status().applications.get(APPLICATION)
    reasons = [] if application is None else [d.message for d in application.deployments.values()]
    for text in (message, *reasons):
        _, found, rest = str(text).rpartition(_NOT_LOADED)
        if found:
            reason: str = rest.partition(_END)[0]
            return reason
    return ""


def _serves() -> bool:
    """Whether Ray Serve already runs on this cluster, so that its address can no longer be
    chosen.
    """
    return bool(serve.status().proxies)


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PlacementError(
                f"cannot listen on {host}:{port}: {error}; choose another --port or stop the "
                "program that listens there"
            ) from None


def _check_resources(model: ServedModel) -> None:
    """Raise if a copy of the model fits on no node, because Ray Serve would wait forever."""
    wanted = {"CPU": model.cpus_per_replica, "GPU": 1.0 if model.use_gpu is True else 0.0}
    nodes = [node["Resources"] for node in live_nodes()]
    if not any(
        all(resources.get(name, 0.0) >= number for name, number in wanted.items())
        for resources in nodes
    ):
        most = {name: max(r.get(name, 0.0) for r in nodes) for name in wanted}
        raise PlacementError(
            f"no node of the cluster has the {wanted} that a copy of the model needs; the largest "
            f"amounts on a node are {most}. Lower cpus_per_replica or set use_gpu=false"
        )


class RemoteService:
    """Client of a served model whose copies run in other processes."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Request the answer from a copy; cancelling this call also cancels the work in the other
        process.
        """
        result = await _result(self._handle.answer.remote(path, dict(body)))
        if isinstance(result, ServiceError):
            raise result
        answer: Answer = result
        return answer

    async def describe(self) -> dict[str, Any]:
        """Request the model's entry in OpenAI's list from a copy."""
        entry: dict[str, Any] = await _result(self._handle.describe.remote())
        return entry

    async def state(self) -> State:
        """Request the health and counters of one of the copies."""
        state: State = await _result(self._handle.state.remote())
        return state


async def _result(response: Any) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
