"""Declare the jobs of the papers for the `rayembed` command."""

from rayembed.jobs.table import Command

PAPERS = "papers"

BACKBONE = Command(
    PAPERS,
    "Finetune an encoder on GLUE or XTREME-R as a grid, and score it.",
    "rayembed_papers.backbone.job:run_backbone_job",
)
COMPRESSION = Command(
    PAPERS,
    "Measure pruning, recovery and quantisation as in NV-Embed's Tables 6 to 8.",
    "rayembed_papers.compression.job:run_compression_tables",
)
CONTEXT = Command(
    PAPERS,
    "Measure what CDE's batches and context do: clusters, documents, topics.",
    "rayembed_papers.context.job:run_context_job",
)
DIRECTIONS = Command(
    PAPERS,
    "Measure which of the papers' comparisons hold at a small size.",
    "rayembed_papers.directions.job:run_directions",
)
NOISE = Command(
    PAPERS,
    "Measure how much unrelated text lowers scores (Causal2Vec, Table 3).",
    "rayembed_papers.noise.job:run_noise_job",
)
PUBLISHED = Command(
    PAPERS,
    "Compare models by their results with the figures that the papers print.",
    "rayembed_papers.published.job:run_comparison_with_papers",
)
TABLES = Command(
    PAPERS,
    "Measure a table of a paper as a sweep over the cluster.",
    "rayembed_papers.tables.catalogue:run_table_sweeps",
)
