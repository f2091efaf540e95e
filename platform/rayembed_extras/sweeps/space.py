"""Parse and sample search spaces over a run's settings: `path.to.setting=loguniform(1e-5,
1e-3)`.

    grid(a, b)            every value, in every search
    choice(a, b)          one of the values
    uniform(low, high)    a number between, both ends included
    loguniform(low, high) as uniform, of the logarithm
    integers(low, high)   a whole number between, both ends included

Values are written as in `--set`. A comma within brackets, braces, parentheses or quotes divides
nothing, so values may be lists and groups.
"""

import difflib
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from rayembed.config.credentials import refuse_credentials_within, without_credentials
from rayembed.config.override import override
from rayembed.config.settings import SettingsT, nearest
from rayembed.errors import ConfigError

Values = Mapping[str, str]
"""Path of a setting → its value, as text of `--set`."""

Kind = Literal["grid", "choice", "uniform", "loguniform", "integers"]

_KINDS: tuple[Kind, ...] = ("grid", "choice", "uniform", "loguniform", "integers")
_BEGUN = re.compile(r"([A-Za-z_]\w*)\s*[(\[{]")
_FINITE = ("grid", "choice")
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
_CLOSING = {"[": "]", "{": "}", "(": ")"}

_NOT_SEARCHED = {
    "name": "each trial has a name of its own",
    "placement": "where a run is executed changes none of its weights, so there is nothing to "
    "compare; set it with --set",
}


@dataclass(frozen=True)
class Domain:
    """Values that a search may give one setting."""

    kind: Kind
    values: tuple[str, ...] = ()
    """Values of `grid` and `choice`, as text."""
    low: float = 0.0
    """Lower bound of all other domains."""
    high: float = 0.0

    @property
    def is_finite(self) -> bool:
        """Whether the domain lists its values."""
        return self.kind in _FINITE

    @property
    def ends(self) -> tuple[str, ...]:
        """All values of a listed domain, or the lowest and the highest of an interval."""
        return self.values if self.is_finite else (self.text(self.low), self.text(self.high))

    def text(self, number: float) -> str:
        """Format a number exactly."""
        return str(round(number)) if self.kind == "integers" else repr(float(number))

    def draw(self, generator: random.Random) -> str:
        """Sample one value, as text."""
        match self.kind:
            case "grid" | "choice":
                return generator.choice(self.values)
            case "integers":
                return str(generator.randint(int(self.low), int(self.high)))
            case "uniform":
                return self.text(generator.uniform(self.low, self.high))
        drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return self.text(min(max(drawn, self.low), self.high))


Space = Mapping[str, Domain]
"""Path of a setting → its domain, in the written order."""


def is_domain(text: str) -> bool:
    """Whether the value of an assignment is written like a domain, such as `choice(…)`."""
    match = _CALL.fullmatch(text)
    return match is not None and match[1] in _KINDS


def is_nearly_domain(text: str) -> bool:
    """Whether a text may be a misspelt domain: its first word is close to a kind's name, and a
    bracket follows.
    """
    match = _BEGUN.match(text)
    return match is not None and bool(difflib.get_close_matches(match[1], _KINDS, n=1))


def parse_domain(path: str, text: str) -> Domain:
    """Parse the text of a domain.

    Raises:
        ConfigError: not of the form `kind(…)`, an unknown kind, no values, the same value twice,
            wrong limits.
    """
    given = f"{path}={without_credentials(text)}"
    match = _CALL.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{given}: expected one of {', '.join(f'{k}(…)' for k in _KINDS)}, with parentheses"
        )
    if match[1] not in _KINDS:
        raise ConfigError(
            f"{given}: there is no search space {match[1]!r}; {nearest(match[1], _KINDS)} Search "
            f"spaces are {', '.join(f'{kind}(…)' for kind in _KINDS)}"
        )
    kind: Kind = match[1]
    values = _split(given, match[2])
    if kind in _FINITE:
        if not values:
            raise ConfigError(f"{given}: an empty search space; name at least one value")
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(f"{given}: the value {without_credentials(twice)!r} is listed twice")
        return Domain(kind, tuple(values))
    low, high = _limits(given, kind, values)
    return Domain(kind, low=low, high=high)


def parse_space(entries: Mapping[str, Any]) -> dict[str, Domain]:
    """Parse a space: setting path → text of a domain, or a list of values, which is a grid.

    Raises:
        ConfigError: as `parse_domain`; or a value is an address with a password, key or token.
    """
    space = {}
    for path, entry in entries.items():
        if isinstance(entry, list | tuple):
            values = tuple(as_text(value) for value in entry)
            if not values:
                raise ConfigError(f"{path}: an empty search space; name at least one value")
            space[path] = Domain("grid", values)
        else:
            space[path] = parse_domain(path, str(entry))
        try:
            for value in space[path].values:
                refuse_credentials_within(value)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
    return space


