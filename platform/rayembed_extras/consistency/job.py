"""Run the job that filters pairs for consistency."""

from rayembed.pipeline.data.jobs import data_job

run_filter_job = data_job(
    "filtered", "--set data.datasets.pairs.consistency.teacher=hf://owner/model"
)
