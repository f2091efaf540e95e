"""The manifests for Kubernetes against the fields of KubeRay and Kubernetes, without a cluster."""

import importlib.util
import shlex
import subprocess
import sys
from importlib.metadata import version

import kubernetes_validate
import pytest
import yaml
from cluster_files import CLUSTER, changed, documents, readme_commands
from cluster_rules import cluster_problems, pod_problems, policy_problems
from kuberay_schema import KINDS, cluster_spec, parse, unfilled
from pod_security import refusals
from ray_options import ray_start_options

FOLDER = CLUSTER / "kuberay"
FILES = sorted(FOLDER.glob("*.yaml"))
KUBERNETES = "1.33"
DOCUMENTS = [pytest.param(d, id=f"{p.stem}-{d['kind']}") for p in FILES for d in documents(p)]
OURS = [d for p in FILES for d in documents(p) if d["kind"] in KINDS]
CLUSTER_OF = {d["kind"]: d for d in OURS}
OF_JOB = "spec.rayClusterSpec."


def spec_of(document):
    spec = document["spec"]
    return spec if document["kind"] == "RayCluster" else spec["rayClusterSpec"]


def as_pod(template):
    metadata = {"name": "pod", **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def valid(document):
    """Return when Kubernetes and KubeRay know every field of the document."""
    if document["kind"] not in KINDS:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    cluster = cluster_spec(parse(document))
    for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
        kubernetes_validate.validate(as_pod(group.template), KUBERNETES, strict=True)


def test_there_are_both_kinds_of_cluster():
    assert sorted(CLUSTER_OF) == ["RayCluster", "RayJob"]
    assert len(DOCUMENTS) >= 12


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_field_is_one_of_kubernetes_or_kuberay(document):
    valid(document)
    assert document["kind"] != "Secret", "secrets are made by commands, never kept in a file"
    assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "rayembed"


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayCluster", "spec.autoscalerOption", {"version": "v2"}),
        ("RayCluster", "spec.rayVersion", "2.49.0"),
        ("RayCluster", "spec.authOptions.mode", "tokens"),
        ("RayCluster", "spec.autoscalerOptions.version", "v3"),
        ("RayCluster", "spec.autoscalerOptions.version", "v1"),  # with a priority
        ("RayCluster", "spec.gcsFaultToleranceOptions.redisAddresses", "redis:6379"),
        ("RayCluster", "spec.headGroupSpec.rayStartParams.num-cpus", 0),  # a number, not a text
        ("RayCluster", "spec.headGroupSpec.rayStartParams.redis-password", "x"),
        ("RayCluster", "spec.headGroupSpec.template.spec.restartPolicy", "Always"),
        ("RayCluster", "spec.headGroupSpec.template.spec.containers.0.imagePolicy", "Always"),
        ("RayCluster", "spec.workerGroupSpecs.1.minReplica", 0),
        ("RayCluster", "spec.workerGroupSpecs.1.minReplicas", 9),  # above maxReplicas
        ("RayCluster", "spec.workerGroupSpecs.1.groupName", "data"),  # twice
        ("RayCluster", "spec.workerGroupSpecs.1.template.spec.tolerations.0.operator", 3),
        ("RayCluster", "metadata.name", "Rayembed"),
        ("RayCluster", "spec.headGroupSpec", ...),
        ("RayJob", "spec.submissionMode", "Sidecar"),
        ("RayJob", "spec.shutdownAfterJobFinishes", False),  # with a time to live
        ("RayJob", "spec.backoffLimit", -1),
        ("RayJob", OF_JOB + "authOptions.enableK8sTokenAuth", True),
        ("RayJob", "metadata.name", "n" * 48),
        ("RayJob", "spec.entrypoint", ...),
    ],
)
def test_a_damaged_cluster_is_refused(kind, path, value):
    with pytest.raises((ValueError, kubernetes_validate.ValidationError)):
        valid(changed(CLUSTER_OF[kind], path, value))


