"""Turn pydantic's errors on a case file into sentences: all problems at once, each with its line,
in the words of the file.

`case/resolve.py` calls `collect_problems` when a case does not validate, and raises a `CaseError`.
Pydantic's own words (types, unions, validators) mean nothing to whoever wrote the file, so each
kind of error has a sentence here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from steelyard.case.case import AUTO, AUTO_FALLBACKS
from steelyard.case.precision import load_presets
from steelyard.case.toml_lines import KeyPath, find_line_numbers
from steelyard.errors import RequestError, short_repr, suggest_name

SEE_DOCS = "see docs/cases.md"
MAX_SETTINGS = 3  # settings of the command line that one problem names at most
# keys that options of their own set, not --set
OPTION_KEYS = ("size", "question.division", "question.precision")
MAX_SHOWN = 50  # problems shown at most: a file may come from a stranger

# By pydantic's error type. Names in braces are keys of the error's context (`ctx`).
SENTENCES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("int_parsing_size", "float_parsing_size"), "is too large"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("string_type", "string_sub_type"), "must be text in quotes"),
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type", "mapping_type"), "must be a table"
    ),
    "list_type": "must be a list",
    "literal_error": "allowed: {expected}",
    "union_tag_invalid": "{discriminator} allowed: {expected_tags}",
    "union_tag_not_found": "must have {discriminator}",
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be more than {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be less than {lt:g}",
    "finite_number": "must be a finite number",
    "string_pattern_mismatch": "must have the form {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
}
# Names in config.json of Hugging Face and in other programs, and what a case calls the same.
ALIASES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), "layers"),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), "hidden"),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), "heads"),
    **dict.fromkeys(
        ("num_key_value_heads", "num_query_groups", "n_kv_heads", "num_kv_heads"), "kv_heads"
    ),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff"), "ffn"),
    **dict.fromkeys(("vocab_size", "n_vocab"), "vocab"),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_length"),
        "positions",
    ),
    **dict.fromkeys(("rope_theta", "rotary_base", "theta"), "rope_base"),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"), "norm_eps"
    ),
    **dict.fromkeys(("attention_bias", "add_qkv_bias", "bias"), "qkv_bias"),
    **dict.fromkeys(("tie_word_embeddings", "tie_embeddings"), "tied"),
    **dict.fromkeys(("head_size", "kv_channels"), "head_dim"),
    "model_type": "family",
    **dict.fromkeys(("dtype", "torch_dtype"), "precision"),
    **dict.fromkeys(("num_shots", "num_fewshot", "n_shot", "few_shot"), "shots"),
    **dict.fromkeys(
        ("seq_length", "sequence_length", "max_seq_length", "seq_len", "block_size"), "length"
    ),
    **dict.fromkeys(("global_batch_size", "batch_size", "train_batch_size"), "batch"),
    **dict.fromkeys(("train_iters", "max_steps", "num_steps"), "steps"),
    **dict.fromkeys(("learning_rate", "max_lr"), "lr"),
    **dict.fromkeys(("warmup", "lr_warmup_iters", "num_warmup_steps"), "warmup_steps"),
    "lr_decay_iters": "decay_steps",
    **dict.fromkeys(("adam_beta1", "beta_1"), "beta1"),
    **dict.fromkeys(("adam_beta2", "beta_2"), "beta2"),
    **dict.fromkeys(("adam_eps", "adam_epsilon", "epsilon"), "eps"),
    **dict.fromkeys(("clip_grad", "max_grad_norm", "grad_clip"), "clip"),
    **dict.fromkeys(("lr_scheduler_type", "lr_decay_style"), "schedule"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "micro_batch"),
}


@dataclass(frozen=True)
class Problem:
    """A problem of a case as a sentence (`text`), with where it is (`where`: `line 12`, `command
    line`, `--set KEY`, or empty if unknown). `str()` joins the two with a colon.
    """

    where: str  # `line 12`, `command line`, `--set KEY`, or empty if unknown
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class CaseError(RequestError):
    """The error for a case that does not validate, with all its `problems` (a list of `Problem`,
    not empty). Exit code 2, as for every RequestError.

    The message is one line and names at most MAX_SHOWN problems; `lines` are what the command
    prints, one per problem; `title` is `case 'NAME'`.
    """

    def __init__(self, case_path: str, problems: list[Problem]) -> None:
        """Build the one-line message from the problems, of which there is at least one, at most
        MAX_SHOWN of them; `case_path` is the case's name or file. Sets `title` and `problems`.
        """
        self.title = f"case {case_path!r}"
        self.problems = problems
        first = problems[0]
        comma = ", " if first.where else ": "
        line = f"{self.title}{comma}{first}; {SEE_DOCS}"
        sentences = "; ".join(map(str, problems[:MAX_SHOWN]))
        super().__init__(
            line
            if len(problems) == 1
            else f"{self.title}: {len(problems)} problems: {sentences}; {SEE_DOCS}"
        )

    @property
    def lines(self) -> list[str]:
        """Return the lines that the command prints for this error: the message if there is one
        problem; otherwise a title and one line per problem, at most MAX_SHOWN, then how many more
        there are.
        """
        if len(self.problems) == 1:
            return [str(self)]
        more = (
            [f"… and {len(self.problems) - MAX_SHOWN} more"]
            if len(self.problems) > MAX_SHOWN
            else []
        )
        return [
            f"{self.title}: {len(self.problems)} problems; {SEE_DOCS}",
            *map(str, self.problems[:MAX_SHOWN]),
            *more,
        ]


@dataclass(frozen=True)
class ValidationDetail:
    """One of pydantic's errors on a case, as a dataclass: `key_path` (pydantic's loc: the keys from
    the case down), `error_type` (such as `missing`), `context` (the numbers and names of the rule,
    by name; may be empty), `value`, which was given, and pydantic's `message`.
    """

    key_path: KeyPath
    error_type: str
    context: dict[str, Any]
    value: Any
    message: str


def collect_problems(
    error: ValidationError,
    text: str,
    origins: Mapping[str, str],
    size: str,
    case_keys: Iterable[str],
) -> list[tuple[int, Problem]]:
    """Return the problems of a case that did not validate as pairs of the line in the file and the
    problem; the line is 0 if it comes from the command line or is not known. They are not sorted.

    `text` is the case file (empty: there is none, or the command line alone is wrong; problems then
    name the settings that made them), `origins` says by dotted key where values came from, `size`
    is the size that was validated (at smoke, keys are first looked up below `smoke`), and
    `case_keys` lists all dotted keys of a case, for suggestions. A missing key is not reported if
    the same table has an unknown key that is another program's name for it.
    """
    line_numbers, key_list = find_line_numbers(text), list(case_keys)
    errors = _keep_closest_class([_convert_error(found_error) for found_error in error.errors()])
    renamed = {
        (*found_error.key_path[:-1], ALIASES.get(str(found_error.key_path[-1])))
        for found_error in errors
        if found_error.error_type == "extra_forbidden"
    }
    reported = [
        found_error
        for found_error in errors
        if not (found_error.error_type == "missing" and found_error.key_path in renamed)
    ]
    numbered = []
    for found_error in reported:
        line, where = _locate(found_error.key_path, line_numbers, origins, size)
        numbered.append((line, Problem(where, _describe_problem(found_error, key_list))))
    return numbered


def sort_problems(numbered: Iterable[tuple[int, Problem]]) -> list[Problem]:
    """Return the problems sorted by line and without repetitions: the two sizes of a case share
    most of its file.
    """
    return list(dict.fromkeys(problem for _, problem in sorted(numbered, key=lambda pair: pair[0])))


def _convert_error(error: Any) -> ValidationDetail:
    """Convert one of pydantic's error dicts, as `ValidationError.errors()` lists them."""
    return ValidationDetail(
        tuple(error["loc"]), error["type"], error.get("ctx") or {}, error.get("input"), error["msg"]
    )


