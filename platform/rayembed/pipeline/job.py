"""Turn the declaration of a job into a command with options and an exit code.

A job declares its options, the reader that turns them into what it works on, its work, and what
`--list`, `--dry-run` and the like do instead of it. Everything else stands here once: parsing,
`--help`, messages of errors, signals, the log, exit codes. Imports neither Ray nor torch; a job
imports them in its work, so that whatever only prints needs neither and starts nothing.
"""

import argparse
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Generic, TextIO, TypeVar

from rayembed.config.credentials import check_address, refuse_credentials_within
from rayembed.config.document import AnyDocument
from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.config.override import overridden
from rayembed.config.settings import Settings
from rayembed.display.progress import doing, present_phase
from rayembed.display.quiet import quiet
from rayembed.errors import ConfigError, RayembedError
from rayembed.pipeline.stopping import hearing

T = TypeVar("T")
AnySettings = TypeVar("AnySettings", bound=Settings)

RUN = "run"
"""The action of a job whose arguments ask for no other."""


@dataclass(frozen=True)
class Option:
    """Declaration of a command-line option."""

    flag: str
    arguments: Mapping[str, Any]
    """Arguments of argparse's `add_argument`."""
    sets: str | None = None
    """Path of the setting that the option sets; None: the job reads the option itself."""
    missing: str | None = None
    """Error message if neither the option nor a file sets the setting."""
    names: Callable[[], Iterable[str]] | None = None
    """Function that lists values for shell completion, beside files."""

    def value(self, args: argparse.Namespace) -> Any:
        """Value of the option in the parsed arguments; None if the option is absent."""
        name = self.arguments.get("dest", self.flag.removeprefix("--").replace("-", "_"))
        given = getattr(args, name)
        return None if given is False or given == [] else given


def option(
    usage: str,
    what: str,
    *,
    sets: str | None = None,
    missing: str | None = None,
    often: bool = False,
    names: Callable[[], Iterable[str]] | None = None,
    **arguments: Any,
) -> Option:
    """Declare an option in the form that `--help` shows: `--flag`, `--flag VALUE` or `--flag
    {one,other}`.

    Args:
        what: help text; that it may be given often and its default are added.
        often: the value is a list, empty by default.
        names: lists values that a shell offers.
    """
    flag, _, metavar = usage.partition(" ")
    if arguments.get("type") is float:
        arguments["type"] = finite_number
    if not metavar:
        arguments["action"] = "store_true"
    elif metavar.startswith("{"):
        arguments["choices"] = metavar.strip("{}").split(",")
    else:
        arguments["metavar"] = metavar
    if often:
        what += "; may be given often"
        arguments |= {"action": "append", "default": []}
    elif arguments.get("default"):
        what += "; default: %(default)s"
    return Option(flag, {"help": what, **arguments}, sets, missing, names)


@dataclass(frozen=True, kw_only=True)
class Reader(Generic[AnySettings]):
    """Reader of a job's settings from the command line: the recipe, then options, then each
    `--set`, then `--name`.
    """

    kind: type[AnySettings]
    examples: str
    """Examples of settings in the help text of `--set`."""
    own: tuple[Option, ...] = ()
    """Options of this command alone that each set one setting."""
    base: Callable[[str], AnySettings] | None = None
    """Function from the value of `--recipe` to settings; None: the command has no such option."""
    recipe: str = "a file that --dry-run printed"
    """Help text of `--recipe`."""
    names: Callable[[], Iterable[str]] = tuple
    """Function that lists the recipe names for `--recipe`."""
    default: str | None = None
    """Recipe of a command line without `--recipe`; None starts from empty settings."""
    named: bool = False
    """Whether `--name` sets the settings' name."""

    @property
    def options(self) -> tuple[Option, ...]:
        """All command-line options that the reader evaluates."""
        file = "run.yaml" if self.default is None else "NAME|run.yaml"
        recipe = option(f"--recipe {file}", self.recipe, default=self.default, names=self.names)
        change = option(
            "--set path.to.setting=value",
            f"change a setting: {self.examples}",
            often=True,
            dest="assignments",
        )
        name = option(
            "--name NAME", "name of the run; a run submitted again under its name resumes"
        )
        return (
            *self.own,
            *([] if self.base is None else [recipe]),
            change,
            *([name] if self.named else []),
        )

    def __call__(self, args: argparse.Namespace) -> AnySettings:
        """Build the settings that the arguments describe.

        Raises:
            ConfigError: an unknown recipe or setting, a wrong file or value, a missing setting.
        """
        values: dict[str, Any] = {}
        if self.base is not None and args.recipe is not None:
            values = self.base(args.recipe).model_dump(mode="json")
        for each in self.own:
            *groups, last = (each.sets or "").split(".")
            given = each.value(args)
            if last and given is not None:
                group = values
                for key in groups:
                    group = group.setdefault(key, {})
                group[last] = given
            elif each.missing is not None and [*groups, last][0] not in values:
                raise ConfigError(each.missing)
        paths = [text.partition("=")[0].strip() for text in args.assignments]
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            sys.stderr.write(f"warning: --set {path} is given several times; the last one counts\n")
        name = getattr(args, "name", None)
        named = [] if name is None else [f"name={name}"]
        return with_named_benchmarks(overridden(self.kind, values, [*args.assignments, *named]))


