"""How help is laid out: arguments, then options by group, what most people need first."""

from typing import Any

from typer.core import TyperCommand

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
REST = "Options"
FEW = 10  # options that need no groups


class Command(TyperCommand):
    """A verb. Where it has many options they are in groups (`rich_help_panel`), in the order in which these first appear."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, tuple[str, str]]] = []
        for param in self.get_params(ctx):
            told = param.get_help_record(ctx)
            if told is not None and param.param_type_name == "argument":
                arguments.append(told)
            elif told is not None:
                options.append((getattr(param, "rich_help_panel", None) or REST, told))
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": arguments}
        for panel, told in options:
            groups.setdefault(panel if len(options) > FEW else REST, []).append(told)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
