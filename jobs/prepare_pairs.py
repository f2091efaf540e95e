"""Convert, clean and sample data sets: records in Parquet, with a manifest and an audit."""

import sys

from rayembed.pipeline.data_jobs import run_data_job

if __name__ == "__main__":
    sys.exit(run_data_job(sys.argv[1:], until="records", about=__doc__))