def as_text(value: Any) -> str:
    """Text of a YAML value in the form that `--set` accepts."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return value
    flow = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return str(flow).strip()


def check_paths(space: Space) -> None:
    """Check that no setting is searched twice, and that all of them affect training.

    Whether a run has the settings is seen when values are put in (`apply`): some are there only
    beside a value of another one, as `model.pooling.num_latents` is.

    Raises:
        ConfigError: one is, or there is nothing to search.
    """
    if not space:
        raise ConfigError(
            "an empty search space: name a setting and its values with --set path=choice(a, b)"
        )
    for path in space:
        head = path.partition(".")[0]
        if head in _NOT_SEARCHED:
            raise ConfigError(f"{path} cannot be searched: {_NOT_SEARCHED[head]}")
        for other in space:
            if other.startswith(f"{path}.") and not path.endswith(".kind"):
                raise ConfigError(
                    f"{path} and {other} are both searched, but {other} is part of {path}; leave "
                    "one of them out"
                )


def corners(space: Space, most: int) -> Iterator[dict[str, str]]:
    """Yield combinations of all domains' extreme values; if there are more than `most`, only the
    first and its single changes.
    """
    if math.prod(len(domain.ends) for domain in space.values()) <= most:
        yield from _product({path: domain.ends for path, domain in space.items()})
        return
    first = {path: domain.ends[0] for path, domain in space.items()}
    yield first
    for path, domain in space.items():
        for end in domain.ends[1:]:
            yield {**first, path: end}


def all_values(space: Space) -> Iterator[dict[str, str]]:
    """Yield all combinations of a finite space; the last setting changes fastest.

    Raises:
        ConfigError: a domain is not finite.
    """
    for path, domain in space.items():
        if not domain.is_finite:
            raise ConfigError(
                f"{path}={domain.kind}({domain.low:g}, {domain.high:g}) has infinitely many "
                "values, but a grid search runs all values; use --search random or optuna, or "
                "list values with grid(…)"
            )
    yield from _product({path: domain.values for path, domain in space.items()})


def draws(space: Space, number: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield random draws of the space, each with every combination of its `grid` domains.

    The first ones are the same however many are asked for.
    """
    generator = random.Random(seed)
    grids = {path: domain.values for path, domain in space.items() if domain.kind == "grid"}
    for _ in range(number):
        drawn = {
            path: domain.draw(generator) for path, domain in space.items() if path not in grids
        }
        for cell in _product(grids):
            yield {path: cell[path] if path in grids else drawn[path] for path in space}


def apply(run: SettingsT, values: Values) -> SettingsT:
    """Set values in a run, in the order of the space.

    Raises:
        ConfigError: a value that the settings refuse; the message names the combination.
    """
    try:
        return override(run, [f"{path}={value}" for path, value in values.items()])
    except ConfigError as error:
        shown = ", ".join(f"{path}={without_credentials(v)}" for path, v in values.items())
        raise ConfigError(f"the search space contains an invalid run: {shown}\n{error}") from None


def _product(values: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _limits(given: str, kind: Kind, values: Sequence[str]) -> tuple[float, float]:
    if len(values) != 2:
        raise ConfigError(
            f"{given}: {kind} needs exactly two limits, the lowest and the highest value"
        )
    try:
        low, high = (float(value) for value in values)
    except ValueError:
        raise ConfigError(f"{given}: the limits of {kind} must be numbers") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{given}: the first limit of {kind} must be below the second")
    if kind == "loguniform" and low <= 0:
        raise ConfigError(f"{given}: the limits of loguniform must be above 0")
    if kind == "integers" and (low != int(low) or high != int(high)):
        raise ConfigError(f"{given}: the limits of integers must be whole numbers")
    return low, high


def _split(given: str, text: str) -> list[str]:
    """Split at commas outside of brackets and quotes, and strip the parts."""
    parts, start, expected = [], 0, ""
    quote = ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _CLOSING:
            expected = _CLOSING[character] + expected
        elif expected and character == expected[0]:
            expected = expected[1:]
        elif character == "," and not expected:
            parts.append(text[start:index])
            start = index + 1
    if quote or expected:
        raise ConfigError(f"{given}: {quote or expected[0]!r} is missing")
    parts = [part.strip() for part in [*parts, text[start:]]]
    if parts == [""]:
        return []
    if "" in parts:
        raise ConfigError(
            f"{given}: there is an empty value between two commas; write null for no value"
        )
    return [_unquoted(part) for part in parts]


def _unquoted(part: str) -> str:
    quoted = len(part) > 1 and part[0] == part[-1] and part[0] in "\"'" and part.count(part[0]) == 2
    return part[1:-1] if quoted else part
