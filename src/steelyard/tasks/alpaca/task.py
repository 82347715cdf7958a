"""The `Task` row of alpaca: instructions with answers, on which a trained model is fine-tuned."""

from typing import Literal

from pydantic import Field

from steelyard.schema import FrozenModel
from steelyard.tasks.held_out_loss import rows_task


class GeneratedConversationsConfig(FrozenModel):
    """How to generate alpaca's data (`question.data.made`): the number of distinct `conversations`,
    and the `seed`, 0 by default.
    """

    conversations: int = Field(ge=1)
    seed: int = 0


class AlpacaData(FrozenModel):
    """The fields of `question.data` of alpaca. `held_out` is the number of samples that are not
    trained on, `joint` what stands between instruction and input of alpaca's JSON, `last_target`
    whether a cut sample keeps the token behind the cut as a target. `fingerprint` is that of the
    published data (other data are not refused), `made` how to generate conversations if no data
    path is given; None: data are required.
    """

    kind: Literal["alpaca"]
    held_out: int = Field(ge=1, description="samples kept for the loss before and after")
    fingerprint: str | None = None
    made: GeneratedConversationsConfig | None = None
    joint: str = Field(
        "\n",
        max_length=64,
        description="the text between the instruction and the input of alpaca's JSON",
    )
    last_target: bool = Field(
        False,
        description=(
            "a sample that is cut keeps the token behind the cut as a target: as many targets as"
            " tokens"
        ),
    )


TASK = rows_task(
    name="alpaca",
    noun="sample",
    data=AlpacaData,
    reader="steelyard.tasks.alpaca.data:prepare",
    data_check="steelyard.tasks.alpaca.conversations:check_source",
    starts_trained=True,
    packs=True,
)
