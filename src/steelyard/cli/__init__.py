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
from steelyard.cli import case, check_and_spec, compare, data, report, run, show, weights
from steelyard.cli.options import HELP_SETTINGS, GroupedCommand
from steelyard.cli.printing import print_stderr, print_stdout, protect_streams, to_one_line
from steelyard.errors import MORE_MEMORY_HINT, LostError, RequestError, is_out_of_memory

# Newer versions of typer bring their own copy of click; this finds the base class of its usage
# errors in every version.
UsageErrorBase: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

EXIT_DEFECT = 70  # EX_SOFTWARE of sysexits.h
# error numbers that mean a path named by the user cannot be reached
PATH_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
TYPER_INTERRUPTED = 130  # exit code of newer typer versions on an interrupt; no command uses it

app = typer.Typer(
    name="steelyard",
    help=(
        "Benchmark AI accelerators on real LLM work: is the answer right, how fast, at what cost,"
        " how close to the limit.\n\nExample: steelyard run smoke runs every case, tiny, on this"
        " machine. steelyard VERB -h explains a verb."
    ),
    no_args_is_help=True,
    context_settings=HELP_SETTINGS,
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
        print_stdout(__version__)
        raise typer.Exit(0)


COMMANDS: dict[str, Callable[..., int | None]] = {
    "run": run.run,
    "report": report.report_,
    "compare": compare.compare,
    "history": compare.history,
    "reproduce": run.reproduce,
    "list": show.list_,
    "show": show.show,
    "check": check_and_spec.check,
    "spec": check_and_spec.spec,
    "verify": report.verify,
    "sign": report.sign,
    "schema": report.schema,
    "conform": run.conform,
}
for _name, _verb in COMMANDS.items():  # in the order in which --help lists them
    app.command(_name, cls=GroupedCommand)(_verb)
app.add_typer(case.app, name="case")
app.add_typer(weights.app, name="weights")
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command in sys.argv and exit; it never returns.

    Exit codes: 0 success, 1 a run is invalid or failed, or the command was interrupted or lost its
    output, 2 the request is wrong, 70 a bug of this program (with a traceback). Standard streams
    that are closed or block are made safe first.
    """
    with protect_streams():
        _run_and_exit()


def _run_and_exit() -> None:
    """Run the command in sys.argv and turn every error into a message on stderr and an exit code
    (see `main`); it always raises SystemExit.

    SIGTERM and SIGHUP raise KeyboardInterrupt from here on, unless they are ignored, as under
    nohup.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _raise_interrupt)
    try:
        code = app(standalone_mode=False, prog_name="steelyard")
        if code == TYPER_INTERRUPTED:
            raise KeyboardInterrupt
    except RequestError as error:
        first, *more = error.lines
        print_stderr(
            "\n".join(
                (f"error: {to_one_line(first)}", *(f"  {to_one_line(line)}" for line in more))
            )
        )
        sys.exit(2)
    except LostError as error:
        if error.unsaved is not None:
            print_stderr(error.unsaved.rstrip("\n"))
        print_stderr(f"error: {to_one_line(error)}")
        sys.exit(1)
    except UsageErrorBase as error:
        _print_usage_error(error)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        print_stderr("interrupted")
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  our own bug, never blamed on a user's file
        _exit_if_not_a_bug(error)
        print_stderr(traceback.format_exc())
        print_stderr(
            f"error: a bug in steelyard {__version__}, not in your request; please report it with"
            " the lines above"
        )
        sys.exit(EXIT_DEFECT)
    sys.exit(code if isinstance(code, int) else 0)


def _exit_if_not_a_bug(error: Exception) -> None:
    """Print one line on stderr and raise SystemExit if an unexpected error is not a bug: code 1 if
    memory ran out, 2 for an OSError that says that a path cannot be reached (permissions, length,
    links). Return otherwise.
    """
    if is_out_of_memory(error):
        print_stderr(
            f"error: this command ran out of memory; {MORE_MEMORY_HINT}, then run it again"
        )
        sys.exit(1)
    if isinstance(error, OSError) and error.errno in PATH_ERRNOS and error.filename is not None:
        problem = to_one_line(f"{str(error.filename)[:300]!r}: {error.strerror}")
        print_stderr(f"error: {problem}; check the path")
        sys.exit(2)


def _print_usage_error(error: Any) -> None:
    """Print one line on stderr about a mistyped command, with the `-h` to see; for a command
    without any arguments print its help on stdout. `error` is an exception of click.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        print_stdout(error.format_message())
    else:
        command_path = error.ctx.command_path if error.ctx else "steelyard"
        mistake = _describe_usage_error(error)
        print_stderr(
            f"error: {mistake}{'? See' if 'did you mean' in mistake else '; see'} {command_path} -h"
        )


def _describe_usage_error(error: Any) -> str:
    """Return what is wrong with a mistyped command on one line, without a full stop; for an unknown
    option (an error with `possibilities`) with the most similar one, if any.
    """
    if not hasattr(error, "possibilities"):
        return (
            to_one_line(error.format_message())
            .rstrip(".?")
            .replace(". Did you mean", "; did you mean")
        )
    similar = get_close_matches(error.option_name, error.possibilities or [], 1)
    return f"No such option {error.option_name}" + (
        f"; did you mean {similar[0]}" if similar else ""
    )


def _raise_interrupt(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt with the name of the signal. A signal handler."""
    raise KeyboardInterrupt(signal.Signals(number).name)
