"""Resolve a case: read its TOML file, then apply its size and what the command line changes.

A file holds the full size; its `[smoke]` table holds what size smoke changes. Of file, size and
command line the later one wins, and the origin of every value is recorded. `cli/requests.py` calls
`resolve_case`; the result goes into a `Request`.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from steelyard import files, tasks
from steelyard.case import problems
from steelyard.case.case import (
    AUTO,
    AUTO_FALLBACKS,
    AccuracyGate,
    Case,
    FallingLossGate,
    Size,
    TargetGate,
    Tune,
)
from steelyard.case.load import MODE_FIELDS, Load, Slo
from steelyard.case.precision import load_presets, name_precision
from steelyard.case.question import Question, Train
from steelyard.data.division import Division
from steelyard.errors import RequestError, short_repr, suggest_name
from steelyard.files import MAX_TOML_DEPTH
from steelyard.models import families
from steelyard.schema import FrozenModel

MAX_CASE_BYTES = 64 << 10
CASE_ORIGIN = "case"  # the origin of values from a case file


@dataclass(frozen=True)
class ResolvedCase:
    """A `case` with every override applied, and in `origins` where each value came from, by dotted
    key, such as `case`, `case, size smoke`, `command line`, `default`, `preset NAME (…)`, `auto
    (…)`. `resolve_case` makes it.

    `auto` names the tunes (without `tune.`) that `plan/auto_sizes.py` chooses once the devices are
    known; until then they hold the fallback for devices of unknown memory. `path` is the case's
    name or file.
    """

    case: Case
    origins: dict[str, str]
    path: str
    auto: tuple[str, ...] = ()


def list_shipped_cases() -> list[str]:
    """Return the names of the cases that come with the package, sorted."""
    folder = resources.files("steelyard") / "cases"
    return sorted(
        p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")
    )


@dataclass(frozen=True)
class CaseSource:
    """A case as TOML: its `text` and the parsed `table`, before a size is applied. `read_case`
    makes it from a file, `case/new_case.py` in memory. `apply_size` returns the table at a size
    with the origin of each value.

    `path` is the name or file that the user gave. `origins` says by dotted key where values came
    from, for a case that was made in memory; else it is empty.
    """

    path: str
    text: str
    table: dict[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)

    def apply_size(self, size: Size) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the table of this case at a size, with the key `size` added, and the origin of
        each value by dotted key. The source is not changed.

        For `smoke` the [smoke] table is merged over the rest; `full` drops it. Origins are
        `case, size smoke` for values of that table, else those in the source's `origins`, else
        `case`. Raise RequestError if `smoke` is not a table, ValueError for another size.
        """
        if size not in get_args(Size):
            raise ValueError(f"size {size!r} is not known; allowed: {', '.join(get_args(Size))}")
        table, origins = deepcopy(self.table), dict[str, str]()
        smoke = table.pop("smoke", {})
        if not isinstance(smoke, dict):
            raise RequestError(
                f"case {self.path!r}: smoke is {short_repr(smoke)}; it must be a table: what size"
                " smoke changes"
            )
        _note_origins(table, CASE_ORIGIN, origins)
        if size == "smoke":
            table = _merge_tables(table, smoke)
            _note_origins(smoke, f"{CASE_ORIGIN}, size smoke", origins)
        table["size"] = size
        return table, {
            key: self.origins.get(key, origin) if origin == CASE_ORIGIN else origin
            for key, origin in origins.items()
        }