def test_a_job_that_submits_itself_takes_no_pod_for_that():
    job = changed(CLUSTER_OF["RayJob"], "spec.submitterPodTemplate", {})
    with pytest.raises(ValueError, match="submitterPodTemplate"):
        valid(changed(job, "spec.submissionMode", "SidecarMode"))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_gpu_pods_announce_their_end_within_their_grace(kind):
    (group,) = [g for g in spec_of(CLUSTER_OF[kind])["workerGroupSpecs"] if g["groupName"] == "gpu"]
    pod = group["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert importlib.util.find_spec(command[2]), "a module of the library"
    assert int(command[4]) < pod["terminationGracePeriodSeconds"]


def test_a_damaged_manifest_of_kubernetes_is_refused():
    policy = next(d for d in documents(FOLDER / "network-policy.yaml") if "ingress" in d["spec"])
    with pytest.raises(kubernetes_validate.ValidationError):
        valid(changed(policy, "spec.ingres", []))
    with pytest.raises(kubernetes_validate.ValidationError):
        valid(changed(policy, "spec.podSelector", ...))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_clusters_are_closed_and_hold_no_secret(kind):
    spec, asks = spec_of(CLUSTER_OF[kind]), kind == "RayJob"
    assert cluster_problems(spec, operator_asks=asks) == []


POD = "spec.workerGroupSpecs.1.template.spec."


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("spec.authOptions", {"mode": "disabled"}, "takes everybody"),
        ("spec.headGroupSpec.serviceType", "LoadBalancer", "reached from outside"),
        ("spec.headGroupSpec.rayStartParams.dashboard-host", "0.0.0.0", "dashboard's host"),
        ("spec.headGroupSpec.rayStartParams.num-cpus", "4", "tasks may run on the head"),
        ("spec.gcsFaultToleranceOptions.redisPassword", {"value": "x"}, "in clear text"),
        ("spec.gcsFaultToleranceOptions", ..., "lost with its head"),
        ("spec.enableInTreeAutoscaling", False, "nodes stay"),
        (POD + "securityContext.runAsNonRoot", False, "gpu: may run as root"),
        (POD + "securityContext.seccompProfile", ..., "gpu: has no seccomp profile"),
        (POD + "containers.0.securityContext", {"privileged": True}, "may gain privileges"),
        (POD + "containers.0.image", "rayembed:latest", "not pinned"),
        (POD + "containers.0.image", "rayembed", "not pinned"),
        (POD + "containers.0.env", [{"name": "HF_TOKEN", "value": "hf_x"}], "HF_TOKEN in clear"),
        (POD + "containers.0.resources.requests", {"nvidia.com/gpu": 4}, "other GPUs"),
        (POD + "containers.0.volumeMounts", [], "/dev/shm is too small"),
        (
            POD + "containers.0.securityContext.capabilities",
            {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
            "keeps capabilities",
        ),
        ("spec.workerGroupSpecs.1.rayStartParams", {}, "gpu: spills into its container"),
        (POD + "containers.0.volumeMounts.2.mountPath", "/elsewhere", "spills into its container"),
        (
            "spec.headGroupSpec.template.spec.containers.0.resources.limits.memory",
            "32Gi",
            "orders a plan",
        ),
        (POD + "hostNetwork", True, "shares a namespace"),
        (POD + "automountServiceAccountToken", ..., "token of Kubernetes"),
    ],
)
def test_each_rule_sees_its_problem(path, value, problem):
    damaged = changed(CLUSTER_OF["RayCluster"], path, value)
    found = cluster_problems(damaged["spec"], operator_asks=False)
    assert [p for p in found if problem in p], found


EFA, NODES = ((FOLDER / f"with_{name}.py") for name in ("efa", "nodes"))
WITH_EFA = (EFA, "--cards", "32")
WITH_NODES = (NODES, "--runtime-class", "nvidia", "--near", "topology.kubernetes.io/zone")


def rendered(document, *scripts):
    """The document after scripts, each with its arguments."""
    text = yaml.safe_dump(document)
    for script in scripts:
        done = subprocess.run(
            [sys.executable, *script], input=text, capture_output=True, text=True, check=True
        )
        text = done.stdout
    return yaml.safe_load(text)


