"""From a case file to a case: its size, then what a command line changes.

A case file holds the full size; its `[smoke]` table holds what the smoke size changes. A file, then
its size, then the command line: later wins, and every value remembers where it came from.
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
from steelyard.case.case import AUTO, UNKNOWN_MEMORY, Case, Falling, Gate, Target, Tune
from steelyard.case.precision import name_of, presets
from steelyard.case.question import Question, Train
from steelyard.data.division import Division
from steelyard.errors import RequestError, known, short_repr
from steelyard.files import MAX_TOML_DEPTH
from steelyard.models import families
from steelyard.schema import Frozen

MAX_CASE_BYTES = 64 << 10
CASE = "case"  # the origin of what a case file says


@dataclass(frozen=True)
class Resolved:
    """A case with every override applied, and where each value came from (dotted name → origin).
    `auto` names the tunes that plan/auto.py sets once the devices are known; until then they have
    what runs where nothing is known of those."""

    case: Case
    origins: dict[str, str]
    path: str
    auto: tuple[str, ...] = ()


def names() -> list[str]:
    """The cases that come with the package."""
    folder = resources.files("steelyard") / "cases"
    return sorted(
        p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")
    )


@dataclass(frozen=True)
class Source:
    """A case as text, before anything is made of it. `origins`: where values came from, of a case
    that is in no file.
    """

    path: str
    text: str
    table: dict[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)

    def sized(self, size: str) -> tuple[dict[str, Any], dict[str, str]]:
        """The table of a size, and where each of its values stands."""
        table, origins = deepcopy(self.table), dict[str, str]()
        smoke = table.pop("smoke", {})
        if not isinstance(smoke, dict):
            raise RequestError(
                f"case {self.path!r}: smoke is {short_repr(smoke)}; it must be a table: what size"
                " smoke changes"
            )
        _note(table, CASE, origins)
        if size == "smoke":
            table = _merge(table, smoke)
            _note(smoke, f"{CASE}, size smoke", origins)
        table["size"] = size
        return table, {
            key: self.origins.get(key, found) if found == CASE else found
            for key, found in origins.items()
        }


def read(name: str) -> Source:
    """A case file, by the name of a shipped case or by the path of a user's own file."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.exists():
            raise RequestError(
                f"case file {name!r} does not exist; give the path of a TOML file or one of:"
                f" {', '.join(names())}"
            )
        raw = _read_file(path)
    elif name in names():
        raw = (resources.files("steelyard") / "cases" / f"{name}.toml").read_bytes()
    else:
        hint = known(name, [*names(), "smoke"], "known cases")
        raise RequestError(f"no case {name!r}; {hint} (a file of your own ends in .toml)")
    try:
        table = files.parse_toml(raw)
    except files.TomlLimitError as error:
        raise RequestError(
            f"case file {name!r}: {error}; a case has tables four deep, and short names"
        ) from error
    except ValueError as error:
        raise RequestError(f"case file {name!r} is not TOML: {error}") from error
    if _deeper(table, MAX_TOML_DEPTH):
        raise RequestError(
            f"case file {name!r}: tables nested more than {MAX_TOML_DEPTH} deep; a case has tables"
            " four deep"
        )
    return Source(name, raw.decode("utf-8"), table)


def _read_file(path: Path) -> bytes:
    """Return the bytes of a case file. Raise RequestError if it cannot be read or is too large."""
    try:
        return files.read(path, MAX_CASE_BYTES, unpack=False)
    except files.TooLargeError as error:
        raise RequestError(
            f"case file {str(path)!r} is larger than {MAX_CASE_BYTES} bytes; a case file is a few"
            " kilobytes"
        ) from error
    except OSError as error:
        raise RequestError(
            f"case file {str(path)!r} cannot be read: {error.strerror}; check its path"
        ) from error


def _deeper(value: Any, most: int) -> bool:
    """Whether tables and lists are nested deeper than that; dotted keys nest as deep as they are
    long.
    """
    level = [value]
    for _ in range(most + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)


def resolve(
    name: str | Source,
    size: str | None = None,
    precision: str | None = None,
    division: str | None = None,
    settings: list[str] | None = None,
) -> Resolved:
    """A case as it will be run: file, size (full unless told), then what the command line says."""
    source = read(name) if isinstance(name, str) else name
    table, origins = source.sized("smoke" if size == "smoke" else "full")
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
        _apply(table, setting, origins)
    case, auto = _validate(table, origins, source)
    _note_defaults(case.model_dump(mode="json"), origins)
    return Resolved(case, origins, source.path, auto)


def _validate(
    table: dict[str, Any], origins: dict[str, str], source: Source
) -> tuple[Case, tuple[str, ...]]:
    """The case of a table, and its tunes that are auto; or all that is wrong with its file, at
    either size.
    """
    try:
        return _case(table, origins)
    except ValidationError as error:
        size = str(table["size"])
        every = problems.collect(error, source.text, origins, size, _keys_of_cases())
        try:
            other = source.sized("full" if size == "smoke" else "smoke")
            _case(*other)
        except ValidationError as second:
            every += problems.collect(
                second, source.text, other[1], str(other[0]["size"]), _keys_of_cases()
            )
        raise problems.CaseError(source.path, problems.in_order(every)) from error


def _case(table: dict[str, Any], origins: dict[str, str]) -> tuple[Case, tuple[str, ...]]:
    _expand_precision(table, origins)
    _forget_nominal(table, origins)
    auto = _take_auto(table, origins)
    return Case.model_validate(table), auto


