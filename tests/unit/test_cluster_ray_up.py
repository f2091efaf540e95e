"""The files of `ray up` against Ray's own schema and defaults, without a cloud."""

import json
import re
import shlex
from importlib.metadata import version

import jsonschema
import pytest
from cluster_files import CLUSTER, FILLED, changed, documents, fill, readme_commands
from kuberay_schema import unfilled
from ray_options import ray_start_options

FOLDER = CLUSTER / "ray_up"
CLOUDS = ("aws", "gcp")


@pytest.fixture(scope="module")
def prepare():
    """What `ray up` makes of a file before it asks the cloud for anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    def made(config):
        whole = prepare_config(config)
        validate_config(whole)
        return whole

    return made


def config_of(cloud):
    (config,) = documents(FOLDER / f"{cloud}.yaml")
    return config


@pytest.fixture(params=CLOUDS)
def config(request):
    return config_of(request.param)


def test_ray_takes_the_file(config, prepare):
    whole = prepare(config)
    assert whole["available_node_types"]["gpu"]["max_workers"] == 8
    # Ray's defaults, which a file without these lists gets, install another Ray.
    commands = [c for name in whole if name.endswith("setup_commands") for c in whole[name]]
    assert commands == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("idle_timeout_mins", 10),
        ("head_node_type", "workers"),
        ("max_workers", -1),
        ("provider.type", ...),
        ("docker.container_name", ...),
        ("docker.images", "x"),
        ("available_node_types.gpu.min_worker", 0),
        ("available_node_types.gpu.min_workers", 17),  # above max_workers of the cluster
        ("available_node_types.gpu.resources", {"GPU": 0.5}),
        ("available_node_types.gpu.node_config", ...),
        ("available_node_types.gpu.docker", {"image": "x"}),
        ("auth.ssh_users", "x"),
    ],
)
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_damaged_file_is_refused(cloud, path, value, prepare):
    refused = (jsonschema.ValidationError, ValueError, KeyError, AssertionError)
    with pytest.raises(refused):
        prepare(changed(config_of(cloud), path, value))


def closed(config):
    """Problems of who may reach the cluster and with what rights."""
    found = []
    starts = [config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]]
    if "--env RAY_AUTH_MODE=token" not in config["docker"]["run_options"]:
        found.append("no token is asked for")
    if list(config["file_mounts"]) != ["/home/ray/.ray"]:
        found.append("the token does not come to where Ray looks for it")
    if "--dashboard-host=127.0.0.1" not in starts[0]:
        found.append("the dashboard is not on loopback")
    found += [f"{start!r} reports usage" for start in starts if "disable-usage" not in start]
    for option in config["docker"]["run_options"]:
        if re.search(r"TOKEN=|KEY=|PASSWORD=|SECRET=", option) or "privileged" in option:
            found.append(f"{option!r} gives away a secret or the machine")
    for name, kind in config["available_node_types"].items():
        node = kind["node_config"]
        if config["provider"]["type"] != "aws":
            continue
        if node["MetadataOptions"]["HttpTokens"] != "required":
            found.append(f"{name}: IMDSv1 answers")
        if not all(d["Ebs"]["Encrypted"] for d in node["BlockDeviceMappings"]):
            found.append(f"{name}: a disk is not encrypted")
        disks = [device["Ebs"] for device in node["BlockDeviceMappings"]]
        # gp3 has 125 MB/s if nobody asks for more, and 0.25 MB/s at most for each I/O a second.
        if any(d.get("Throughput", 125) < 500 or d["Throughput"] > d["Iops"] / 4 for d in disks):
            found.append(f"{name}: a disk is slow")
        if node["IamInstanceProfile"]["Name"] == "rayembed-head" and name != "head":
            found.append(f"{name}: may start machines")
    return found


DISK = "available_node_types.gpu.node_config.BlockDeviceMappings.0.Ebs."


def test_gpus_have_80_gigabytes_and_nccl_may_lock_memory(config):
    gpu = config["available_node_types"]["gpu"]
    kind = gpu["node_config"].get("InstanceType", gpu["node_config"].get("machineType"))
    assert kind in ("p4de.24xlarge", "a2-ultragpu-8g")
    assert "--ulimit memlock=-1" in gpu["docker"]["worker_run_options"]


def test_tokens_loopback_and_few_rights(config):
    assert closed(config) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("docker.run_options", [], "no token"),
        ("docker.run_options.0", "--env HF_TOKEN=hf_x", "gives away a secret"),
        ("file_mounts", {}, "the token does not come"),
        ("head_start_ray_commands.1", "ray start --head --dashboard-host=0.0.0.0", "loopback"),
        (DISK + "Throughput", 125, "gpu: a disk is slow"),
        (DISK + "Iops", 3000, "gpu: a disk is slow"),
        ("available_node_types.gpu.node_config.MetadataOptions.HttpTokens", "optional", "IMDSv1"),
        ("available_node_types.gpu.node_config.IamInstanceProfile.Name", "rayembed-head", "start"),
    ],
)
def test_each_rule_sees_its_problem(path, value, problem):
    assert [p for p in closed(changed(config_of("aws"), path, value)) if problem in p]


def test_options_of_ray_start_are_those_of_the_installed_ray(config):
    for start in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"]):
        options = set(re.findall(r"(--[a-z-]+)", start))
        assert options <= ray_start_options(), start
    assert "--dashboard-hosts" not in ray_start_options()


@pytest.mark.parametrize("name", ["aws_head_policy", "aws_worker_policy", "aws_trust"])
def test_policies_of_aws_give_single_rights(name):
    policy = json.loads(fill((FOLDER / f"{name}.json").read_text()))
    for statement in policy["Statement"]:
        actions = statement["Action"]
        for action in [actions] if isinstance(actions, str) else actions:
            assert re.fullmatch(r"(ec2|s3|ecr|iam|ssm|sts):[A-Z][A-Za-z]+\*?", action), action
            assert not action.endswith("*") or action.partition(":")[2].startswith("Describe")


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_guide_fills_in_all_that_the_file_leaves_open(cloud):
    lines = readme_commands(FOLDER / "README.md")
    wanted = unfilled((FOLDER / f"{cloud}.yaml").read_text())
    (line,) = [line for line in lines if f"ray_up/{cloud}.yaml" in line]
    assert set(shlex.split(line)[1].replace("$", "").split()) == wanted
    assert wanted <= FILLED.keys()
    assert version("ray") in (CLUSTER / "constraints.txt").read_text()
