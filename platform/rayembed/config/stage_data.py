"""Checks that data sets provide what a stage requires."""

from collections.abc import Sequence

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import changed
from rayembed.config.stage import StageConfig


def check_dataset(stage: StageConfig, dataset: DatasetConfig) -> None:
    """Check that the stage can learn from rows of the data set.

    Raises:
        ValueError: its loss would always be zero, or its clusters are no batches of the stage.
    """
    name, hard = dataset.name, stage.batch.num_negatives and dataset.has_negatives
    in_batch = stage.batch.in_batch_negatives and dataset.in_batch_negatives
    in_batch |= "similarity" in stage.loss.needs  # rows learn from each other
    if not in_batch and not hard:
        raise ValueError(
            f"the data set {name!r} has no negatives in stage {stage.name!r}, so its "
            "loss is always zero; give it negatives (mining, or negatives of the "
            "source, with the stage's batch.num_negatives above 0) or allow in-batch "
            "negatives in both the stage and the data set"
        )
    if stage.batch.global_pairs == 1 and not hard:
        raise ValueError(
            f"stages.{stage.name}.batch.global_pairs is 1, and the data set {name!r} provides no "
            "hard negatives: the only pair of a batch is compared with nothing, so its loss is "
            "always zero; set batch.global_pairs to 2 or more (64 is usual)"
        )
    if stage.batch.policy == "clustered":
        _check_clusters(stage, dataset)


def _check_clusters(stage: StageConfig, dataset: DatasetConfig) -> None:
    """Check that the data set's clusters and their batch size fit the stage's batch policy.

    Raises:
        ValueError: it has none, or of another size, or takes no part in in-batch negatives.
    """
    pairs = stage.batch.global_pairs
    wanted = f"data.datasets.{dataset.name}.clusters"
    if dataset.clusters is None:
        raise ValueError(
            f"stage {stage.name!r} has the policy 'clustered', but the data set {dataset.name!r} "
            f"has no clusters; set {wanted} with batch_pairs={pairs}, or another policy"
        )
    if dataset.clusters.batch_pairs != pairs:
        raise ValueError(
            f"{wanted}.batch_pairs {dataset.clusters.batch_pairs} must equal batch.global_pairs "
            f"{pairs} of stage {stage.name!r}, which uses these clusters as whole batches"
        )
    if not dataset.in_batch_negatives:
        raise ValueError(
            f"stage {stage.name!r} has the policy 'clustered', which puts pairs that are hard "
            "negatives of each other into the same batch, but "
            f"data.datasets.{dataset.name}.in_batch_negatives=false does not use them; set it to "
            "true, or set another batch.policy"
        )


def check_similarity(stage: StageConfig, used: Sequence[DatasetConfig]) -> None:
    """Raise if the loss would treat graded pairs as positives, or needs graded pairs and no data
    set has any.
    """
    wanted = "similarity" in stage.loss.needs
    graded = [dataset.name for dataset in used if dataset.source.is_graded]
    if graded and not wanted:
        raise ValueError(
            f"stage {stage.name!r}: pairs of the data set {graded[0]!r} are graded, so some are "
            f"dissimilar, but the loss {stage.loss.kind!r} would treat all as positives; use a "
            f"loss over graded pairs, or set data.datasets.{graded[0]}.source.kind=sts"
        )
    # Records of an earlier job may be graded: that is known when they are read.
    if wanted and not graded and not any(d.source.has_records for d in used):
        raise ValueError(
            f"stage {stage.name!r}: the loss {stage.loss.kind!r} compares graded pairs, but none "
            f"of its data sets ({', '.join(d.name for d in used)}) has graded pairs; to read "
            "sentence pairs with similarity scores, set "
            f"data.datasets.{used[0].name}.source.kind=graded"
        )


def check_teachers(stage: StageConfig, used: Sequence[DatasetConfig]) -> None:
    """Raise if the loss needs teacher scores that rows lack, or a row's scores come from different
    teachers.
    """
    loss = stage.loss.kind
    if "teacher_scores" not in stage.loss.needs:
        return
    for dataset in used:
        mining = dataset.mining
        if mining is not None and mining.further_teachers and mining.rescoring is None:
            raise ValueError(
                f"stage {stage.name!r}: the loss {loss!r} compares scores of a row's texts, but "
                f"the scores in the data set {dataset.name!r} come from several teachers; set "
                f"data.datasets.{dataset.name}.mining.further_teachers=[], or let a cross-encoder "
                "score all texts (mining.rescoring.model)"
            )
    if not any(d.mining is not None or d.source.has_records for d in used):
        raise ValueError(
            f"stage {stage.name!r}: the loss {loss!r} learns from a teacher's scores, but none of "
            f"its data sets ({', '.join(d.name for d in used)}) has such scores; let a teacher "
            f"mine negatives (data.datasets.{used[0].name}.mining.teacher=…)"
        )


