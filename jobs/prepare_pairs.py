"""Convert, clean and sample data sets: records in Parquet, with a manifest and an audit."""

import sys

from rayembed.pipeline.data_jobs import data_job

if __name__ == "__main__":
    sys.exit(data_job("records")(sys.argv[1:], about=__doc__))
