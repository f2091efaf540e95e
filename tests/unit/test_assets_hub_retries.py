"""Which errors of the hub are met by another try, and how long is waited."""

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError
from waits import note_waits

from rayembed.assets.hub_client import TRIES_WITHOUT_ANSWER, WAITS_SECONDS, with_retries


@pytest.fixture
def waits(monkeypatch):
    """Seconds that would have been slept."""
    return note_waits(monkeypatch, "rayembed.assets.hub_client")


def answer(status: int, **headers: str) -> HfHubHTTPError:
    request = httpx.Request("GET", "http://127.0.0.1/api")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = httpx.Response(status, headers=named, request=request)
    return HfHubHTTPError(f"status {status}", response=response)


class Calls:
    """Raises the errors one after the other, then returns "done"."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.made = list(errors), 0

    def __call__(self) -> str:
        self.made += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_waits_double(waits):
    calls = Calls(answer(429), answer(500), answer(503))
    assert with_retries(calls, "data") == "done"
    assert (calls.made, waits) == (4, [2.0, 4.0, 8.0])


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry_After": "30"}, 30.0),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({"Retry_After": "1"}, 2.0),
        ({"Retry_After": "86400"}, 300.0),
        ({"Retry_After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 2.0),
    ],
)
def test_at_least_what_the_hub_asks_for_is_waited(headers, seconds, waits):
    with_retries(Calls(answer(429, **headers)), "data")
    assert waits == [seconds]


def test_the_last_error_is_raised_after_all_tries(waits):
    calls = Calls(*(answer(503) for _ in range(100)))
    with pytest.raises(HfHubHTTPError):
        with_retries(calls, "data")
    assert calls.made == len(WAITS_SECONDS) + 1
    calls = Calls(*(httpx.ConnectError("no") for _ in range(100)))
    with pytest.raises(httpx.ConnectError):
        with_retries(calls, "data")
    assert calls.made == TRIES_WITHOUT_ANSWER < len(WAITS_SECONDS) + 1


@pytest.mark.parametrize(
    "error", [answer(404), answer(403), answer(401), ValueError("no split"), OSError("disk full")]
)
def test_errors_that_stay_are_raised_at_once(error, waits):
    calls = Calls(error)
    with pytest.raises(type(error)):
        with_retries(calls, "data")
    assert (calls.made, waits) == (1, [])


def test_a_cause_that_a_library_hides_is_found(waits):
    """`datasets` raises its own errors `from None`; the hub's answer is in their context."""

    def hidden() -> Exception:
        try:
            try:
                raise answer(429)
            except OSError:
                raise FileNotFoundError("no data file") from None
        except FileNotFoundError as error:
            return error

    calls = Calls(hidden())
    assert with_retries(calls, "data") == "done"
    assert calls.made == 2


def test_an_error_after_a_passing_one_is_told_by_itself(waits):
    """Else a 404 after a 429 would count as overload for ever."""
    calls = Calls(answer(429), answer(404), answer(404))
    with pytest.raises(HfHubHTTPError, match="404"):
        with_retries(calls, "data")
    assert calls.made == 2