def _take_auto(table: dict[str, Any], origins: dict[str, str]) -> tuple[str, ...]:
    """The tunes that are to be chosen by the devices, each replaced by what runs on unknown ones."""
    tune = table.get("tune")
    if not isinstance(tune, dict):
        return ()
    found = tuple(name for name in UNKNOWN_MEMORY if tune.get(name) == AUTO)
    table["tune"] = {**tune, **{name: UNKNOWN_MEMORY[name] for name in found}}
    origins.update({f"tune.{name}": f"{AUTO} ({origins[f'tune.{name}']})" for name in found})
    return found


def auto_tunes(origins: dict[str, str]) -> tuple[str, ...]:
    """The tunes that were chosen by the devices, as the origins of a record tell."""
    return tuple(
        name for name in UNKNOWN_MEMORY if origins.get(f"tune.{name}", "").startswith(f"{AUTO} (")
    )


def _forget_nominal(table: dict[str, Any], origins: dict[str, str]) -> None:
    """A model changed on the command line is no longer of the size that its case names."""
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


def changed_question(origins: dict[str, str]) -> list[str]:
    """What the command line changed of the question, beside its precision and division, which have
    names of their own.
    """
    named = ("question.division", "question.precision")
    return sorted(
        key
        for key, origin in origins.items()
        if origin == "command line" and key.startswith("question.") and not key.startswith(named)
    )


def _expand_precision(table: dict[str, Any], origins: dict[str, str]) -> None:
    question = table.get("question")
    if isinstance(question, dict) and isinstance(question.get("precision"), dict):
        own = question["precision"]  # whatever it calls itself: a preset's name is only its own
        question["precision"] = {**own, "name": name_of(str(question.get("kind")), own)}
        origins["question.precision.name"] = "of its parts"
    if not isinstance(question, dict) or not isinstance(question.get("precision"), str):
        return
    named = presets().get(str(question.get("kind")), {})
    name = question["precision"]
    if name not in named and origins.get("question.precision") == "command line":
        raise RequestError(
            f"precision {name!r} is not known; allowed for {question.get('kind')}:"
            f" {', '.join(named)}"
        )
    if name not in named:
        return  # one of the problems of the file
    question["precision"] = named[name].model_dump(mode="json")
    where = origins.pop("question.precision", "case")
    _note(question["precision"], f"preset {name} ({where})", origins, "question.precision.")


def _apply(table: dict[str, Any], setting: str, origins: dict[str, str]) -> None:
    key, sign, text = setting.partition("=")
    if not sign or not key:
        raise RequestError(
            f"--set {setting!r} is not of the form key=value, such as tune.batch_tokens=16384"
        )
    check_key(key, settable(), "--set")
    value = typed(text)
    if key.count(".") + 1 > MAX_TOML_DEPTH or _deeper(value, MAX_TOML_DEPTH):
        raise RequestError(
            f"--set {short_repr(setting)}: nested more than {MAX_TOML_DEPTH} deep; a case has"
            " tables four deep"
        )
    if key.startswith("tune.env.") and not isinstance(value, str):
        value = text  # a variable is text, whatever it looks like
    *parents, leaf = key.split(".")
    node = table
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise RequestError(f"--set: {key!r} is below {part!r}, which is a single value")
    node[leaf] = value
    _note({key: value}, "command line", origins)


def check_key(key: str, allowed: list[str], option: str) -> None:
    """Whether an option takes a key. Variables of the workers' environment are not listed one by
    one.
    """
    if key in allowed or key.startswith("tune.env."):
        return
    raise RequestError(f"{option}: no key {short_repr(key)}; {known(key, allowed, 'allowed')}")


def typed(text: str) -> Any:
    """Return a value of the command line: parsed as TOML, or else the text itself."""
    try:
        return files.parse_toml(f"x = {text}")["x"]
    except ValueError:
        return text


def settable() -> list[str]:
    """Every key that --set takes, read off the schemas of cases, tasks and families."""
    out = {
        "max_interval",
        *_keys("tune", Tune),
        *_keys("question", Question),
        *_keys("question.train", Train),
    }
    for gate in (Gate, Falling, Target):
        out |= _keys("gate", gate)
    for task in tasks.table().values():
        out |= _keys("question.data", task.data)
        out |= {f"published.{name}" for name in task.published_facts}
    for family in families.table().values():
        if family.forward is None:  # else what was counted is of the whole model as it stands
            out |= _keys("question.model", family.shape)
    return sorted(out)


def _keys_of_cases() -> list[str]:
    """Every key of a case file, but for those of published rows."""
    told = {"question.kind", "question.task", "question.model.family", "question.data.kind"}
    return sorted({*settable(), *Case.model_fields, *told, "smoke"} - {"size"})


def _keys(prefix: str, model: type[Frozen]) -> set[str]:
    """The keys of a table and of the tables in it, but for those that say what kind of table it is."""
    out: set[str] = set()
    for name, info in model.model_fields.items():
        if name in ("kind", "task", "family"):
            continue
        out.add(f"{prefix}.{name}")
        for inner in get_args(info.annotation):
            if isinstance(inner, type) and issubclass(inner, Frozen):
                out |= _keys(f"{prefix}.{name}", inner)
    return out


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = (
            _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return out


def _note(table: dict[str, Any], origin: str, origins: dict[str, str], prefix: str = "") -> None:
    for key, value in table.items():
        if isinstance(value, dict):
            _note(value, origin, origins, f"{prefix}{key}.")
        else:
            origins[f"{prefix}{key}"] = origin


def _note_defaults(table: dict[str, Any], origins: dict[str, str], prefix: str = "") -> None:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            _note_defaults(value, origins, f"{prefix}{key}.")
        else:
            origins.setdefault(f"{prefix}{key}", "default")
