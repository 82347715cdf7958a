"""What a record says of a model of one's own: that its case is in no file, and who counted its FLOPs."""

from collections.abc import Iterable

from steelyard.case.new import MADE
from steelyard.models.auto_shape import AutoModel
from steelyard.record.record import Record
from steelyard.words import Message


def notes(record: Record) -> list[Message]:
    made = any(origin.startswith(MADE) for origin in record.case.origins.values())
    return [*([Message("note.own_case")] if made else []), *counted([record])]


def counted(records: Iterable[Record]) -> list[Message]:
    """Of the model types among records whose FLOPs do not follow from shapes."""
    models = [record.question.model for record in records]
    types = dict.fromkeys(model.model_type for model in models if isinstance(model, AutoModel))
    return [Message("note.counted", {"type": name}) for name in types]
