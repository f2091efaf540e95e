"""Run the job that finds and repairs hard negatives that in fact answer their query."""

from rayembed.pipeline.data.jobs import data_job

run_repair_job = data_job(
    "repaired",
    "--set data.datasets.pairs.mining.teacher=hf://owner/model "
    "--set 'data.datasets.pairs.repair.judge={kind: cross_encoder, model: hf://owner/rank}'",
)
