"""The fields of KubeRay 1.7 that our manifests use, strictly: an unknown field or type is an error.

Names and types are those of the custom resource definitions `ray.io/v1`, RayCluster and RayJob
(chart kuberay-operator 1.7.0); the rules between fields are those of the operator's own validation,
which refuses a manifest only when it is applied. Pod templates are left to Kubernetes' own schema.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints, model_validator

Count = Annotated[int, Field(ge=0)]
Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
StartParams = dict[str, str]

_RESOURCE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SecretKeyRef(Strict):
    name: str
    key: str
    optional: bool | None = None


class ValueFrom(Strict):
    secretKeyRef: SecretKeyRef


class RedisCredential(Strict):
    valueFrom: ValueFrom | None = None
    value: str | None = None


class GcsFaultToleranceOptions(Strict):
    backend: Literal["redis"] = "redis"
    redisAddress: str
    redisUsername: RedisCredential | None = None
    redisPassword: RedisCredential | None = None
    externalStorageNamespace: str | None = None


class AuthOptions(Strict):
    mode: Literal["token", "disabled"] = "token"
    secretName: str | None = None
    enableK8sTokenAuth: bool | None = None


class AutoscalerOptions(Strict):
    version: Literal["v1", "v2"] | None = None
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] | None = None
    idleTimeoutSeconds: Count | None = None
    image: str | None = None
    imagePullPolicy: Literal["Always", "IfNotPresent", "Never"] | None = None
    resources: dict[str, dict[str, Any]] | None = None
    securityContext: dict[str, Any] | None = None
    env: list[dict[str, Any]] | None = None
    envFrom: list[dict[str, Any]] | None = None


class Group(Strict):
    rayStartParams: StartParams
    template: dict[str, Any]
    resources: dict[str, str] | None = None
    labels: dict[str, str] | None = None

    @model_validator(mode="after")
    def _as_the_operator_checks(self) -> "Group":
        spec = self.template.get("spec", {})
        if not spec.get("containers"):
            raise ValueError("a group should have at least one container")
        if self.resources and any(name in self.rayStartParams for name in _RESOURCE_PARAMS):
            raise ValueError("resources stand in both rayStartParams and resources")
        if "labels" in self.rayStartParams:
            raise ValueError("rayStartParams['labels'] is not supported; use labels")
        if spec.get("restartPolicy", "Never") != "Never":
            raise ValueError("restartPolicy should be Never or unset with autoscaler v2")
        return self


class HeadGroup(Group):
    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None
    enableIngress: bool | None = None


class WorkerGroup(Group):
    groupName: Label
    replicas: Count = 0
    minReplicas: Count = 0
    maxReplicas: Count = 2147483647
    numOfHosts: PositiveInt = 1
    priority: int = 0
    idleTimeoutSeconds: Count | None = None

    @model_validator(mode="after")
    def _counts_fit(self) -> "WorkerGroup":
        if not self.minReplicas <= self.replicas <= self.maxReplicas:
            raise ValueError(
                f"{self.groupName}: replicas lie outside of minReplicas and maxReplicas"
            )
        return self


class RayClusterSpec(Strict):
    rayVersion: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]
    authOptions: AuthOptions | None = None
    gcsFaultToleranceOptions: GcsFaultToleranceOptions | None = None
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: AutoscalerOptions | None = None
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup] = []
    suspend: bool | None = None

    @model_validator(mode="after")
    def _as_the_operator_checks(self) -> "RayClusterSpec":
        names = [group.groupName for group in self.workerGroupSpecs]
        if len(set(names)) < len(names):
            raise ValueError(f"two worker groups have one name: {names}")
        version = tuple(map(int, self.rayVersion.split(".")))
        auth = self.authOptions
        if auth is not None and auth.mode == "token" and version < (2, 52, 0):
            raise ValueError("authOptions.mode is 'token' but minimum Ray version is 2.52.0")
        scaler = self.autoscalerOptions
        second = self.enableInTreeAutoscaling and scaler is not None and scaler.version == "v2"
        for group in self.workerGroupSpecs:
            if group.idleTimeoutSeconds is not None and not second:
                raise ValueError(f"{group.groupName}: idleTimeoutSeconds needs autoscaler v2")
            if group.priority and not (second and version >= (2, 56, 0)):
                raise ValueError(f"{group.groupName}: priority needs autoscaler v2, Ray 2.56")
        head = self.headGroupSpec
        variables = {v["name"] for v in head.template["spec"]["containers"][0].get("env", [])}
        if {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"} & variables:
            raise ValueError("Redis is named in the head's env; use gcsFaultToleranceOptions")
        if {"redis-password", "redis-username"} & head.rayStartParams.keys():
            raise ValueError("Redis' password stands in rayStartParams")
        return self


class Metadata(Strict):
    name: Label
    namespace: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class RayCluster(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: RayClusterSpec


class RayJobSpec(Strict):
    entrypoint: str
    rayClusterSpec: RayClusterSpec
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"] = (
        "K8sJobMode"
    )
    runtimeEnvYAML: str | None = None
    backoffLimit: Count = 0
    activeDeadlineSeconds: PositiveInt | None = None
    preRunningDeadlineSeconds: PositiveInt | None = None
    shutdownAfterJobFinishes: bool = False
    ttlSecondsAfterFinished: Count = 0
    jobId: str | None = None
    metadata: dict[str, str] | None = None
    suspend: bool | None = None
    submitterPodTemplate: dict[str, Any] | None = None
    entrypointNumCpus: float | None = None

    @model_validator(mode="after")
    def _as_the_operator_checks(self) -> "RayJobSpec":
        if self.ttlSecondsAfterFinished and not self.shutdownAfterJobFinishes:
            raise ValueError("ttlSecondsAfterFinished needs shutdownAfterJobFinishes")
        if self.submissionMode == "SidecarMode" and self.submitterPodTemplate is not None:
            raise ValueError("SidecarMode doesn't support submitterPodTemplate")
        if self.submissionMode == "InteractiveMode" and self.backoffLimit:
            raise ValueError("backoffLimit is incompatible with InteractiveMode")
        auth = self.rayClusterSpec.authOptions
        if auth is not None and auth.enableK8sTokenAuth:
            raise ValueError("K8s token auth mode is currently not supported for RayJob")
        return self


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


KINDS: dict[str, type[RayCluster] | type[RayJob]] = {"RayCluster": RayCluster, "RayJob": RayJob}
_LONGEST_NAME = {"RayCluster": 53, "RayJob": 47}


def parse(document: dict[str, Any]) -> RayCluster | RayJob:
    """The typed manifest.

    Raises:
        ValueError: a field that KubeRay has not, or a value that it would refuse.
    """
    kind = KINDS[document["kind"]]
    # As JSON: a strict model takes no mapping of Python's for a nested one.
    found = kind.model_validate_json(json.dumps(document))
    if len(found.metadata.name) > _LONGEST_NAME[found.kind]:
        raise ValueError(f"the name {found.metadata.name!r} is too long")
    return found


def cluster_spec(manifest: RayCluster | RayJob) -> RayClusterSpec:
    return manifest.spec if isinstance(manifest, RayCluster) else manifest.spec.rayClusterSpec


def unfilled(text: str) -> set[str]:
    """Names of the variables that envsubst is to fill in."""
    return set(re.findall(r"\$\{([A-Z_]+)\}", text))