def _keep_closest_class(errors: list[ValidationDetail]) -> list[ValidationDetail]:
    """Return the errors with those of a table that may be one of several classes (a gate) reduced
    to the class with the fewest errors, and the class name dropped from their key paths. Other
    errors come unchanged, first.
    """
    reduced = [error for error in errors if not _has_class_name(error)]
    for key in dict.fromkeys(error.key_path[0] for error in errors if _has_class_name(error)):
        by_class: dict[str, list[ValidationDetail]] = {}
        for error in errors:
            if _has_class_name(error) and error.key_path[0] == key:
                by_class.setdefault(str(error.key_path[1]), []).append(error)
        fewest = min(by_class.values(), key=len)
        reduced += [
            ValidationDetail(
                (key, *error.key_path[2:]),
                error.error_type,
                error.context,
                error.value,
                error.message,
            )
            for error in fewest
        ]
    return reduced


def _has_class_name(error: ValidationDetail) -> bool:
    """Return whether the second part of the key path is a class name: pydantic puts it there for
    unions, and no key of a case begins with a capital.
    """
    return (
        len(error.key_path) > 1
        and isinstance(error.key_path[1], str)
        and error.key_path[1][:1].isupper()
    )


def _locate(
    key_path: KeyPath, line_numbers: dict[KeyPath, int], origins: Mapping[str, str], size: str
) -> tuple[int, str]:
    """Return the line of a problem, to sort by, and where it is in words: `line 12`, `command line`
    or `--set KEY` with line 0, or an empty text with line 0.

    A key that is missing is located at the innermost table around it that is in the file; at size
    smoke, below `smoke` first. `line_numbers` are those of `find_line_numbers`, `origins` are by
    dotted key.
    """
    for end in range(len(key_path), 0, -1):
        if origins.get(".".join(map(str, key_path[:end]))) == "command line":
            return 0, "command line"
    for end in range(len(key_path), 0, -1):
        for candidate in ((("smoke", *key_path[:end]),) if size == "smoke" else ()) + (
            key_path[:end],
        ):
            if candidate in line_numbers:
                return line_numbers[candidate], f"line {line_numbers[candidate]}"
    return 0, _name_settings(key_path, origins)