@pytest.mark.parametrize("document", OURS, ids=lambda document: document["kind"])
def test_efa_is_added_to_gpu_nodes_alone_and_kubernetes_takes_it(document):
    found = rendered(document, WITH_EFA)
    valid(found)
    data, gpu = spec_of(found)["workerGroupSpecs"]
    assert data == spec_of(document)["workerGroupSpecs"][0]
    container = gpu["template"]["spec"]["containers"][0]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["vpc.amazonaws.com/efa"] == 32
        assert container["resources"][kind]["nvidia.com/gpu"] == 8
    # A capability is no use to a user that is not root, and the namespace refuses this one.
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "FI_PROVIDER", "value": "efa"} in container["env"]
    assert cluster_problems(spec_of(found), operator_asks=found["kind"] == "RayJob") == []


@pytest.mark.parametrize("document", OURS, ids=lambda document: document["kind"])
def test_gpu_nodes_are_fitted_to_a_cluster(document):
    found = rendered(document, WITH_NODES)
    valid(found)
    data, gpu = spec_of(found)["workerGroupSpecs"]
    assert data == spec_of(document)["workerGroupSpecs"][0]
    pod = gpu["template"]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    (one,) = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = one["podAffinityTerm"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    labels = term["labelSelector"]["matchLabels"]
    # KubeRay keeps a template's labels; of its own none names a RayJob on a pod.
    assert labels.items() <= gpu["template"]["metadata"]["labels"].items()
    assert document["metadata"]["name"] in labels.values()
    before = spec_of(document)["workerGroupSpecs"][1]["template"]["metadata"]["labels"]
    assert before.items() <= gpu["template"]["metadata"]["labels"].items()
    assert rendered(document, (NODES,)) == document, "nothing is asked, nothing is changed"


def pods_of(document):
    """Specs of the pods that a document makes, by name."""
    spec = document.get("spec", {})
    if document["kind"] in KINDS:
        cluster = spec_of(document)
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        names = ["head", *(group["groupName"] for group in cluster["workerGroupSpecs"])]
        return {n: g["template"]["spec"] for n, g in zip(names, groups, strict=True)}
    template = spec.get("template")
    return {} if template is None else {document["metadata"]["name"]: template["spec"]}


def enforced():
    """Level of the Pod Security Standards that the namespace of the manifests enforces."""
    (namespace,) = (d for p in FILES for d in documents(p) if d["kind"] == "Namespace")
    return namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]


RENDERED = [d for p in FILES for d in documents(p) if d["kind"] not in KINDS] + [
    rendered(document, *scripts)
    for document in OURS
    for scripts in ((), (WITH_EFA,), (WITH_NODES,), (WITH_EFA, WITH_NODES))
]


def test_the_namespace_admits_every_pod_of_every_manifest():
    assert enforced() == "baseline"
    pods = [(name, pod) for document in RENDERED for name, pod in pods_of(document).items()]
    assert {name for name, _ in pods} == {"mlflow", "redis", "head", "data", "gpu"}
    assert [
        (name, refusals(pod, enforced())) for name, pod in pods if refusals(pod, enforced())
    ] == []
    # What KubeRay adds to a pod is not ours; our own containers keep to the stricter level.
    assert [name for name, pod in pods if refusals(pod, "restricted")] == []


CONTAINER = "containers.0.securityContext."


