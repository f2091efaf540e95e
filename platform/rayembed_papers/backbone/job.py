"""Run the backbone job, from its command-line arguments to scores, exit codes and messages."""

import shlex

from rayembed.display.tables import Table, console
from rayembed.errors import DivergenceError
from rayembed.pipeline.job import Job, JobContext, Reader, names_in, option
from rayembed_papers.backbone.settings import BackboneRun


def _evaluate(run: BackboneRun, context: JobContext) -> int:
    # torch, transformers and Ray; the rest of the job needs none of them.
    from rayembed.registry.tracking_uri import reachable_tracking_uri
    from rayembed_papers.backbone.evaluation import evaluate_backbone
    from rayembed_papers.backbone.tracking import track

    tracking_uri = reachable_tracking_uri(run.placement.tracking_uri, run.placement.storage_path)
    scores = evaluate_backbone(run)
    complete = track(scores, tracking_uri)
    out = context.out
    for name, text in scores.reports.items():
        if name.endswith(".md"):
            out.write(f"{text}\n")
    for name, error in scores.failed.items():
        out.write(f"Without a score  {name}: {error}\n")
    out.write(f"Backbone   {scores.backbone.name}, weights {scores.backbone.weights}\n")
    out.write(f"Results    {scores.folder} ({', '.join(scores.reports)})\n")
    ui = "" if tracking_uri.startswith("http") else "mlflow ui --backend-store-uri "
    out.write(f"MLflow     {ui}{shlex.quote(tracking_uri)}\n")
    if not complete:
        out.write("MLflow     lacks some data: run the same command again to send the rest\n")
    if any(not isinstance(error, DivergenceError) for error in scores.failed.values()):
        out.write("Next       run the same command again to compute only what is missing\n")
    return 1 if scores.failed else 0


def _show(run: BackboneRun, context: JobContext) -> None:
    """Print the resolved settings and the protocol of each finetuning."""
    from rayembed_papers.backbone.catalogue import plan_of

    plan = plan_of(run)
    context.out.write(f"# backbone evaluation, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    context.out.flush()
    rows = []
    total = 0
    for one in plan.finetunings:
        protocol = one.protocol
        grid = (protocol.learning_rates, protocol.batch_sizes, protocol.seeds)
        trials = len(grid[0]) * len(grid[1]) * len(grid[2])
        total += trials
        scored = [
            f"{task} ({number})" if number > 1 else task
            for task in one.tasks
            if (number := sum(s.task == task for s in one.scored))
        ]
        rates, batches = (", ".join(f"{value:g}" for value in values) for values in grid[:2])
        numbers = (str(protocol.epochs), str(protocol.max_length), rates, batches, str(trials))
        rows.append([one.name, one.start or "backbone", ", ".join(scored), *numbers])
    heads = ["Finetuning", "Starts from", "Scored on", "Epochs", "Tokens", "Rates", "Batches"]
    console(context.err).print(Table([*heads, "Trials"], rows, align="lllllllr", look="open"))
    context.err.write(f"{total} trials\n")


def _list(context: JobContext) -> None:
    from rayembed_papers.backbone.catalogue import TASKS
    from rayembed_papers.backbone.xtreme_r import LEFT_OUT

    for task in TASKS.values():
        context.out.write(f"{task.benchmark:9} {task.name:13} {task.metric}\n")
    for name, why in LEFT_OUT.items():
        context.out.write(f"left out  {name:13} {why}\n")


_READER = Reader(
    kind=BackboneRun,
    base=BackboneRun.read,
    examples="protocol.seeds=[0] placement.use_gpu=true",
    own=(
        option(
            "--backbone REFERENCE",
            "an encoder: a folder, hf://org/name@revision, s3://…; a family of transformers (BERT, "
            "XLM-R, …) or a NomicBert, dense or with experts",
            sets="backbone",
            missing="no backbone: give --backbone, a folder, hf://org/name@revision or s3://…",
        ),
        option("--benchmark glue|xtreme-r", "a benchmark", sets="benchmarks", often=True),
        option("--tasks A,B", "single tasks; see --list", sets="tasks", type=names_in),
    ),
)

run_backbone_job = Job(
    options=_READER.options,
    read=_READER,
    run=_evaluate,
    lists=("the tasks", _list),
    shows=("the evaluation", "its grid", _show),
    log=(__package__,),
    example="--backbone bert-base --tasks RTE",
)
"""The job that finetunes an encoder; its exit code is 1 where a task has no score."""
