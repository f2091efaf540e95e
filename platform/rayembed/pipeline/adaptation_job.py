"""From the arguments of the adaptation job to its run. Imports neither Ray nor torch by itself."""

import sys
from collections.abc import Sequence

from rayembed.config.adaptation import Adaptation
from rayembed.pipeline.adaptation_tables import print_adaptation, print_adaptations
from rayembed.pipeline.command_line import (
    Action,
    action_of,
    assigned,
    exit_code,
    log_to_stderr,
    named_or_read,
    recipe_parser,
)
from rayembed.recipes.adaptation import adaptation_names, get_adaptation


def run_adaptation_job(argv: Sequence[str], *, default_recipe: str, about: str | None) -> int:
    """The exit code of the job: 0, 1 when it failed, 2 when it was asked wrongly.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
    """

    def work() -> None:
        run, action = resolve(argv, default_recipe, about=about)
        match action:
            case Action.LIST:
                print_adaptations(map(get_adaptation, adaptation_names()), out=sys.stdout)
            case Action.DRY_RUN:
                print_adaptation(run, out=sys.stdout, tables=sys.stderr)
            case Action.SEND_METRICS:
                from rayembed.pipeline.pending_metrics import send_pending

                send_pending(run, sys.stdout)
            case _:
                log_to_stderr()
                from rayembed.pipeline.adapt import adapt  # Ray; a dry run needs none

                adapt(run)

    return exit_code(work)


def resolve(
    argv: Sequence[str], default_recipe: str, *, about: str | None = None
) -> tuple[Adaptation, Action]:
    """The run that the arguments describe, and what to do with it.

    The recipe comes first, then each `--set` in its order, then `--name`.

    Raises:
        ConfigError: an unknown recipe or setting, a file that is no run, a wrong value.
        SystemExit: as argparse has it, for `--help` (0) and unknown options (2).
    """
    args = recipe_parser(
        default_recipe, about, example="corpus.texts.en.source.path=en.jsonl"
    ).parse_args(list(argv))
    base = named_or_read(args.recipe, adaptation_names(), get_adaptation, Adaptation)
    return assigned(base, args), action_of(args)
