"""Mine hard negatives with a teacher model."""

import sys

from rayembed.pipeline.data_jobs import data_job

if __name__ == "__main__":
    sys.exit(data_job("mined")(sys.argv[1:], about=__doc__))
