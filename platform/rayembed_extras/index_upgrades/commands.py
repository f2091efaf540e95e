"""Declare the job of index upgrades for the `rayembed` command."""

from rayembed.jobs.table import SERVE, Command

UPGRADE = Command(
    SERVE,
    "Change the model of an index: measure the roads, recommend one, and take it.\n\n"
    "A compatible model's queries go to the index as they are, an adapter maps them into it; a "
    "backfill embeds all documents again, and then the index's name refers to them. --rollback "
    "goes back.",
    "rayembed_extras.index_upgrades.job:run_upgrade_job",
)
