"""From the arguments of the adaptation job to its run. Imports neither Ray nor torch by itself."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rayembed.config.adaptation import Adaptation, read_adaptation
from rayembed.config.override import override
from rayembed.pipeline.adaptation_tables import print_adaptation, print_adaptations
from rayembed.pipeline.command_line import Action, exit_code, log_to_stderr, recipe_parser
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
            case Action.TRAIN:
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
    assignments = [*args.assignments]
    if args.name is not None:
        assignments.append(f"name={args.name}")
    run = override(_base(args.recipe), assignments)
    if args.list:
        return run, Action.LIST
    return run, Action.DRY_RUN if args.dry_run else Action.TRAIN


def _base(recipe: str) -> Adaptation:
    """The run of a recipe's name or of a YAML file."""
    is_file = recipe.endswith((".yaml", ".yml")) or "/" in recipe or Path(recipe).is_file()
    if is_file and recipe not in adaptation_names():
        return read_adaptation(recipe)
    return get_adaptation(recipe)
