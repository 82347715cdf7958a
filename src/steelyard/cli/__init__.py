"""The command line: its verbs, and how a command ends. Nothing heavy is imported before a verb needs it."""

import signal
import sys
import traceback
from typing import Annotated, Any

import typer

from steelyard import __version__
from steelyard.cli import (
    check,
    compare,
    conform,
    data,
    history,
    report,
    reproduce,
    run,
    show,
    sign,
    spec,
    terminal,
    weights,
)
from steelyard.cli.out import answer, one_line, say
from steelyard.errors import LostError, RequestError

# Typer brings its own copy of click in newer versions; this is the base of its errors in every version.
UsageProblem: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

DEFECT = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # what newer versions of typer answer an interrupt with, and no verb of ours

app = typer.Typer(
    name="steelyard",
    help="Weigh an accelerator on real LLM work: is the answer right, how fast, at what cost, how close to the limit.\n\n"
    "Start with: steelyard run smoke",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        answer(__version__)
        raise typer.Exit(0)


# In the order in which --help lists them.
app.command("list")(show.list_)
app.command("show")(show.show)
app.command("check")(check.check)
app.command("run")(run.run)
app.command("spec")(spec.spec)
app.command("report")(report.report_)
app.command("compare")(compare.compare)
app.command("history")(history.history)
app.command("reproduce")(reproduce.reproduce)
app.command("verify")(report.verify)
app.command("sign")(sign.sign)
app.command("schema")(report.schema)
app.command("conform")(conform.conform)
app.add_typer(weights.app, name="weights")
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line; exit codes: 0 valid, 1 ran but invalid or failed, 2 the request is wrong, 70 a defect of ours."""
    with terminal.settled():
        _main()


def _main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _interrupt)
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except RequestError as error:
        say(f"error: {one_line(error)}")
        sys.exit(2)
    except LostError as error:
        if error.left is not None:
            say(error.left.rstrip("\n"))
        say(f"error: {one_line(error)}")
        sys.exit(1)
    except UsageProblem as error:
        _usage(error)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except Exception:  # noqa: BLE001  our own bug, never blamed on a user's file
        say(traceback.format_exc())
        say(f"error: a defect of steelyard {__version__}, not of your request; please report it with the lines above")
        sys.exit(DEFECT)
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> None:
    """One line for a mistyped command; the help, where nothing at all was asked."""
    if type(error).__name__ == "NoArgsIsHelpError":
        answer(error.format_message())
    else:
        verb = error.ctx.command_path if error.ctx else "steelyard"
        say(f"error: {one_line(error.format_message()).rstrip('.')}; see {verb} --help")


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
