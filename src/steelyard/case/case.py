"""Cases: frozen questions in TOML files, what may be tuned, and how a command line changes either.

A case file holds the full size; its `[smoke]` table holds what the smoke size changes. A file, then its size, then the
command line: later wins, and every value remembers where it came from.
"""

import hashlib
import json
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from steelyard.case.precision import PRESETS
from steelyard.case.question import (
    FAMILIES,
    KINDS,
    ConversationData,
    CorpusData,
    Division,
    Frozen,
    GlmModel,
    LambadaData,
    MadeCloze,
    MadeConversations,
    MadePassages,
    MadeQuestions,
    MadeText,
    MmluData,
    Model,
    Question,
    RecordData,
    Train,
)
from steelyard.errors import RequestError

Size = Literal["smoke", "full"]

MAX_CASE_BYTES = 64 << 10  # the TOML parser's time grows with the square of a dotted key

# Variables a tune may set. A case file can come from a stranger, so none that names a program or a library to load is here.
ENV = {
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_DEBUG",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
}


class Gate(Frozen):
    """Quality a valid result of scoring must have; applied only to a full run with the case's real weights."""

    metric: Literal["acc", "acc_choice", "loss"]
    target: float
    within: float = Field(ge=0)
    agree_within: float = Field(ge=0, description="how far infer may be from val")


class Falling(Frozen):
    """Quality a valid result of training must have: a loss below another, and below a bound where one is stated."""

    metric: Literal["loss", "loss_after"]
    below: Literal["loss_first", "loss_before"]
    target: float | None = Field(None, gt=0)


class Target(Frozen):
    """Quality at which training stops, and which a valid result must have."""

    metric: Literal["acc"]
    reach: float = Field(gt=0, le=1)


class Tune(Frozen):
    """What may be changed without changing the question."""

    parallel: str = Field(
        "DP",
        description="degrees such as TP2DP4; one without a number takes the devices that the others leave",
    )
    batch_tokens: int = Field(32768, ge=1, description="scoring: tokens computed together in one batch")
    micro_batch: int = Field(1, ge=1, description="training: rows computed together")
    sharding: Literal[0, 1, 2, 3] = Field(
        0, description="training: what replicas divide: nothing, optimiser states, gradients too, weights too"
    )
    sharding_degree: int | None = Field(None, ge=1, description="training: replicas that divide them; default: all")
    recompute: Literal["none", "selective", "full"] = Field("none", description="training: activations computed again")
    pack: bool = Field(True, description="conversations: several samples to a row; else each alone, padded")
    compile: bool = Field(True, description="compile the infer pass (the val pass never is), or training")
    attention: str = Field("auto", description="attention kernel, or auto: the accelerator's choice")
    batching: Literal["auto", "packed", "sorted", "single"] = Field(
        "auto", description="packed: no padding; sorted: padded batches of like length; single: one prompt a batch"
    )
    pad_to: int = Field(16, ge=1, description="padded lengths are multiples of this")
    order: int = Field(0, description="seed of the order in which prompts are packed")
    checkpoint_every: int | None = Field(None, ge=1, description="training: steps between two checkpoints; None: none is kept")
    deterministic: bool = Field(False, description="the same bits in every run, from slower kernels where there are others")
    warmup: int = Field(2, ge=0, description="batches run before a pass, outside it")
    env: dict[str, str] = Field({}, description="environment of the workers; only names in ENV")

    @model_validator(mode="after")
    def _known_env(self) -> Self:
        unknown = sorted(set(self.env) - ENV)
        if unknown:
            raise ValueError(f"environment variable {unknown[0]} is not one a tune may set; allowed: {', '.join(sorted(ENV))}")
        for name, value in self.env.items():
            if "\0" in value:
                raise ValueError(f"environment variable {name} holds a NUL character")
        return self


class Reference(Frozen):
    """A published row. `ran_as` is the precision that really ran, where the label says something else."""

    source: str
    config: str
    published_as: str
    ran_as: str
    values: dict[str, float | str]
    note: str | None = None


