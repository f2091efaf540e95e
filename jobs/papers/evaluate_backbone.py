"""`rayembed papers-backbone` of this checkout."""

import sys

from rayembed_papers.jobs import BACKBONE

if __name__ == "__main__":
    sys.exit(BACKBONE(sys.argv[1:]))
