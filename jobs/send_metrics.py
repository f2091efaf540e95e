"""Send to MLflow what a run could not send because the server was away.

Usage: python jobs/send_metrics.py outputs/runs/my-run [--tracking-uri http://host:port]
The folder may lie in object storage (s3://bucket/outputs/runs/my-run).
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from rayembed.assets.storage import is_remote
from rayembed.assets.stored_folder import StoredFolder
from rayembed.errors import RayembedError
from rayembed.registry.tracking import send_metrics


def main(arguments: list[str]) -> int:
    """The exit code: 0 when MLflow has everything, 2 when not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="the run's folder, which holds metrics.jsonl")
    parser.add_argument("--tracking-uri", help="where the same MLflow can be reached now")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        with tempfile.TemporaryDirectory(prefix="run-") as scratch:
            local = scratch if is_remote(options.folder) else options.folder
            files = StoredFolder(options.folder, Path(local))
            files.fetch()
            num_steps = send_metrics(files.local, tracking_uri=options.tracking_uri)
            files.keep()
    except RayembedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"sent {num_steps} steps; MLflow has everything of {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