def origin_of_negatives(dataset: DatasetConfig) -> str | None:
    """Path of the setting that gives a data set its hard negatives; None if no setting
    does.

    Classes always give some; that a stage leaves these out is no contradiction.
    """
    if dataset.mining is not None:
        return "mining"
    named = "negatives" in dataset.source.names_by_setting
    return "source.negatives" if named and dataset.source.brings_negatives else None


def check_negatives_used(dataset: DatasetConfig, using: Sequence[StageConfig]) -> None:
    """Check that a stage uses the hard negatives that are prepared for a data set.

    Args:
        using: stages that use the data set; without any it is not prepared.

    Raises:
        ValueError: no stage takes them.
    """
    if not using:
        return
    first, every = using[0], ", ".join(stage.name for stage in using)
    origin = origin_of_negatives(dataset)
    if origin is not None and not _takes_negatives(using):
        number = dataset.mining.num_negatives if dataset.mining is not None else 7
        raise ValueError(
            f"data.datasets.{dataset.name}.{origin} provides hard negatives, but no stage that "
            f"uses the data set ({every}) uses them: set "
            f"stages.{first.name}.batch.num_negatives={number} (it is 0), or "
            f"data.datasets.{dataset.name}.{origin}=null"
        )


def _takes_negatives(stages: Sequence[StageConfig]) -> bool:
    return any(stage.batch.num_negatives for stage in stages)


def as_taken(dataset: DatasetConfig, stages: Sequence[StageConfig]) -> DatasetConfig:
    """Copy the data set without mining and cluster settings that no stage uses."""
    using = [stage for stage in stages if dataset.name in stage.datasets]
    if using and not _takes_negatives(using):
        dataset = without_negatives(dataset)
    return with_taken_clusters(dataset, stages)


def with_taken_clusters(dataset: DatasetConfig, stages: Sequence[StageConfig]) -> DatasetConfig:
    """Copy the data set without its cluster settings if no stage that uses it needs clusters."""
    using = [stage for stage in stages if dataset.name in stage.datasets]
    idle = using and not any(stage.batch.policy == "clustered" for stage in using)
    return changed(dataset, clusters=None) if idle and dataset.clusters is not None else dataset


def without_negatives(dataset: DatasetConfig) -> DatasetConfig:
    """Copy the data set without settings that add hard negatives and steps that change them."""
    steps = [step.kind for step in dataset.steps if step.of_negatives]
    dataset = changed(dataset, **dict.fromkeys(steps))
    while (origin := origin_of_negatives(dataset)) is not None:
        if origin == "mining":
            dataset = changed(dataset, mining=None)
        else:
            source = changed(dataset.source, **{origin.removeprefix("source."): None})
            dataset = changed(dataset, source=source)
    return dataset


def check_negatives(stage: StageConfig, used: Sequence[DatasetConfig]) -> None:
    """Check that each data set can supply as many hard negatives for a query as the stage
    uses.

    Raises:
        ValueError: none has any, or one has fewer.
    """
    wanted = stage.batch.num_negatives
    if wanted and not any(dataset.has_negatives for dataset in used):
        raise ValueError(_no_negatives(stage, used))
    for dataset in used:
        setting, most = dataset.most_negatives or ("", wanted)
        if most < wanted:
            verb = "mines" if dataset.mining is not None else "draws"
            raise ValueError(
                f"stage {stage.name!r} uses batch.num_negatives {wanted} for each query, but the "
                f"data set {dataset.name!r} {verb} only {most}; raise "
                f"data.datasets.{dataset.name}.{setting} or lower "
                f"stages.{stage.name}.batch.num_negatives"
            )


def _no_negatives(stage: StageConfig, used: Sequence[DatasetConfig]) -> str:
    """Build the error message for a stage that needs hard negatives from data sets without any."""
    first = used[0].name
    wanted, names = stage.batch.num_negatives, ", ".join(dataset.name for dataset in used)
    columns = [
        f"data.datasets.{dataset.name}.source.negatives"
        for dataset in used
        if "negatives" in dataset.source.names_by_setting
    ]
    told = f"name the column in which rows bring them ({columns[0]}=negatives), " if columns else ""
    return (
        f"stages.{stage.name}.batch.num_negatives asks for {wanted} hard negatives of each query, "
        f"and none of the stage's data sets ({names}) has any: {told}have them mined "
        f"(data.datasets.{first}.mining.teacher=…), or set "
        f"stages.{stage.name}.batch.num_negatives=0"
    )