class Case(Frozen):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")
    title: str
    about: str
    size: Size = "full"
    engines: list[str]
    divisions: list[Division] = Field(["closed"])
    question: Question
    tune: Tune = Tune()
    gate: Gate | Falling | Target | None = None
    devices: list[int] = Field([1], description="numbers of devices on which `run smoke` shows the case")
    max_interval: float | None = Field(None, gt=0, description="widest 95 % interval of the headline rate, as a share of it")
    reference: list[Reference] = Field(default_factory=list)

    def key(self, fingerprint: str) -> str:
        """The hash of the question, with the fingerprint of the data that was really read."""
        return key_of(self.question.model_dump(mode="json"), fingerprint)


@dataclass(frozen=True)
class Resolved:
    """A case with every override applied, and where each value came from (dotted name → origin)."""

    case: Case
    origins: dict[str, str]
    path: str


def key_of(question: dict[str, Any], fingerprint: str) -> str:
    """The key of a question as a table, such as a record holds."""
    asked = {**question, "data": {**question["data"], "fingerprint": fingerprint}}
    if asked.get("train") is None:  # scoring has none, and had keys before there was training
        asked.pop("train", None)
    elif asked["train"].get("evaluate_every") is None:  # likewise
        asked["train"] = {name: value for name, value in asked["train"].items() if name != "evaluate_every"}
    return hashlib.sha256(canonical(asked).encode()).hexdigest()[:16]


def canonical(value: Any) -> str:
    """One spelling for one value: what hashes are taken over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def names() -> list[str]:
    """The cases that come with the package."""
    folder = resources.files("steelyard") / "cases"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def read(name: str) -> tuple[dict[str, Any], str]:
    """A case file as a table, by the name of a shipped case or by the path of a user's own file."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise RequestError(
                f"case file {name!r} does not exist; give the path of a TOML file or one of: {', '.join(names())}"
            )
        if path.stat().st_size > MAX_CASE_BYTES:
            raise RequestError(f"case file {name!r} is larger than {MAX_CASE_BYTES} bytes; a case file is a few kilobytes")
        raw = path.read_bytes()
    elif name in names():
        raw = (resources.files("steelyard") / "cases" / f"{name}.toml").read_bytes()
    else:
        near = get_close_matches(name.lower(), [*names(), "smoke"], 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known cases: {', '.join(names())}"
        raise RequestError(f"no case {name!r}{hint} (a file of your own ends in .toml)")
    try:
        table = tomllib.loads(raw.decode("utf-8"))
        _note(table, "", {})  # what is nested too deep to be walked fails here
        return table, name
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"case file {name!r} is not TOML: {error}") from error


def resolve(
    name: str,
    size: str | None = None,
    precision: str | None = None,
    division: str | None = None,
    settings: list[str] | None = None,
) -> Resolved:
    """A case as it will be run: file, size (full unless told), then what the command line says."""
    table, path = read(name)
    origins: dict[str, str] = {}
    smoke = table.pop("smoke", {})
    if not isinstance(smoke, dict):
        raise RequestError(f"case {path!r}: smoke is {_shown(smoke)}; it is a table of what the size smoke changes")
    _note(table, "case", origins)
    if size not in (None, "smoke", "full"):
        raise RequestError(f"size {size!r} is not known; allowed: smoke, full")
    if division not in (None, *get_args(Division)):
        raise RequestError(f"--division {division!r} is not known; allowed: {', '.join(get_args(Division))}")
    if size == "smoke":
        table = _merge(table, smoke)
        _note(smoke, "case, size smoke", origins)
    table["size"] = size or "full"
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
    _expand_precision(table, origins)
    _forget_nominal(table, origins)
    case = _validate(table, path)
    _note_defaults(case.model_dump(mode="json"), origins)
    return Resolved(case, origins, path)


