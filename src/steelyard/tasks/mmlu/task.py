"""The row of MMLU: 57 subjects of four-way questions, asked after answered examples."""

from steelyard.tasks.choices import choice_task
from steelyard.tasks.mmlu.fields import MmluData

TASK = choice_task(
    "mmlu", MmluData, reader="steelyard.tasks.mmlu.data:prepare", data_check="steelyard.tasks.mmlu.data:check_source"
)