def read_case(name: str) -> CaseSource:
    """Read a case by the name of a shipped case, or by the path of a file that ends in `.toml`.

    Raise RequestError if there is no such case, or if the file cannot be read, is larger than 64
    KiB, is not TOML or is nested too deep. Keys and values are not validated.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.exists():
            raise RequestError(
                f"case file {name!r} does not exist; give the path of a TOML file or one of:"
                f" {', '.join(list_shipped_cases())}"
            )
        raw = _read_case_file(path)
    elif name in list_shipped_cases():
        raw = (resources.files("steelyard") / "cases" / f"{name}.toml").read_bytes()
    else:
        hint = suggest_name(name, [*list_shipped_cases(), "smoke"], "known cases")
        raise RequestError(f"no case {name!r}; {hint} (a file of your own ends in .toml)")
    try:
        table = files.parse_toml(raw)
    except files.TomlLimitError as error:
        raise RequestError(
            f"case file {name!r}: {error}; a case has tables four deep, and short names"
        ) from error
    except ValueError as error:
        raise RequestError(f"case file {name!r} is not TOML: {error}") from error
    if _is_deeper(table, MAX_TOML_DEPTH):
        raise RequestError(
            f"case file {name!r}: tables nested more than {MAX_TOML_DEPTH} deep; a case has tables"
            " four deep"
        )
    return CaseSource(name, raw.decode("utf-8"), table)


def _read_case_file(path: Path) -> bytes:
    """Return the bytes of a case file. Raise RequestError if it cannot be read or is larger than 64
    KiB.
    """
    try:
        return files.read_file(path, MAX_CASE_BYTES, unpack=False)
    except files.TooLargeError as error:
        raise RequestError(
            f"case file {str(path)!r} is larger than {MAX_CASE_BYTES} bytes; a case file is a few"
            " kilobytes"
        ) from error
    except OSError as error:
        raise RequestError(
            f"case file {str(path)!r} cannot be read: {error.strerror}; check its path"
        ) from error


def _is_deeper(value: Any, max_depth: int) -> bool:
    """Return whether dicts and lists are nested more than `max_depth` deep in a value. Needed after
    parsing too, because dotted keys of TOML nest as deep as they have parts.
    """
    level = [value]
    for _ in range(max_depth + 1):
        level = [node for node in level if isinstance(node, dict | list)]
        level = [
            inner for node in level for inner in (node.values() if isinstance(node, dict) else node)
        ]
    return bool(level)


def resolve_case(
    case: str | CaseSource,
    size: str | None = None,
    precision: str | None = None,
    division: str | None = None,
    settings: list[str] | None = None,
) -> ResolvedCase:
    """Resolve a case as it will be run: its file, then its size (None: full), then precision,
    division and `settings` (`key=value` texts of --set) of the command line. Tunes that are `auto`
    get a fallback and are named in the result.

    `case` is a name, a path or a case that was already read. Raise RequestError for an unknown
    case, size, division or key, or precision of the command line, or a file that is not TOML;
    CaseError, which lists all problems of the file at both sizes, if the result does not validate.
    """
    source = read_case(case) if isinstance(case, str) else case
    table, origins = source.apply_size("smoke" if size == "smoke" else "full")
    if size not in (None, "smoke", "full"):
        raise RequestError(f"size {size!r} is not known; allowed: smoke, full")
    if division not in (None, *get_args(Division)):
        raise RequestError(
            f"--division {division!r} is not known; allowed: {', '.join(get_args(Division))}"
        )
    origins["size"] = "command line" if size else "default"
    question = table.get("question")
    if isinstance(question, dict):
        if division is not None:
            question["division"] = division
            origins["question.division"] = "command line"
        if precision is not None:
            question["precision"] = precision
            origins["question.precision"] = "command line"
    for setting in settings or []:
        _apply_setting(table, setting, origins)
    validated, auto = _validate_or_explain(table, origins, source)
    _note_default_origins(validated.model_dump(mode="json"), origins)
    return ResolvedCase(validated, origins, source.path, auto)


def _validate_or_explain(
    table: dict[str, Any], origins: dict[str, str], source: CaseSource
) -> tuple[Case, tuple[str, ...]]:
    """Return the validated case and the names of its tunes that are `auto`. Raise CaseError with
    all problems of the file, at this and at the other size, if it does not validate. `table` and
    `origins` are changed in place.
    """
    try:
        return _validate_case(table, origins)
    except ValidationError as error:
        size = str(table["size"])
        text = "" if source.origins else source.text  # nobody has seen a case made in memory
        found_problems = problems.collect_problems(
            error, "" if _is_valid(source, size) else text, origins, size, _list_case_keys()
        )
        try:
            other_size = source.apply_size("full" if size == "smoke" else "smoke")
            _validate_case(*other_size)
        except ValidationError as second:
            found_problems += problems.collect_problems(
                second, text, other_size[1], str(other_size[0]["size"]), _list_case_keys()
            )
        raise problems.CaseError(source.path, problems.sort_problems(found_problems)) from error


def _is_valid(source: CaseSource, size: str) -> bool:
    """Return whether a case validates at a size as it is, without what the command line changes."""
    try:
        _validate_case(*source.apply_size("smoke" if size == "smoke" else "full"))
    except ValidationError:
        return False
    return True


def _validate_case(table: dict[str, Any], origins: dict[str, str]) -> tuple[Case, tuple[str, ...]]:
    """Return the validated case and the names of its tunes that are `auto`; raise pydantic's
    ValidationError if it does not validate, RequestError for an unknown precision of the command
    line.

    `table` and `origins` are changed in place: the precision is expanded, a load gets the mode that
    the command line implies, nominal parameters of a changed model are dropped, and `auto` is
    replaced.
    """
    _expand_precision(table, origins)
    _settle_load(table, origins)
    _drop_nominal_parameters(table, origins)
    auto = _replace_auto(table, origins)
    return Case.model_validate(table), auto


def _replace_auto(table: dict[str, Any], origins: dict[str, str]) -> tuple[str, ...]:
    """Return the names of the tunes that are `auto` in a case's table, without `tune.`, and replace
    each there by its fallback for unknown memory; its origin becomes `auto (ORIGIN)`. Both
    arguments are changed in place. An empty tuple if there is no tune table.
    """
    tune = table.get("tune")
    if not isinstance(tune, dict):
        return ()
    auto_names = tuple(name for name in AUTO_FALLBACKS if tune.get(name) == AUTO)
    table["tune"] = {**tune, **{name: AUTO_FALLBACKS[name] for name in auto_names}}
    origins.update({f"tune.{name}": f"{AUTO} ({origins[f'tune.{name}']})" for name in auto_names})
    return auto_names


def find_auto_tunes(origins: dict[str, str]) -> tuple[str, ...]:
    """Return the names of the tunes that were `auto`, according to the origins of a resolved case
    or a record.
    """
    return tuple(
        name for name in AUTO_FALLBACKS if origins.get(f"tune.{name}", "").startswith(f"{AUTO} (")
    )


def _drop_nominal_parameters(table: dict[str, Any], origins: dict[str, str]) -> None:
    """Set the model's nominal parameters in a case's table to None, and their origin to a text that
    says why, in place, if the command line changed the model but not them: it is no longer of the
    size that the case names.
    """
    key = "question.model.nominal_parameters"
    model = (
        table.get("question", {}).get("model") if isinstance(table.get("question"), dict) else None
    )
    changed = any(
        name.startswith("question.model.")
        for name, origin in origins.items()
        if origin == "command line"
    )
    if isinstance(model, dict) and changed and origins.get(key) != "command line":
        model["nominal_parameters"] = None
        origins[key] = "unknown: the model was changed"


def _settle_load(table: dict[str, Any], origins: dict[str, str]) -> None:
    """Let the command line choose another load than the file's, in place: setting the number of one
    mode (`concurrency`, `rate`, `arrivals`) implies that mode, and fields of other modes that the
    file sets are dropped.
    """
    question = table.get("question")
    load = question.get("load") if isinstance(question, dict) else None
    if not isinstance(load, dict):
        return
    prefix = "question.load."
    typed = {key for key in load if origins.get(f"{prefix}{key}") == "command line"}
    implied = [
        mode for mode, names in MODE_FIELDS.items() if typed & set(names) and "mode" not in typed
    ]
    if len(implied) == 1 and load.get("mode") != implied[0]:
        load["mode"], origins[f"{prefix}mode"] = implied[0], "implied by the command line"
    allowed = {"mode", *MODE_FIELDS.get(str(load.get("mode")), load), *typed}
    for key in [key for key in load if key not in allowed and typed]:
        del load[key]
        origins.pop(f"{prefix}{key}", None)


def list_changed_keys(origins: dict[str, str]) -> list[str]:
    """Return the dotted keys of the question that the command line changed, sorted, without those
    of precision, division and load, which are shown by name anyway.
    """
    shown_by_name = ("question.division", "question.precision", "question.load")
    return sorted(
        key
        for key, origin in origins.items()
        if origin == "command line"
        and key.startswith("question.")
        and not key.startswith(shown_by_name)
    )


def _expand_precision(table: dict[str, Any], origins: dict[str, str]) -> None:
    """Replace the name of a precision preset in `table["question"]` by a dict of its number types,
    and note their origins, in place.

    A precision given as a table gets its name from its parts. An unknown name raises RequestError
    if it comes from the command line; one in the file is left as it is, for validation to report.
    """
    question = table.get("question")
    if isinstance(question, dict) and isinstance(question.get("precision"), dict):
        parts = question[
            "precision"
        ]  # any name it gives itself is replaced: names belong to presets
        question["precision"] = {**parts, "name": name_precision(str(question.get("kind")), parts)}
        origins["question.precision.name"] = "of its parts"
    if not isinstance(question, dict) or not isinstance(question.get("precision"), str):
        return
    kind_presets = load_presets().get(str(question.get("kind")), {})
    name = question["precision"]
    if name not in kind_presets and origins.get("question.precision") == "command line":
        raise RequestError(
            f"precision {name!r} is not known; allowed for {question.get('kind')}:"
            f" {', '.join(kind_presets)}"
        )
    if name not in kind_presets:
        return  # validation reports it with the other problems of the file
    question["precision"] = kind_presets[name].model_dump(mode="json")
    origin = origins.pop("question.precision", "case")
    _note_origins(
        question["precision"], f"preset {name} ({origin})", origins, "question.precision."
    )


def _apply_setting(table: dict[str, Any], setting: str, origins: dict[str, str]) -> None:
    """Set one `--set` text (`key=value`) in the case's table, creating tables on the way, and note
    its origin `command line`, in place. The value is parsed as TOML, else it is text.

    Raise RequestError if the text has another form, names an unknown key, is nested too deep, or
    lies below a single value. Values of `tune.env.` keys are always text.
    """
    key, sign, text = setting.partition("=")
    if not sign or not key:
        raise RequestError(
            f"--set {setting!r} is not of the form key=value, such as tune.batch_tokens=16384"
        )
    key = expand_key(key)
    check_option_key(key, list_settable_keys(), "--set")
    value = parse_value(text)
    if key.count(".") + 1 > MAX_TOML_DEPTH or _is_deeper(value, MAX_TOML_DEPTH):
        raise RequestError(
            f"--set {short_repr(setting)}: nested more than {MAX_TOML_DEPTH} deep; a case has"
            " tables four deep"
        )
    if key.startswith("tune.env.") and not isinstance(value, str):
        value = text  # environment variables are text, even if it parses as a number
    *parents, leaf = key.split(".")
    node = table
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise RequestError(f"--set: {key!r} is below {part!r}, which is a single value")
    node[leaf] = value
    _note_origins({key: value}, "command line", origins)


def expand_key(key: str) -> str:
    """Return the full key of a short one: `load.concurrency` is `question.load.concurrency`; other
    keys are returned as they are.
    """
    return f"question.{key}" if key.startswith("load.") else key


def check_option_key(key: str, allowed: list[str], option: str) -> None:
    """Raise RequestError, with a suggestion, if `key` is neither in `allowed` nor a variable below
    `tune.env.`. `option` is named in the message, such as `--set`.
    """
    if key in allowed or key.startswith("tune.env."):
        return
    raise RequestError(
        f"{option}: no key {short_repr(key)}; {suggest_name(key, allowed, 'allowed')}"
    )


def parse_value(text: str) -> Any:
    """Parse a value of the command line as TOML (number, true, list, quoted text); return the text
    itself if it is not TOML.
    """
    try:
        return files.parse_toml(f"x = {text}")["x"]
    except ValueError:
        return text


def list_settable_keys() -> list[str]:
    """Return every dotted key that --set takes, sorted: `max_interval`, `requests`, `min_time_s`,
    and those of tune, question, gate, slo and published facts, from the pydantic models of cases,
    tasks and model families.

    The shapes of models that transformers alone computes cannot be set: their FLOPs were counted
    for the whole model. Keys below `tune.env.` are not listed.
    """
    keys = {
        *("max_interval", "requests", "min_time_s"),
        *_collect_keys("slo", Slo),
        *_collect_keys("question.load", Load),
        *_collect_keys("tune", Tune),
        *_collect_keys("question", Question),
        *_collect_keys("question.train", Train),
    }
    for gate in (AccuracyGate, FallingLossGate, TargetGate):
        keys |= _collect_keys("gate", gate)
    for task in tasks.load_tasks().values():
        keys |= _collect_keys("question.data", task.data)
        keys |= {f"published.{name}" for name in task.published_facts}
    for family in families.load_families().values():
        if family.forward is None:  # otherwise FLOPs were counted for the model as it is
            keys |= _collect_keys("question.model", family.shape)
    return sorted(keys)


def _list_case_keys() -> list[str]:
    """Return every dotted key a case file may have, sorted, without those of published rows."""
    kind_keys = {"question.kind", "question.task", "question.model.family", "question.data.kind"}
    return sorted({*list_settable_keys(), *Case.model_fields, *kind_keys, "smoke"} - {"size"})


def _collect_keys(prefix: str, model: type[FrozenModel]) -> set[str]:
    """Return the dotted keys below `prefix` of a pydantic model's fields, without `kind`, `task`
    and `family`, which say what kind of table it is. Fields of models inside are included where the
    annotation is a union or generic of them, such as `Model | None`.
    """
    keys: set[str] = set()
    for name, info in model.model_fields.items():
        if name in ("kind", "task", "family"):
            continue
        keys.add(f"{prefix}.{name}")
        for inner in get_args(info.annotation):
            if isinstance(inner, type) and issubclass(inner, FrozenModel):
                keys |= _collect_keys(f"{prefix}.{name}", inner)
    return keys


def _merge_tables(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over` merged in, nested dicts key by key. Neither is
    changed.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = (
            _merge_tables(old, value)
            if isinstance(old, dict) and isinstance(value, dict)
            else value
        )
    return merged


def _note_origins(
    table: dict[str, Any], origin: str, origins: dict[str, str], prefix: str = ""
) -> None:
    """Set the origin of every value in `table`, by dotted key below `prefix`, in `origins`, in
    place.
    """
    for key, value in table.items():
        if isinstance(value, dict):
            _note_origins(value, origin, origins, f"{prefix}{key}.")
        else:
            origins[f"{prefix}{key}"] = origin


def _note_default_origins(table: dict[str, Any], origins: dict[str, str], prefix: str = "") -> None:
    """Set the origin `default` for every value in `table` that has no origin yet, in `origins`, in
    place. An empty dict counts as a value.
    """
    for key, value in table.items():
        if isinstance(value, dict) and value:
            _note_default_origins(value, origins, f"{prefix}{key}.")
        else:
            origins.setdefault(f"{prefix}{key}", "default")