def _name_settings(key_path: KeyPath, origins: Mapping[str, str]) -> str:
    """Return the settings of the command line below a key path that is not in a file, such as
    `--set load.rate`, at most MAX_SETTINGS of them; `command line` for other options, and an empty
    text if the command line set nothing there.
    """
    prefix = "".join(f"{part}." for part in key_path)
    keys = [
        key
        for key, origin in origins.items()
        if origin == "command line" and key.startswith(prefix)
    ]
    settings = [f"--set {_shorten_key(key)}" for key in keys if key not in OPTION_KEYS]
    more = [f"{len(settings) - MAX_SETTINGS} more"] if len(settings) > MAX_SETTINGS else []
    return ", ".join([*settings[:MAX_SETTINGS], *more]) or ("command line" if keys else "")


def _shorten_key(key: str) -> str:
    """Return the short name of a dotted key of the load, as --set takes it; others unchanged."""
    return key.removeprefix("question.") if key.startswith("question.load.") else key


def _describe_problem(error: ValidationDetail, case_keys: list[str]) -> str:
    """Return a sentence on a problem with the key, what is allowed and, for a wrong value, the
    value, shortened; for an unknown key a suggestion. `case_keys` are the dotted keys of a case.
    """
    dotted_key = ".".join(map(str, error.key_path))
    if error.error_type == "extra_forbidden":
        return f"unknown key {short_repr(dotted_key)}; {_suggest_key(dotted_key, case_keys)}"
    if error.error_type == "missing":
        return f"{dotted_key} is missing"
    if dotted_key == "question.precision" and isinstance(error.value, str):
        allowed = "; ".join(f"{kind}: {', '.join(rows)}" for kind, rows in load_presets().items())
        return f"precision {short_repr(error.value)} is not known; allowed for {allowed}"
    if error.error_type == "value_error":
        sentence = str(error.context.get("error", error.message))
        return f"{dotted_key}: {sentence}" if dotted_key else sentence
    rule = SENTENCES.get(error.error_type, "has a value that is not allowed")
    sentence = f"{dotted_key}: {rule.format(**error.context)}"
    or_auto = f", or {AUTO}" if dotted_key.removeprefix("tune.") in AUTO_FALLBACKS else ""
    return f"{sentence}{or_auto} (it is {short_repr(error.value)})"


def _suggest_key(dotted_key: str, case_keys: list[str]) -> str:
    """Return what to write instead of an unknown dotted key: this program's name for it, a similar
    key of the same table, or `remove it`. `case_keys` are all dotted keys of a case.
    """
    parent, _, name = dotted_key.rpartition(".")
    siblings = [
        case_key.rpartition(".")[2]
        for case_key in case_keys
        if case_key.rpartition(".")[0] == parent
    ]
    if ALIASES.get(name) in siblings:
        return f"here it is called {ALIASES[name]}"
    suggestion = suggest_name(name, siblings)
    return suggestion if suggestion.startswith("did you mean") else "remove it"
