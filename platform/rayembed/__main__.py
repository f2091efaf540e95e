"""Entry point of `python -m rayembed JOB`, the same as the command `rayembed JOB`."""

import sys

from rayembed.jobs.command_line import main

if __name__ == "__main__":
    sys.exit(main())
