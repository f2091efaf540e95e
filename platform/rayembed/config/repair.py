"""Settings of label repair: who judges hard negatives, and what is done with false ones."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayembed.config.settings import Settings
from rayembed.config.table import Table


class Judge(Settings):
    """Who tells which hard negatives of a row answer its query after all.

    Base class of the members of `JUDGES`.
    """

    if TYPE_CHECKING:
        kind: str
        """Name in the table."""

    needs: ClassVar[Literal["cpu", "gpu or machine"]] = "cpu"
    """What a task needs that reaches verdicts; see `data.work_items.Needs`."""

    @property
    def summary(self) -> str:
        """Model that judges, in a few words."""
        return self.kind

    @property
    def models(self) -> Mapping[str, str]:
        """Setting → asset reference of the models that it loads."""
        return {}

    def check(self, setting: str) -> None:
        """Return when its models were fetched and can be loaded.

        Args:
            setting: where the judge stands in the settings, for messages.

        Raises:
            AssetError, ArtifactError: one cannot; the message begins with its setting.
        """

    def check_asked(self, setting: str, storage: str) -> None:
        """Return when a model over the network can be asked, as far as this machine can tell.

        Args:
            setting: where the judge stands in the settings, for messages.
            storage: where answers of earlier jobs lie.

        Raises:
            ConfigError: it cannot.
        """

    def inputs(self, fingerprint: Callable[[str], str]) -> dict[str, Any]:
        """All that decides the verdicts, as plain values.

        Args:
            fingerprint: gives that of a model's weights by its reference.
        """
        raise TypeError(f"{type(self).__name__} judges nothing")

    def ready(self, work: Any) -> Any:
        """Do once what must be done before tasks begin; a `Decide`, which pickles.

        Args:
            work: the data set's parts and where answers are kept, a `JudgeWork`.
        """
        raise TypeError(f"{type(self).__name__} judges nothing")


JUDGES = Table(
    "rayembed.judges",
    Judge,
    (
        "rayembed.data.repair.cross_encoder:CrossEncoderJudge",
        "rayembed.data.repair.endpoint:EndpointJudge",
    ),
)
"""Kinds of judges. Their modules import numpy, torch and aiohttp inside functions: settings are
read before they are needed."""

if TYPE_CHECKING:
    AnyJudge = Judge
else:
    AnyJudge = JUDGES.union()

Action = Literal["relabel", "drop", "drop_row"]


class RepairConfig(Settings):
    """False negatives among the hard negatives are found and repaired (RLHN, arXiv 2505.16967)."""

    judge: AnyJudge
    action: Action = "relabel"
    """What is done with a false negative. `relabel`: it becomes a further positive of its row, and
    a further row has it as the positive that is trained on. `drop`: it is a negative no more, also
    where it stands in the batch as another row's document. `drop_row`: its row is left out."""