def _forget_nominal(table: dict[str, Any], origins: dict[str, str]) -> None:
    """A model changed on the command line is no longer of the size that its case names."""
    key = "question.model.nominal_parameters"
    model = table.get("question", {}).get("model") if isinstance(table.get("question"), dict) else None
    changed = any(name.startswith("question.model.") for name, origin in origins.items() if origin == "command line")
    if isinstance(model, dict) and changed and origins.get(key) != "command line":
        model["nominal_parameters"] = None
        origins[key] = "unknown: the model was changed"


def changed_question(origins: dict[str, str]) -> list[str]:
    """What the command line changed of the question, beside its precision and division, which have names of their own."""
    named = ("question.division", "question.precision")
    return sorted(
        key
        for key, origin in origins.items()
        if origin == "command line" and key.startswith("question.") and not key.startswith(named)
    )


def _expand_precision(table: dict[str, Any], origins: dict[str, str]) -> None:
    question = table.get("question")
    if not isinstance(question, dict) or not isinstance(question.get("precision"), str):
        return
    presets = PRESETS.get(str(question.get("kind")), {})
    name = question["precision"]
    if name not in presets:
        raise RequestError(f"precision {name!r} is not known; allowed for {question.get('kind')}: {', '.join(presets)}")
    question["precision"] = presets[name].model_dump(mode="json")
    where = origins.pop("question.precision", "case")
    _note(question["precision"], f"preset {name} ({where})", origins, "question.precision.")


def _validate(table: dict[str, Any], path: str) -> Case:
    try:
        return Case.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in _unnamed(first["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        if first["type"] == "extra_forbidden":
            raise RequestError(f"case {path!r}: unknown key {where!r}{more}; remove it, or see docs/cases.md") from error
        shown = "" if first["type"] in ("missing", "value_error") else f" (it is {_shown(first['input'])})"
        raise RequestError(f"case {path!r}: {where}: {first['msg']}{shown}{more}; see docs/cases.md") from error


def _unnamed(place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A place in a case without the name of the kind of data or of the family of models, which the file does not nest."""
    names = {"data": KINDS, "model": FAMILIES}
    nested = len(place) > 2 and place[0] == "question" and place[2] in names.get(str(place[1]), ())
    return place[:2] + place[3:] if nested else place


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _apply(table: dict[str, Any], setting: str, origins: dict[str, str]) -> None:
    key, sign, text = setting.partition("=")
    if not sign or not key:
        raise RequestError(f"--set {setting!r} is not of the form key=value, such as tune.batch_tokens=16384")
    allowed = settable()
    if key not in allowed and not any(key.startswith(k + ".") for k in ("tune.env",)):
        near = get_close_matches(key, allowed, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(allowed)}"
        raise RequestError(f"--set: no key {key!r}; {hint}")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text
    if key.startswith("tune.env.") and not isinstance(value, str):
        value = text  # a variable is text, whatever it looks like
    *parents, leaf = key.split(".")
    node = table
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise RequestError(f"--set: {key!r} lies under {part!r}, which is a single value")
    node[leaf] = value
    _note({key: value}, "command line", origins)


def settable() -> list[str]:
    """Every key that --set takes, read off the schema."""
    out: list[str] = ["max_interval"]
    for prefix, model in (
        ("question", Question),
        ("question.model", Model),
        ("question.model", GlmModel),
        ("question.data", MmluData),
        ("question.data", LambadaData),
        ("question.data.made", MadeQuestions),
        ("question.data", CorpusData),
        ("question.data", ConversationData),
        ("question.data", RecordData),
        ("question.data.made", MadePassages),
        ("question.data.made", MadeText),
        ("question.data.made", MadeConversations),
        ("question.data.made", MadeCloze),
        ("question.train", Train),
        ("tune", Tune),
        ("gate", Gate),
        ("gate", Falling),
        ("gate", Target),
    ):
        out += [f"{prefix}.{name}" for name in model.model_fields if name not in ("kind", "task", "family")]
    return sorted(set(out))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
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
