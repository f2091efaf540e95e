"""`python -m rayembed JOB`."""

import sys

from rayembed.jobs.command_line import main

if __name__ == "__main__":
    sys.exit(main())
