"""Units, and what the items of tasks are called. A unit in a record is a name that never changes: its text is for pages."""

_ITEMS = {"question": ("题", "道"), "passage": ("段", ""), "sample": ("样本", "个"), "row": ("行", "")}  # with what counts them
_OF_ITEMS: dict[str, tuple[str, str]] = {}
for _noun, (_chinese, _measure) in _ITEMS.items():
    _OF_ITEMS |= {
        f"items.{_noun}": (f"{_noun}s", _measure + _chinese),
        f"unit.{_noun}s/s": (f"{_noun}s/s", f"{_chinese}/s"),
        f"unit.{_noun}s/J": (f"{_noun}s/J", f"{_chinese}/J"),
        f"unit.J/{_noun}": (f"J/{_noun}", f"J/{_chinese}"),
    }

TABLE: dict[str, tuple[str, str]] = {
    **_OF_ITEMS,
    "unit.tokens/s": ("tokens/s", "token/s"),
    "unit.tokens/s/device": ("tokens/s/device", "token/s/卡"),
    "unit.tokens/J": ("tokens/J", "token/J"),
    "unit.J/token": ("J/token", "J/token"),
    "unit.J": ("J", "J"),
    "unit.s": ("s", "s"),
    "unit.GiB": ("GiB", "GiB"),
    "unit.nats": ("nats", "nat"),
    "unit.FLOP": ("FLOP", "FLOP"),
    "unit.FLOP/s": ("FLOP/s", "FLOP/s"),
    "unit.TFLOP/s": ("TFLOP/s", "TFLOP/s"),
    "unit.GB/s": ("GB/s", "GB/s"),
    "unit.MHz": ("MHz", "MHz"),
    "unit.W": ("W", "W"),
}
