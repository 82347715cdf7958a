"""The `Task` row of OpenWebText: pretraining from random weights on a corpus of token files."""

from typing import Literal

from pydantic import Field

from steelyard.schema import FrozenModel
from steelyard.tasks.held_out_loss import rows_task


class GeneratedTextConfig(FrozenModel):
    """How to generate a corpus (`question.data.made`): the number of `documents`, at least three,
    and the `seed`, 0 by default.
    """

    documents: int = Field(ge=3)
    seed: int = 0


class CorpusData(FrozenModel):
    """The fields of `question.data` of OpenWebText. `held_out` is the most validation rows whose
    loss is measured, `fingerprint` that of the published corpus (other data are not refused),
    `made` how to generate documents if no data path is given; None: data are required.
    """

    kind: Literal["openwebtext"]
    held_out: int = Field(
        ge=1, description="rows of validation documents for the loss before and after"
    )
    fingerprint: str | None = None
    made: GeneratedTextConfig | None = None


TASK = rows_task(
    name="openwebtext",
    noun="row",
    data=CorpusData,
    reader="steelyard.tasks.openwebtext.data:prepare",
    data_check="steelyard.data.corpus:check_token_files",
    batch_unit="rows",
)
