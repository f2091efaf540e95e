"""Settings of label repair: the judge of hard negatives, and the action on false ones."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayembed.config.data_steps import DataStep
from rayembed.config.settings import Settings
from rayembed.config.table import SettingsTable, load


class Judge(Settings):
    """Base class of judges, which detect false negatives among the hard negatives of a row.

    Base class of the members of `JUDGES`.
    """

    if TYPE_CHECKING:
        kind: str
        """Name in the table."""

    needs: ClassVar[Literal["cpu", "gpu or machine"]] = "cpu"
    """Resources of the tasks that decide; see `data.work_items.Needs`."""

    @property
    def summary(self) -> str:
        """The judge's model in a few words."""
        return self.kind

    @property
    def models(self) -> Mapping[str, str]:
        """Setting → asset reference of each model that the judge loads."""
        return {}

    def check(self, setting: str) -> None:
        """Check that the judge's models were downloaded and can be loaded.

        Args:
            setting: path of the judge's settings, for messages.

        Raises:
            AssetError, ArtifactError: one cannot; the message begins with its setting.
        """

    def check_endpoint(self, setting: str, storage: str) -> None:
        """Check, as far as this machine can, that a judge behind an endpoint can be
        reached.

        Args:
            setting: path of the judge's settings, for messages.
            storage: where answers of earlier jobs lie.

        Raises:
            ConfigError: it cannot.
        """

    def inputs(self, fingerprint: Callable[[str], str]) -> dict[str, Any]:
        """Return everything that decides the verdicts, as plain values for a fingerprint.

        Args:
            fingerprint: gives that of a model's weights by its reference.
        """
        raise TypeError(f"{type(self).__name__} does not implement inputs")

    def ready(self, work: Any) -> Any:
        """Do one-time work before the tasks start; return a picklable function that judges
        records.

        Args:
            work: the data set's parts and where answers are kept, a `JudgeWork`.
        """
        raise TypeError(f"{type(self).__name__} does not implement ready")


JUDGES = SettingsTable(
    "rayembed.judges",
    Judge,
    (
        "rayembed_extras.synthesis.repair.cross_encoder:CrossEncoderJudge",
        "rayembed_extras.synthesis.repair.endpoint:EndpointJudge",
    ),
)
"""Kinds of judges. Their modules import numpy, torch and aiohttp inside functions: settings are
read before they are needed."""

if TYPE_CHECKING:
    AnyJudge = Judge
else:
    AnyJudge = JUDGES.union()

Action = Literal["relabel", "drop", "drop_row"]


class RepairConfig(DataStep):
    """Find and repair false negatives among the hard negatives (RLHN, arXiv 2505.16967)."""

    kind: ClassVar[str] = "repair"
    folder: ClassVar[str] = "repaired"
    heading: ClassVar[str] = "repair"
    least: ClassVar[tuple[str, ...]] = (
        "judge.kind=cross_encoder",
        "judge.model=hf://owner/model",
    )

    judge: AnyJudge
    action: Action = "relabel"
    """Action on a false negative. `relabel`: it becomes a further positive of its row, and a
    further row has it as the positive that is trained on. `drop`: it is a negative no more, also
    where it stands in the batch as another row's document. `drop_row`: its row is left out."""

    @property
    def summary(self) -> str:
        """Describe the action and the judge in a few words, for tables."""
        return f"{self.action} by {self.judge.summary}"

    @property
    def of_negatives(self) -> str:
        """Describe the action on false negatives in a few words, for tables."""
        return f"{self.action} of false ones"

    @property
    def models(self) -> Mapping[str, str]:
        """Setting → asset reference of each model that the judge loads."""
        return {f"judge.{name}": reference for name, reference in self.judge.models.items()}

    def treatment(self, write: Callable[[str], str]) -> str:
        """Describe for the audit page which judge was used and what was done."""
        judge = write(self.judge.summary)
        return f"false negatives found by `{judge}` and repaired ({self.action})"

    def check_fits(self, dataset: Any) -> None:
        """Check that rows have hard negatives; raises the same error as the base class
        documents.
        """
        if not dataset.has_negatives:
            raise ValueError(
                f"data set {dataset.name!r}: repair looks for false negatives among the hard "
                "negatives of each row, but the rows have no hard negatives; mine some "
                "(mining.teacher=…), name the column of hard negatives (source.negatives), or "
                "set repair=null"
            )

    def check(self, setting: str) -> None:
        """Check the models that the judge loads."""
        self.judge.check(f"{setting}.judge")

    def check_endpoint(self, setting: str, storage: str) -> None:
        """Check that the judge can be reached."""
        self.judge.check_endpoint(f"{setting}.judge", storage)

    def make(self, context: Any, dataset: Any, parent: Any, held_out: Any) -> Any:
        """Repair the records of a data set; return the new folder."""
        make = load("rayembed_extras.synthesis.repair.repair:make_repaired")
        return make(context, dataset, parent)
