"""Put similar pairs into batches: contextual clusters."""

import sys

from rayembed.pipeline.data_jobs import data_job

if __name__ == "__main__":
    sys.exit(data_job("clustered")(sys.argv[1:], about=__doc__))
