"""The plans under which training is tested, over eight processes."""

from pathlib import Path

OVERFLOWING_SCALE = 2.0**21  # the first fp16 steps overflow and are skipped


def parse_plans(text: str) -> list[dict]:
    """Parse lines of plan, sharding, sharding degree, recompute, rows of a micro-batch and
    precision, where a dash is the default. Return one run per line for train_plans.py.
    """
    out = []
    for line in text.split("\n"):
        if line.strip():
            parallel, *tune_values, precision = line.split()
            names = ("sharding", "sharding_degree", "recompute", "micro_batch")
            settings = {
                f"tune.{name}": value
                for name, value in zip(names, tune_values, strict=True)
                if value != "-"
            }
            run = {
                "name": " ".join(line.split()),
                "settings": {"tune.parallel": parallel, **settings},
            }
            out.append(
                run
                | ({} if precision == "-" else {"precision": precision, "scale": OVERFLOWING_SCALE})
            )
    return out


FP64_PLANS = parse_plans("""
    DP8       0 - none      2 -
    DP8       1 - selective 1 -
    DP8       2 - full      1 -
    DP8       3 - none      4 -
    DP8       2 4 none      1 -
    DP8       1 2 none      1 -
    TP8       0 - none      8 -
    TP4DP2    1 - full      4 -
    TP2DP4    0 - selective 4 -
    TP2DP4    2 - none      2 -
    TP2DP4    3 2 none      4 -
    PP4DP2    0 - selective 2 -
    PP4DP2    3 - full      2 -
    PP2DP4    1 - none      1 -
    PP2DP4    2 2 none      1 -
    TP2PP4DP1 0 - none      4 -
    TP2PP2DP2 0 - full      4 -
    TP2PP2DP2 2 - none      2 -
""")
LOW_PRECISION_PLANS = parse_plans("""
    DP8       3 - none      2 bf16
    TP2DP4    0 - none      4 bf16
    TP2PP2DP2 1 - none      4 bf16
    TP2DP4    2 - none      4 bf16-pure
    PP2DP4    0 - none      2 fp16
    TP2PP2DP2 1 - none      4 fp16
    DP8       3 - none      2 fp8
    TP2PP2DP2 1 - full      4 fp8-pure
""")
FEW_STEPS = {"question.train.steps": 4}  # for dtypes whose matmuls are slow on a CPU
for one in LOW_PRECISION_PLANS:
    one["settings"] |= {} if one["precision"] == "fp16" else FEW_STEPS
LOADED_PLANS = parse_plans("PP2DP4 3 - none 2 -")
# Conversations without the padding of rows: micro-batches have many sizes, multiples of 8 tokens.
SMALL_GRAIN = 8
UNPADDED_PLANS = parse_plans("""
    DP8       1 - none      2 -
    TP4DP2    0 - none      3 -
    TP2PP2DP2 3 - full      2 -
    PP4DP2    0 - none      2 -
""")
for one in UNPADDED_PLANS:
    one |= {"name": f"{one['name']} unpadded", "case": "aquila2-7b-alpaca", "grain": SMALL_GRAIN}

# Settings that make variants of a plain Llama; each is tested under three plans.
LLAMA3 = '{kind = "llama3", factor = 8.0, low = 1.0, high = 4.0, original_positions = 24}'
VARIANTS = {
    "qwen2": {"qkv_bias": "true", "rope_scaling": LLAMA3},
    "qwen3": {"qk_norm": "true", "head_dim": 12},
    "mistral": {"window": 9, "rope_scaling": '{kind = "linear", factor = 4.0}'},
}


def variant_settings(name: str) -> dict[str, object]:
    """Return the settings that make the case's model this variant."""
    return {f"question.model.{key}": value for key, value in VARIANTS[name].items()}


VARIANT_PLANS = [
    one
    | {
        "name": f"{one['name']} {name}",
        "settings": one["settings"] | variant_settings(name) | FEW_STEPS,
    }
    for name in VARIANTS
    for one in parse_plans("""
    DP8       3 - none      2 -
    TP2DP4    1 - selective 4 -
    TP2PP2DP2 2 - full      2 -
""")
]

# Runs that save a checkpoint, and runs that resume from it under another plan.
CHECKPOINTED = (
    "TP2PP2DP2 2 - none      2 -",
    "DP8       3 - none      4 -",
    "PP2DP4    0 - none      2 fp16",
)
RESUMED = {
    "DP8       0 - none      1 -": CHECKPOINTED[0],
    "TP4DP2    3 - none      4 -": CHECKPOINTED[0],
    "PP4DP2    2 - none      1 -": CHECKPOINTED[1],
    "TP2PP2DP2 2 - none      1 fp16": CHECKPOINTED[2],
}


def normalize_plan(line: str) -> str:
    """Return a plan's line with single spaces, as runs are named."""
    return " ".join(line.split())


def plans_with_checkpoints(folder: Path) -> list[dict]:
    """Return all fp64 and low-precision plans, those of CHECKPOINTED with a checkpoint folder, then
    the runs that resume from there.
    """
    checkpoint_folders = {
        normalize_plan(line): str(folder / f"kept-{i}") for i, line in enumerate(CHECKPOINTED)
    }
    started = [
        run
        | ({"keep": checkpoint_folders[run["name"]]} if run["name"] in checkpoint_folders else {})
        for run in [*FP64_PLANS, *LOW_PRECISION_PLANS]
    ]
    return [
        *started,
        *[
            parse_plans(new)[0] | {"resume": checkpoint_folders[normalize_plan(old)]}
            for new, old in RESUMED.items()
        ],
    ]
