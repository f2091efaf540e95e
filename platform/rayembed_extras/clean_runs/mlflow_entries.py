"""Measure and remove the MLflow entries of runs, and list their registered model versions."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rayembed.assets.storage import file_sizes
from rayembed.errors import TrackingError
from rayembed.registry.mlflow_run import as_tracking_error, quoted
from rayembed.registry.registered_model import connect
from rayembed_extras.clean_runs.contents import TrackedRun


@dataclass(frozen=True)
class Version:
    """A registered version of the model that a run trained."""

    name: str
    number: str
    aliases: tuple[str, ...]

    def __str__(self) -> str:
        aliases = "".join(f" @{alias}" for alias in self.aliases)
        return f"version {self.number} of {self.name}{aliases}"


@dataclass
class MlflowEntries:
    """Access to the MLflow entries of runs, at the MLflow address that each run recorded."""

    tracking_uri: str | None = None
    """Current address of MLflow; None: use the address in each run's folder."""
    _clients: dict[str, Any] = field(default_factory=dict)

    def num_bytes(self, run: TrackedRun) -> int | None:
        """Bytes of the run's artifacts and logged models; None if they are on a remote server or
        MLflow does not answer.
        """
        try:
            places = self._places(run)
        except TrackingError:
            return None
        paths = [_path(place) for place in places]
        if None in paths:
            return None
        return sum(
            sum(file_sizes(path, recursive=True).values()) for path in paths if path is not None
        )

    def versions(self, run: TrackedRun) -> list[Version]:
        """Find the registered versions of the run's model.

        Raises:
            TrackingError: MLflow is away.
        """
        client = self._client(run)
        with as_tracking_error(self._address(run)):
            found = client.search_model_versions(f"run_id = {quoted(run.run_id)}")
            named = {(str(one.name), str(one.version)) for one in found}
            # A version of another run may hold a model that this one logged and did not register.
            for model in self._models(run):
                for one in json.loads(model.tags.get("mlflow.modelVersions", "[]")):
                    named.add((str(one["name"]), str(one["version"])))
            versions = []
            for name, number in sorted(named):
                with _if_there():
                    version = client.get_model_version(name, number)
                    versions.append(Version(name, number, tuple(sorted(version.aliases))))
        return versions

    def remove(self, run: TrackedRun, versions: list[Version]) -> None:
        """Remove the versions, then the artifacts and logged models of the run, then the run.

        What a killed process leaves is found by the next one: the run's entry goes last.

        Raises:
            TrackingError: MLflow is away or refuses.
        """
        client, uri = self._client(run), self._address(run)
        with as_tracking_error(uri):
            from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

            for version in versions:
                with _if_there():
                    client.delete_model_version(version.name, version.number)
            for model in self._models(run):
                get_artifact_repository(model.artifact_location, uri).delete_artifacts()
                client.delete_logged_model(model.model_id)
            with _if_there():
                info = client.get_run(run.run_id).info
                get_artifact_repository(info.artifact_uri, uri).delete_artifacts()
                if info.lifecycle_stage == "active":
                    client.delete_run(run.run_id)

    def _places(self, run: TrackedRun) -> list[str]:
        """Return the addresses of the run's artifacts and of its logged models' files."""
        client, places = self._client(run), []
        with as_tracking_error(self._address(run)):
            with _if_there():
                places.append(str(client.get_run(run.run_id).info.artifact_uri))
            return [*places, *(str(one.artifact_location) for one in self._models(run))]

    def _models(self, run: TrackedRun) -> list[Any]:
        client, found, token = self._client(run), [], None
        while True:
            page = client.search_logged_models(
                [run.experiment_id],
                filter_string=f"source_run_id = {quoted(run.run_id)}",
                page_token=token,
            )
            found += page
            token = page.token
            if not token:
                return found

    def _client(self, run: TrackedRun) -> Any:
        uri = self._address(run)
        if uri not in self._clients:
            self._clients[uri] = connect(uri)
        return self._clients[uri]

    def _address(self, run: TrackedRun) -> str:
        return self.tracking_uri or run.tracking_uri


@contextmanager
def _if_there() -> Iterator[None]:
    """Context manager that ignores MLflow's error about a missing entry."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def _path(place: str) -> str | None:
    """Local path of an address; None for a remote address."""
    if "://" not in place and not place.startswith("file:"):
        return place if place.startswith("/") else None
    parts = urlsplit(place)
    return url2pathname(parts.path) if parts.scheme == "file" else None
