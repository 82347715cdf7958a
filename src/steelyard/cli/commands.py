"""How help is laid out: arguments, then options by group, what most people need first."""

from typing import Any

from typer.core import TyperCommand

HELP = {"help_option_names": ["-h", "--help"]}
REST = "Options"


class Command(TyperCommand):
    """A verb whose options may be in groups (`rich_help_panel`), in the order in which they first appear."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        rest: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            told = param.get_help_record(ctx)
            if told is None:
                continue
            if param.param_type_name == "argument":
                groups["Arguments"].append(told)
                continue
            panel = getattr(param, "rich_help_panel", None)
            (groups.setdefault(panel, []) if panel else rest).append(told)
        named = [(title, rows) for title, rows in groups.items() if rows]
        for title, rows in [*named, *([(REST, rest)] if rest else [])]:
            with formatter.section(title):
                formatter.write_dl(rows)
