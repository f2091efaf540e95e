"""Runs modules as `python -m` would, in one process that finds none of the packages named.

Run: python without_packages.py ray,deepspeed "MODULE ARGUMENTS"...
"""

import importlib
import shlex
import sys
from importlib.machinery import PathFinder


class Without:
    """Finds what `PathFinder` finds, but for some packages."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in cls.hidden:
            return None
        return PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*given, **named):
        return PathFinder.find_distributions(*given, **named)

    @staticmethod
    def invalidate_caches():
        PathFinder.invalidate_caches()


def main():
    hidden, *commands = sys.argv[1:]
    Without.hidden = frozenset(hidden.split(","))
    sys.meta_path[sys.meta_path.index(PathFinder)] = Without
    for command in commands:
        module, *arguments = shlex.split(command)
        sys.stdout.write(f"=== {command}\n")
        importlib.import_module(module).main(arguments)
    came_in = sorted(Without.hidden & sys.modules.keys())
    sys.stdout.write(f"=== end {' '.join(came_in)}\n")


if __name__ == "__main__":
    main()
