"""Runs scripts in forked processes, `--help` in a fresh one, and tells what they did.

Reads JSON from its standard input: script → commands. Writes JSON: script → a report for `--help`
and for each command, of its exit code, of what it started, wrote or connected to, and of the heavy
modules that are loaded by then. The commands are forked from a process that has torch.
"""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

HEAVY = ("ray", "torch", "deepspeed", "mlflow", "mteb", "transformers")

STARTS = ("subprocess.", "os.system", "os.fork", "os.posix_spawn", "os.exec", "socket.connect")
WRITES = ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "shutil.", "tempfile.")

found: list[str] = []


def note(event: str, args: tuple[Any, ...]) -> None:
    """Keep the events that start or write something."""
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes and args[0] == os.devnull:
        return
    if writes or event.startswith((*STARTS, *WRITES)):
        found.append(f"{event} {args[0] if args else ''}")


def run(script: str, argv: list[str]) -> dict[str, Any]:
    """What the command did."""
    sys.argv = [script, *argv]
    sys.path[0] = str(Path(script).parent)
    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    found.clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    heavy = [name for name in HEAVY if name in sys.modules]
    return {"code": code, "found": list(found), "heavy": heavy, "out": out.getvalue(),
            "err": err.getvalue()[-2000:]}  # fmt: skip


def forked(script: str, commands: list[list[str]]) -> list[dict[str, Any]]:
    """What each of a script's commands did, in a process of theirs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(note)
            told = json.dumps([run(script, argv) for argv in commands]).encode()
            with os.fdopen(write, "wb") as pipe:
                pipe.write(told)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    reports: list[dict[str, Any]] = json.loads(told)
    return reports


if __name__ == "__main__":
    from rayembed.recipes.catalogue import get_recipe  # what nearly all need, imported once

    asked = json.load(sys.stdin)
    told = {script: forked(script, [["--help"]]) for script in asked}
    from rayembed.pipeline.checks.files import look_at
    from rayembed.pipeline.run.dry_run import print_dry_run

    shown = get_recipe("nvembed-quickstart")
    print_dry_run(shown, look_at(shown), out=io.StringIO(), tables=io.StringIO())
    for script, commands in asked.items():
        told[script] += forked(script, commands)
    json.dump(told, sys.stdout)
