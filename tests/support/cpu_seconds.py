"""Plugin of pytest: tables of the tests and of the files that cost most CPU seconds, their child
processes among them, fixtures included.

    PYTHONPATH=tests/support pytest -p cpu_seconds tests/unit

Also with pytest-xdist. Children that are not waited for, such as Ray's and those of a fork server,
are not seen.
"""

import os
from collections import defaultdict

import pytest

_SHOWN = 60

_seconds: dict[str, tuple[float, float]] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Note what the test and its fixtures cost."""
    before = os.times()
    result = yield
    after = os.times()
    own = after.user + after.system - before.user - before.system
    children = after.children_user + after.children_system
    children -= before.children_user + before.children_system
    _seconds[item.nodeid] = own, children
    return result


def pytest_sessionfinish(session):
    """Hand over what a process of pytest-xdist has noted."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_seconds"] = _seconds


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take over what a process of pytest-xdist has noted, unless it died."""
    _seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))


def pytest_terminal_summary(terminalreporter):
    """Tell the costliest tests and files, and the sum of all."""
    by_file = defaultdict(lambda: (0.0, 0.0))
    for name, seconds in _seconds.items():
        file = name.partition("::")[0]
        by_file[file] = tuple(map(sum, zip(by_file[file], seconds, strict=True)))
    for what, costs in (("tests", _seconds), ("files", by_file)):
        terminalreporter.section(f"CPU seconds of {what}: own, children")
        for name, seconds in sorted(costs.items(), key=lambda cost: -sum(cost[1]))[:_SHOWN]:
            terminalreporter.write_line("{:8.1f} {:8.1f}  {}".format(*seconds, name))
    own, children = (sum(test[place] for test in _seconds.values()) for place in (0, 1))
    terminalreporter.write_line(f"{own:8.1f} {children:8.1f}  all {len(_seconds)}")