def named_or_read(
    recipe: str,
    names: Iterable[str],
    get: Callable[[str], AnyDocument],
    read: Callable[[str], AnyDocument],
) -> AnyDocument:
    """Return the named recipe, or the settings read from a YAML file.

    Args:
        get: the recipe of a name; refuses a name that it does not know.
        read: what a file holds.

    Raises:
        ConfigError: no such recipe, or a file that is none of the kind.
    """
    is_file = recipe.endswith((".yaml", ".yml")) or "/" in recipe or Path(recipe).is_file()
    return read(recipe) if is_file and recipe not in names else get(recipe)


def names_in(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list into names, without repetitions."""
    names = (name.strip() for name in (text or "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def check_no_credentials(argv: Sequence[str]) -> None:
    """Raise if an argument is an address with a password, secret key or token.

    Before the words are parsed, because argparse repeats what it cannot read.

    Raises:
        ConfigError: one is; the message names the option and does not repeat the word.
    """
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag, _, word = word.partition("=")  # noqa: PLW2901
        if flag != "--set":
            check_address(word, flag or "an argument")
            continue
        try:
            refuse_credentials_within(word)
        except ValueError as error:
            path = word.partition("=")[0]
            shown = f" {path}" if path.replace(".", "").replace("_", "").isalnum() else ""
            raise ConfigError(f"--set{shown}: {error}") from None


def finite_number(text: str) -> float:
    """Parse the value of an option as a finite number; used as argparse's `type`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number, such as 0.01")
    return number


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that are at least `least`, for argparse's `type`."""

    def number(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} or more")
        return int(text)

    return number


@dataclass(frozen=True)
class JobContext:
    """Parsed arguments and output streams of a running job."""

    args: argparse.Namespace
    out: TextIO
    err: TextIO


Work = Callable[[T, JobContext], int | None]


@dataclass(frozen=True, kw_only=True)
class Job(Generic[T]):
    """Declaration of a job; calling it with arguments runs it and returns the exit code."""

    options: tuple[Option, ...] = ()
    """Options in addition to those of the fields below."""
    read: Callable[[argparse.Namespace], T]
    """Function from the arguments to the job's document; starts nothing."""
    run: Work[T]
    """Function that does the work; returns the exit code, None for 0."""
    lists: tuple[str, Callable[[JobContext], None]] | None = None
    """Description of `--list`'s output, and the function that prints it from the
    arguments alone."""
    alone: Sequence[tuple[Option, Callable[[JobContext], None]]] = ()
    """Other options that act on the arguments alone, by their action."""
    shows: tuple[str, str, Work[T]] | None = None
    """Descriptions of `--dry-run`'s output to stdout and to stderr, and the function that prints
    it."""
    instead: Sequence[tuple[Option, Work[T]]] = ()
    """Options that replace `run`; the first given one wins."""
    log: tuple[str, ...] = ()
    """Further packages whose progress is logged."""
    stopped: str = "stopped; run the same command again to continue from what is finished"
    """Last output line of an interrupted job."""
    example: str = ""
    """Minimal arguments of a dry run, in shell syntax; `--help` ends with them."""

    def __call__(
        self, argv: Sequence[str], *, about: str | None = None, prog: str | None = None
    ) -> int:
        """Run the job and return its exit code; see `exit_code`.

        Args:
            argv: arguments without the script's name.
            about: beginning of `--help`.
            prog: the command as the usage line shows it; None: the script's name.
        """
        begun = Event()

        def work() -> int | None:
            args = self.arguments(argv, about, prog)
            context = JobContext(args, sys.stdout, sys.stderr)
            for each, act_alone in self._alone():
                if each.value(args) is not None:
                    return act_alone(context)
            subject = self.read(args)
            for each, act in self._instead():
                if each.value(args) is not None:
                    return act(subject, context)
            log_to_stderr(*self.log)
            with doing(partial(_present, begun)):
                return self.run(subject, context)

        return exit_code(work, stopped=self.stopped, begun=begun)

    def resolve(self, argv: Sequence[str]) -> tuple[T, str]:
        """Parse the arguments, and return the job's settings and its action: `RUN`, or an option
        such as `--dry-run`.

        Raises:
            RayembedError: as the job's reader.
            SystemExit: as argparse has it, for `--help` (0) and unknown options (2).
        """
        args = self.arguments(argv)
        asked = [each.flag for each, _ in self._instead() if each.value(args) is not None]
        return self.read(args), [*asked, RUN][0]

    def arguments(
        self, argv: Sequence[str], about: str | None = None, prog: str | None = None
    ) -> argparse.Namespace:
        """Parse the arguments.

        Raises:
            ConfigError: an address among them holds a password, key or token.
            SystemExit: as argparse has it.
        """
        check_no_credentials(argv)
        parser = argparse.ArgumentParser(prog=prog, description=about, allow_abbrev=False)
        if self.example:
            parser.epilog = f"for example: {parser.prog} {self.example} --dry-run"
        for each in self.all_options:
            parser.add_argument(each.flag, **each.arguments)
        return parser.parse_args(list(argv))

    @property
    def all_options(self) -> tuple[Option, ...]:
        """All command-line options, including `--list`, `--dry-run` and other actions."""
        return (*self.options, *(each for each, _ in (*self._instead(), *self._alone())))

    def _alone(self) -> list[tuple[Option, Callable[[JobContext], None]]]:
        if self.lists is None:
            return list(self.alone)
        what, show = self.lists
        return [(option("--list", f"print {what}; start nothing"), show), *self.alone]

    def _instead(self) -> list[tuple[Option, Work[T]]]:
        if self.shows is None:
            return list(self.instead)
        document, beside, show = self.shows
        what = f"print {document} (stdout) and {beside} (stderr); start nothing"
        return [(option("--dry-run", what), show), *self.instead]


_begun: ContextVar[Event | None] = ContextVar("begun", default=None)


def work_begins() -> None:
    """Mark that the job's checks have passed and its work begins, so that later errors exit with 1,
    not 2.
    """
    if begun := _begun.get():
        begun.set()


def _present(begun: Event) -> str:
    """Text for the progress line when a job reports nothing else: the current phase of its run."""
    if not begun.is_set():
        return "at the start: imports and checks"
    return present_phase() or "at work"


def exit_code(
    work: Callable[[], int | None], *, stopped: str = Job.stopped, begun: Event | None = None
) -> int:
    """Run `work` and return the exit code: its result, 2 for invalid arguments, 1 for other
    failures, 130, 143 or 129 after a stop signal.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        stopped: the line that an interrupted job ends with.
        begun: is set by `work_begins`.
    """
    begun = begun or Event()
    before = _begun.set(begun)
    try:
        with hearing() as heard:
            try:
                return work() or 0
            except RayembedError as error:
                if heard.number is None:
                    sys.stderr.write(f"error: {error}\n")
                    return 2 if isinstance(error, ConfigError) and not begun.is_set() else 1
            except KeyboardInterrupt:
                pass
            except Exception:
                if heard.number is None:  # else it is what came of ending in the middle
                    raise
            with suppress(OSError):  # of a terminal that is gone
                sys.stderr.write(f"{stopped}\n")
            return heard.exit_code
    finally:
        _begun.reset(before)


def log_to_stderr(*packages: str) -> None:
    """Write rayembed's log to stderr, and only the warnings of other libraries.

    Args:
        packages: beside rayembed, whose progress is shown too.
    """
    quiet()
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S"
    )
    for package in ("rayembed", *packages):
        logging.getLogger(package).setLevel(logging.INFO)