@pytest.mark.parametrize(
    ("path", "value", "level", "refused"),
    [
        (CONTAINER + "capabilities.add", ["IPC_LOCK"], "baseline", "capabilities"),
        (CONTAINER + "capabilities.add", ["SYS_ADMIN"], "baseline", "capabilities"),
        (CONTAINER + "capabilities.add", ["KILL"], "restricted", "capabilities"),
        (CONTAINER + "capabilities", {}, "restricted", "capabilities"),
        (CONTAINER + "privileged", True, "baseline", "privileged"),
        (CONTAINER + "procMount", "Unmasked", "baseline", "procMount"),
        (CONTAINER + "seLinuxOptions", {"type": "spc_t"}, "baseline", "seLinuxOptions"),
        (CONTAINER + "allowPrivilegeEscalation", ..., "restricted", "allowPrivilegeEscalation"),
        ("securityContext.seccompProfile.type", "Unconfined", "baseline", "seccompProfile"),
        ("securityContext.seccompProfile", ..., "restricted", "seccompProfile"),
        ("securityContext.runAsNonRoot", ..., "restricted", "runAsNonRoot"),
        ("securityContext.runAsUser", 0, "restricted", "runAsUser"),
        ("securityContext.sysctls", [{"name": "kernel.msgmax"}], "baseline", "sysctls"),
        ("containers.0.ports", [{"hostPort": 80}], "baseline", "hostPort"),
        ("hostNetwork", True, "baseline", "hostNetwork"),
        ("volumes.0", {"name": "x", "hostPath": {"path": "/dev"}}, "baseline", "hostPath"),
        ("volumes.0", {"name": "x", "nfs": {}}, "restricted", "volumes"),
    ],
)
def test_each_row_of_the_standard_refuses_its_pod(path, value, level, refused):
    pod = pods_of(CLUSTER_OF["RayCluster"])["gpu"]
    assert refusals(pod, level) == []
    damaged = changed(pod, path, value)
    assert any(found.endswith(refused) for found in refusals(damaged, level))
    assert refusals(damaged, "privileged") == []
    if level == "restricted":
        assert refusals(damaged, "baseline") == []


def test_redis_and_mlflow_are_as_closed():
    templates = {
        d["metadata"]["name"]: d["spec"]["template"]
        for p in FILES
        for d in documents(p)
        if d["kind"] in ("StatefulSet", "Deployment")
    }
    assert sorted(templates) == ["mlflow", "redis"]
    assert [p for name, t in templates.items() for p in pod_problems(name, t)] == []


def test_only_those_speak_who_have_to():
    policies = documents(FOLDER / "network-policy.yaml")
    components = {"ray", "redis", "mlflow"}
    assert policy_problems(policies, components) == []
    assert "no policy is for serving" in policy_problems(policies, components | {"serving"})
    assert "what no policy allows is not denied" in policy_problems(policies[1:], components)
    open_to_all = changed(policies[1], "spec.ingress.0.from", [])
    assert "somebody is let in from everywhere" in policy_problems([open_to_all], {"ray"})
    metadata = changed(policies[1], "spec.egress.4.to.0.ipBlock", {"cidr": "0.0.0.0/0"})
    assert "the cloud's metadata service may be asked" in policy_problems([metadata], {"ray"})
    anything = changed(policies[1], "spec.egress.4.ports", ...)
    assert "every port outside may be asked" in policy_problems([anything], {"ray"})


def test_both_clusters_have_the_installed_ray_and_the_same_nodes():
    specs = [spec_of(document) for document in OURS]
    assert {spec["rayVersion"] for spec in specs} == {version("ray")}
    assert specs[0]["workerGroupSpecs"] == specs[1]["workerGroupSpecs"]
    assert specs[0]["headGroupSpec"]["template"] == specs[1]["headGroupSpec"]["template"]


def test_the_guide_fills_in_all_that_the_files_leave_open():
    lines = readme_commands(FOLDER / "README.md")
    for path in FILES:
        wanted = unfilled(path.read_text())
        applied = [line for line in lines if f"kuberay/{path.name}" in line]
        assert len(applied) == 1, path.name
        named = set(shlex.split(applied[0])[1].replace("$", "").split()) if wanted else set()
        assert named == wanted, path.name
        assert applied[0].startswith("envsubst" if wanted else "kubectl apply -f"), applied


def test_start_parameters_are_options_of_the_installed_ray():
    for document in OURS:
        spec = spec_of(document)
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            assert {f"--{name}" for name in group["rayStartParams"]} <= ray_start_options()
