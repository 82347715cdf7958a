"""The command line: the table of its commands, and how errors become messages and exit codes.

`main` is the entry point of `steelyard`. Commands import what they need when they are called, so
that `-h` and shell completion stay fast.
"""

import errno
import signal
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from steelyard import __version__
from steelyard.cli import case, compare, data, machine, report, run, show, weights
from steelyard.cli.options import HELP, Command
from steelyard.cli.out import answer, one_line, say, settled
from steelyard.errors import MORE_MEMORY, LostError, RequestError, lacks_memory

# Newer versions of typer bring their own copy of click; this finds the base class of its usage
# errors in every version.
UsageProblem: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

DEFECT = 70  # EX_SOFTWARE of sysexits.h
# error numbers that mean a path named by the user cannot be reached
UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
INTERRUPTED = 130  # exit code of newer typer versions on an interrupt; no command uses it

app = typer.Typer(
    name="steelyard",
    help=(
        "Benchmark AI accelerators on real LLM work: is the answer right, how fast, at what cost,"
        " how close to the limit.\n\nExample: steelyard run smoke runs every case, tiny, on this"
        " machine. steelyard VERB -h explains a verb."
    ),
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Print the version and exit with code 0 if `--version` is given; otherwise do nothing. Runs
    before every command.
    """
    if version:
        answer(__version__)
        raise typer.Exit(0)


VERBS: dict[str, Callable[..., int | None]] = {
    "run": run.run,
    "report": report.report_,
    "compare": compare.compare,
    "history": compare.history,
    "reproduce": run.reproduce,
    "list": show.list_,
    "show": show.show,
    "check": machine.check,
    "spec": machine.spec,
    "verify": report.verify,
    "sign": report.sign,
    "schema": report.schema,
    "conform": run.conform,
}
for _name, _verb in VERBS.items():  # in the order in which --help lists them
    app.command(_name, cls=Command)(_verb)
app.add_typer(case.app, name="case")
app.add_typer(weights.app, name="weights")
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command in sys.argv and exit; it never returns.

    Exit codes: 0 success, 1 a run is invalid or failed, or the command was interrupted or lost its
    output, 2 the request is wrong, 70 a bug of this program (with a traceback). Standard streams
    that are closed or block are made safe first.
    """
    with settled():
        _main()


def _main() -> None:
    """Run the command and turn every error into a message on stderr and an exit code (see `main`);
    it always raises SystemExit.

    SIGTERM and SIGHUP raise KeyboardInterrupt from here on, unless they are ignored, as under
    nohup.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    try:
        code = app(standalone_mode=False, prog_name="steelyard")
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except RequestError as error:
        first, *more = error.lines
        say("\n".join((f"error: {one_line(first)}", *(f"  {one_line(line)}" for line in more))))
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
    except Exception as error:  # noqa: BLE001  our own bug, never blamed on a user's file
        _end_for_the_machine(error)
        say(traceback.format_exc())
        say(
            f"error: a bug in steelyard {__version__}, not in your request; please report it with"
            " the lines above"
        )
        sys.exit(DEFECT)
    sys.exit(code if isinstance(code, int) else 0)


def _end_for_the_machine(error: Exception) -> None:
    """Print one line and exit if the error is not a bug: code 1 if memory ran out, 2 if a path that
    the user named cannot be reached. Return otherwise.
    """
    if lacks_memory(error):
        say(f"error: this command ran out of memory; {MORE_MEMORY}, then run it again")
        sys.exit(1)
    if isinstance(error, OSError) and error.errno in UNREACHABLE and error.filename is not None:
        say(
            f"error: {one_line(f'{str(error.filename)[:300]!r}: {error.strerror}')}; check the path"
        )
        sys.exit(2)


def _usage(error: Any) -> None:
    """Print one line on stderr about a mistyped command, with the `-h` to see; for a command
    without any arguments print its help on stdout. `error` is an exception of click.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        answer(error.format_message())
    else:
        verb = error.ctx.command_path if error.ctx else "steelyard"
        said = _mistake(error)
        say(f"error: {said}{'? See' if 'did you mean' in said else '; see'} {verb} -h")


def _mistake(error: Any) -> str:
    """Return what is wrong with a mistyped command on one line; for an unknown option with the most
    similar one.
    """
    if not hasattr(error, "possibilities"):
        return (
            one_line(error.format_message())
            .rstrip(".?")
            .replace(". Did you mean", "; did you mean")
        )
    near = get_close_matches(error.option_name, error.possibilities or [], 1)
    return f"No such option {error.option_name}" + (f"; did you mean {near[0]}" if near else "")


def _interrupt(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt with the name of the signal. A signal handler."""
    raise KeyboardInterrupt(signal.Signals(number).name)
