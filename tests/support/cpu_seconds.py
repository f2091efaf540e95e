"""Plugin of pytest: a table of the tests that cost most CPU seconds, their child processes among
them, fixtures included.

    PYTHONPATH=tests/support pytest -p cpu_seconds tests/unit

Children that are not waited for, such as Ray's and those of a fork server, are not seen; with
pytest-xdist nothing is.
"""

import os

import pytest

_SHOWN = 40

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


def pytest_terminal_summary(terminalreporter):
    """Tell the costliest ones, and the sum of all."""
    terminalreporter.section("CPU seconds: own, children")
    costliest = sorted(_seconds.items(), key=lambda test: -sum(test[1]))
    for name, (own, children) in costliest[:_SHOWN]:
        terminalreporter.write_line(f"{own:8.1f} {children:8.1f}  {name}")
    own, children = (sum(test[place] for test in _seconds.values()) for place in (0, 1))
    terminalreporter.write_line(f"{own:8.1f} {children:8.1f}  all {len(_seconds)}")
