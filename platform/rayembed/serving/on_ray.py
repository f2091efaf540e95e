"""A served model as an application of Ray Serve."""

import logging
import socket
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from rayembed.assets.resolver import resolve_model
from rayembed.config.serving import ServingConfig
from rayembed.errors import PlacementError, WorkerError
from rayembed.hardware import settled
from rayembed.models.load import load_model
from rayembed.models.transformer_model import TransformerModel
from rayembed.registry.registered_model import (
    SCHEME,
    connect,
    download,
    get_version,
    parse_reference,
)
from rayembed.serving.app import make_app
from rayembed.serving.service import EmbeddingService

APPLICATION = "rayembed-embeddings"
"""Name of the Serve application."""

_NOT_LOADED, _END = "the model could not be loaded: ", " (end of the reason)"
"""Around the reason in what Serve tells of a copy that did not start: a text with a traceback."""

_logger = logging.getLogger(__name__)


class Replica:
    """One copy of the model with its HTTP application; takes requests once the model is loaded."""

    def __init__(
        self,
        config: ServingConfig,
        name: str,
        tracking_uri: str | None,
        key_digests: frozenset[str],
    ) -> None:
        # Ray shows an actor's output in the job's log.
        logging.basicConfig(level="WARNING")
        logging.getLogger("rayembed.hardware").setLevel(logging.INFO)
        self._key_digests = key_digests
        try:
            model = load(config, tracking_uri)
        except Exception as error:
            raise WorkerError(f"{_NOT_LOADED}{error}{_END}") from error
        self._service = EmbeddingService(
            name,
            model,
            source=config.model,
            tokens_per_batch=config.tokens_per_batch,
            limits=config.limits,
        )

    def __serve_build_asgi_app__(self) -> Any:
        """Application that Serve calls for each request."""
        return make_app(self._service, key_digests=self._key_digests)

    def check_health(self) -> None:
        """Raise where Serve shall put a new copy in the place of this one."""
        if not self._service.healthy:
            raise WorkerError("the last batches all failed")


def load(config: ServingConfig, tracking_uri: str | None) -> TransformerModel:
    """Load the model of a served reference for embedding, on its device.

    Raises:
        RayembedError: it cannot be fetched or loaded.
    """
    import torch

    torch.set_num_threads(config.threads_per_replica or max(1, int(config.cpus_per_replica)))
    if config.model.startswith(SCHEME):
        assert tracking_uri is not None
        client = connect(tracking_uri)
        version = get_version(client, parse_reference(config.model))
        folder = download(client, version, tracking_uri=tracking_uri)
    else:
        folder = resolve_model(config.model)
    device = "cuda" if config.use_gpu else "cpu"
    return load_model(folder, dtype=settled(config.dtype, device)).to(device)


def start(
    config: ServingConfig, *, name: str, tracking_uri: str | None, key_digests: frozenset[str]
) -> None:
    """Start serving and wait until the model answers at the config's address.

    A Ray cluster must be joined already. An application that is served there under our name is
    replaced.

    Args:
        name: what requests call the model.
        tracking_uri: MLflow's address for `models:/` references; every node must reach it.
        key_digests: see `make_app`.

    Raises:
        PlacementError: the port is taken, or the cluster does not have what the copies need.
        WorkerError: the model could not be loaded.
    """
    if not _serves():
        _check_port(config.host, config.port)
    serve.start(
        http_options=HTTPOptions(host=config.host, port=config.port), proxy_location="HeadOnly"
    )
    _check_resources(config)
    deployment = serve.deployment(
        name="model",
        **_replicas(config),
        # Someone waits for the first start, and is told at once why it failed.
        max_constructor_retry_count=1,
        # Texts are counted by the service; Serve must not keep requests from waiting together.
        max_ongoing_requests=config.limits.waiting_texts,
        ray_actor_options={
            "num_cpus": config.cpus_per_replica,
            "num_gpus": 1 if config.use_gpu else 0,
        },
    )(serve.ingress()(Replica))
    application = deployment.bind(config, name, tracking_uri, key_digests)
    try:
        serve.run(application, name=APPLICATION, route_prefix="/")
    except (ray.exceptions.RayError, RayServeException, RuntimeError) as error:
        reason = _told(str(error))
        told = f"{_NOT_LOADED}{reason}" if reason else f"Ray Serve could not start it: {error}"
        raise WorkerError(told) from error


def stop() -> None:
    """Stop serving; Serve itself ends with its last application."""
    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()


def _replicas(config: ServingConfig) -> dict[str, Any]:
    """Serve's options of how many copies there are."""
    if config.autoscaling is None:
        return {"num_replicas": config.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": config.replicas,
            "initial_replicas": config.replicas,
            "max_replicas": config.autoscaling.max_replicas,
            "target_ongoing_requests": config.autoscaling.target_requests,
        }
    }


def _told(message: str) -> str:
    """The reason why a copy did not load its model, out of Serve's message or its status."""
    application = serve.status().applications.get(APPLICATION)
    told = [] if application is None else [d.message for d in application.deployments.values()]
    for text in (message, *told):
        _, found, rest = str(text).rpartition(_NOT_LOADED)
        if found:
            reason: str = rest.partition(_END)[0]
            return reason
    return ""


def _serves() -> bool:
    """Whether Ray Serve already runs on this cluster; its address is then fixed."""
    return bool(serve.status().proxies)


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PlacementError(
                f"cannot listen on {host}:{port}: {error}; choose another --port or stop what "
                "listens there"
            ) from None


def _check_resources(config: ServingConfig) -> None:
    """Check that a replica fits on some node; Serve itself would wait forever."""
    wanted = {"CPU": config.cpus_per_replica, "GPU": 1.0 if config.use_gpu else 0.0}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(
        all(resources.get(name, 0.0) >= number for name, number in wanted.items())
        for resources in nodes
    ):
        most = {name: max(r.get(name, 0.0) for r in nodes) for name in wanted}
        raise PlacementError(
            f"no node of the cluster has the {wanted} that a copy of the model needs; the most "
            f"are {most}. Lower cpus_per_replica or set use_gpu=false"
        )
