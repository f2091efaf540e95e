"""Which network NCCL says that it took, by lines of its logs, and when TCP is warned of."""

import os

import pytest

from rayembed.training.train_function_on_ray import TransportLog, log_nccl, networks_in

START = """n0:4711:4711 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.5<0>
n0:4711:4711 [0] NCCL INFO cudaDriverVersion 13000
NCCL version 2.27.7+cuda13.0
"""
TCP = (
    START
    + """n0:4711:4790 [0] NCCL INFO NET/IB : No device found.
n0:4711:4790 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0> [1]docker0:172.17.0.1<0>
n0:4711:4790 [0] NCCL INFO Initialized NET plugin Socket
n0:4711:4790 [0] NCCL INFO Using network Socket
n0:4711:4801 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [receive] via NET/Socket/0
n0:4711:4801 [0] NCCL INFO Channel 01 : 1[1] -> 0[0] via SHM/direct/direct
"""
)
EFA = (
    START
    + """n0:4711:4790 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa
n0:4711:4790 [0] NCCL INFO Using network AWS Libfabric
n0:4711:4801 [0] NCCL INFO Channel 04/1 : 3[3] -> 10[2] [send] via NET/AWS Libfabric/1(2)/GDRDMA
n0:4711:4801 [0] NCCL INFO Channel 05 : 0[101c0] -> 7[a01d0] via P2P/IPC/read
"""
)
INFINIBAND = (
    START
    + """n0:4711:4790 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.1.0.5<0>
n0:4711:4790 [0] NCCL INFO Using network IB
n0:4711:4801 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA
n0:4711:4801 [0] NCCL INFO Channel 01/0 : 7[7] -> 8[0] [send] via NET/IBext_v8/2
"""
)
CHOSEN = START + "n0:4711:4790 [0] NCCL INFO Using network Socket\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TCP, ["Socket"]),
        (EFA, ["AWS Libfabric"]),
        (INFINIBAND, ["IB", "IBext_v8"]),
        (CHOSEN, ["Socket"]),  # before the channels are made
        (START, []),
        ("", []),
    ],
)
def test_networks_by_lines_of_logs(text, expected):
    assert networks_in(text) == expected


@pytest.mark.parametrize(
    ("text", "workers", "several_nodes", "level", "told"),
    [
        (TCP, 2, True, "WARNING", "NET/Socket, [0]eth0:10.0.0.5<0> [1]docker0:172.17.0.1<0>"),
        (TCP, 16, False, "WARNING", "between 16 workers over TCP"),
        (TCP, 8, False, "INFO", "NET/Socket"),
        (EFA, 16, True, "INFO", "NCCL's transport: NET/AWS Libfabric"),
        (START, 8, False, "INFO", "no network: within one node"),
        # The user's NCCL_DEBUG_SUBSYS, another wording, a file that stayed empty.
        (START, 16, True, "WARNING", "NCCL's choice of network is not known: workers are on"),
        ("", 16, True, "WARNING", "names no network"),
        ("NCCL INFO AllReduce: opCount 1\n", 16, True, "WARNING", "NCCL_DEBUG_SUBSYS must include"),
        (None, 16, True, "WARNING", "network is not known"),
    ],
)
def test_what_is_said_after_the_first_step(
    text, workers, several_nodes, level, told, tmp_path, caplog
):
    caplog.set_level("INFO", logger="rayembed")
    file = tmp_path / "nccl.log"
    if text is not None:
        file.write_text(text)
    log = TransportLog(file, workers, several_nodes=several_nodes)
    for _ in range(2):
        log.on_step_end({})
    assert [record.levelname for record in caplog.records] == [level]
    assert told in caplog.text


@pytest.mark.parametrize("of_user", [None, "WARN", "VERSION", "INFO", "TRACE", "file"])
def test_nccl_writes_to_a_file_unless_the_user_has_its_log(of_user, monkeypatch, tmp_path):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever is set meanwhile
        monkeypatch.delenv(name)
    if of_user == "file":
        monkeypatch.setenv("NCCL_DEBUG_FILE", "mine")
    elif of_user:
        monkeypatch.setenv("NCCL_DEBUG", of_user)
    environment = os.environ
    file = log_nccl(str(tmp_path))
    if of_user in ("INFO", "TRACE", "file"):
        assert file is None
        assert environment.get("NCCL_DEBUG_FILE") == ("mine" if of_user == "file" else None)
        return
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    assert environment["NCCL_DEBUG_FILE"] == str(file)
