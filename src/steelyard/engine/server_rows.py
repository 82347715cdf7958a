"""The rows of the servers that engines start: how each is called, and what it can do.

An engine's row names one (`EngineRow.server`); its arguments are made here from what a run knows,
and nothing is imported of the server itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.case.case import Case

# the settings for a server that stops at the end of a text, or takes no token ids
ASK_NATURAL = "--set question.data.lengths=natural"
SEND_TEXTS = (
    '--set question.data.source=texts --data FILE.jsonl (lines of {"text": …}; the tokenizer is the'
    " model folder's, or --tokenizer)"
)


@dataclass(frozen=True)
class ServerStart:
    """What the arguments of a server are made from: the `case`, the `folder` of the model, the
    degree of tensor parallelism `tp`, the name of the `accelerator`, the `port` on loopback, the
    most tokens of a prompt with its output (`longest_tokens`), and the most requests at a time
    (`slots`).
    """

    case: Case
    folder: Path
    tp: int
    accelerator: str
    port: int
    longest_tokens: int
    slots: int


@dataclass(frozen=True)
class MetricNames:
    """The names under which a server's /metrics has the counters of prompt tokens that it took from
    its cache (`cached_tokens`) and of `preemptions`, and the gauge of requests in its `queue`. ""
    where it has none.
    """

    cached_tokens: str = ""
    queue: str = ""
    preemptions: str = ""


@dataclass(frozen=True)
class ServerRow:
    """A server that an engine starts, as data: `module`, run by `python -m`; `make_arguments`, from
    a `ServerStart` to its command line; `model_name`, the name that it knows the model by;
    `package`, whose version is recorded; `needs`, modules that its Python must have; `health_path`,
    that answers with status 200 once it is ready; `variables` of its environment; `metrics`, the
    names in its /metrics.

    `ignores_end`: whether it can go on behind the end of a text; `takes_ids`: whether prompts may
    be token ids; `refusal(case)` says why it cannot run a case (None: it can). `reserved`: options
    that say what is computed, besides those that `make_arguments` gives: the user may add others.
    """

    name: str
    module: str
    make_arguments: Callable[[ServerStart], list[str]]
    model_name: Callable[[Path], str]
    package: str
    needs: tuple[str, ...]
    health_path: str = "/health"
    variables: tuple[tuple[str, str], ...] = ()
    metrics: MetricNames = MetricNames()
    ignores_end: bool = True
    takes_ids: bool = True
    reserved: tuple[str, ...] = ()

    def find_reserved_option(self, own: Sequence[str], added: Sequence[str]) -> str | None:
        """Return the first of the `added` arguments that is an option which the run sets (`own`,
        the arguments made for it) or that says what is computed; None if none is. A shortened
        option, and one with underscores, counts as the whole.
        """
        kept = {option for option in (*own, *self.reserved) if option.startswith("-")}
        for argument in added:
            name = argument.partition("=")[0].replace("_", "-")
            if name.startswith("-") and any(option.startswith(name) for option in kept):
                return argument
        return None

    def refusal(self, case: Case) -> str | None:
        """Return why the server cannot run a case, as a line for the user; None if it can. A server
        that stops at the end of a text runs natural lengths alone. If it takes no token ids, the
        line for a case of ids at size full asks for texts as well.
        """
        data = case.question.data
        if getattr(data, "lengths", None) != "exact" or self.ignores_end:
            return None
        allowed = ASK_NATURAL
        is_full_of_ids = case.size == "full" and getattr(data, "source", None) == "ids"
        if is_full_of_ids and not self.takes_ids:
            allowed += f" {SEND_TEXTS}"
        return (
            f"engine {self.name} cannot ignore the end of a text, so that answers are shorter"
            f" than asked; allowed: {allowed}"
        )
