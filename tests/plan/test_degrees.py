"""Plans from texts such as TP2PP4DP1, which plans are refused, and whether a plan fits the devices'
memory.
"""

import re

import pytest

from fixtures.cases import resolve_with_fixed_tune
from fixtures.golden import golden
from steelyard.case.resolve import resolve_case
from steelyard.engine import engine_rows
from steelyard.errors import RequestError
from steelyard.plan import degrees as plan
from steelyard.plan import memory
from steelyard.plan.degrees import Plan


@pytest.mark.parametrize(
    "text, world, degrees",
    [
        ("DP", 1, (1, 1, 1)),
        ("DP", 8, (1, 1, 8)),
        ("TP", 8, (8, 1, 1)),
        ("TP2", 8, (2, 1, 4)),
        ("TP2DP4", 8, (2, 1, 4)),
        ("TP2DP", 8, (2, 1, 4)),
        ("TPDP2", 8, (4, 1, 2)),
        ("TP2PP4DP1", 8, (2, 4, 1)),
        ("TP2PPDP1", 8, (2, 4, 1)),
    ],
)
def test_degrees_from_text(text, world, degrees):
    assert plan.parse_degrees(text, world) == degrees


@pytest.mark.parametrize(
    "text, world, says",
    [
        ("TP3", 8, "--parallel 'TP3' needs a multiple of 3 devices, and there are 8"),
        ("TP2DP2", 8, "--parallel 'TP2DP2' needs 4 devices, and there are 8"),
        ("TP2PP4DP1", 1, "needs 8 devices, and there are 1"),
        ("TPDP", 8, "only one degree may lack a number"),
        ("TP0", 8, "numbers are 1 or more"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(text, world, says):
    with pytest.raises(RequestError, match=says) as error:
        plan.parse_degrees(text, world)
    assert "\n" not in str(error.value)


def resolve_lambada(parallel: str):
    """Return the LAMBADA case with these degrees of parallelism."""
    return resolve_case("aquila2-34b-lambada", settings=[f"tune.parallel={parallel}"]).case


def test_default_parallelism_of_cases():
    assert plan.make_plan(resolve_case("aquila2-34b-lambada").case, 1, 8).tp == 8
    assert plan.make_plan(resolve_case("llama2-7b-mmlu").case, 1, 8).dp == 8


@pytest.mark.parametrize(
    "parallel, devices, says",
    [
        ("TP3", 3, "TP3 does not divide the model's 8 key groups; allowed: 1, 2, 4, 8"),
        ("TP16", 16, "TP16 does not divide the model's 8 key groups; allowed: 1, 2, 4, 8"),
        (
            "PP2",
            2,
            "PP2: aquila2-34b-lambada is an inference case, which has no pipeline; allowed: PP1",
        ),
    ],
)
def test_plans_that_do_not_divide_the_model_are_refused(parallel, devices, says):
    with pytest.raises(RequestError, match=says):
        plan.make_plan(resolve_lambada(parallel), 1, devices)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "TP2PP2VP2",
            (
                "--parallel 'TP2PP2VP2': no engine has virtual pipeline stages (with them"
                " megatron-core's losses were wrong by 0.04); allowed: TP, PP and DP"
            ),
        ),
        (
            "TP2SP2",
            (
                "--parallel 'TP2SP2': no engine has a separate degree for sequence parallelism"
                " (megatron-core's needs Transformer Engine; engine torch's comes with TP);"
                " allowed: TP, PP and DP"
            ),
        ),
        ("CP2", "--parallel 'CP2': no engine has context parallelism; allowed: TP, PP and DP"),
        ("EP2DP4", "--parallel 'EP2DP4': no engine has expert parallelism; allowed: TP, PP and DP"),
    ],
)
def test_degrees_of_other_programs_are_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan.parse_degrees(text, 8)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    "text", ["TP-2", "XP2", "DP2TP2", "TP2.5", "tp2", "TP2 DP2", "TP99999", "TP٢", ""]
)
def test_malformed_degrees_are_refused(text):
    with pytest.raises(RequestError, match="not degrees; give them as TP2"):
        plan.parse_degrees(text, 8)


def test_positions_of_ranks_in_a_plan():
    layout = Plan(nodes=2, devices=8, tp=2, pp=4, dp=2, launcher="local")
    positions = [plan.find_position(layout, rank) for rank in range(16)]
    assert positions[0] == plan.RankPosition(tp=0, pp=0, dp=0)
    assert positions[1] == plan.RankPosition(tp=1, pp=0, dp=0)
    assert positions[2] == plan.RankPosition(tp=0, pp=1, dp=0)
    assert positions[8] == plan.RankPosition(tp=0, pp=0, dp=1)
    assert positions[15] == plan.RankPosition(tp=1, pp=3, dp=1)
    assert len(set(positions)) == 16


def test_weights_must_fit_a_device():
    case = resolve_with_fixed_tune("aquila2-34b-lambada").case
    one_device = plan.make_plan(case, 1, 1)
    gib = 1 << 30
    says = (
        r"^aquila2-34b-lambada in bf16 needs 66.6 GiB per device by its shapes \(parameters 62.8,"
        r" activations 3.06, "
        r"logits 0.763\), and a device has 40.0 GiB; choose "
        r"more devices with --parallel TP, .*, or --size smoke$"
    )
    with pytest.raises(RequestError, match=says):
        memory.check_memory(case, one_device, 40 * gib)
    assert memory.check_memory(case, plan.make_plan(case, 1, 8), 40 * gib) is None
    assert memory.check_memory(case, one_device, 139 * gib) is None
    assert memory.check_memory(case, one_device, None) is None


@pytest.mark.parametrize(
    ("name", "precision", "settings", "advice"),
    [
        (
            "aquila2-34b-lambada",
            "fp32",
            [],
            "a 16-bit --precision, more devices with --parallel TP, a smaller tune.batch_tokens",
        ),
        (
            "aquila2-34b-lambada",
            "fp16",
            [],
            "more devices with --parallel TP, a smaller tune.batch_tokens",
        ),
        (
            "aquila2-34b-lambada",
            "fp8",
            [],
            "more devices with --parallel TP, a smaller tune.batch_tokens",
        ),
        (
            "llama1-7b-openwebtext",
            "bf16",
            [],
            (
                "--precision bf16-pure, more devices with --parallel TP or PP, --set"
                " tune.sharding=3, --set tune.recompute=full"
            ),
        ),
        (
            "llama1-7b-openwebtext",
            "bf16-pure",
            ["tune.sharding=3", "tune.recompute=full"],
            "more devices with --parallel TP or PP",
        ),
    ],
)
def test_advice_leaves_out_what_is_set_already(
    name: str, precision: str, settings: list[str], advice: str
):
    case = resolve_case(name, "full", precision, settings=[*settings, "tune.parallel=DP"]).case
    with pytest.raises(RequestError, match=rf"; choose {re.escape(advice)}, or --size smoke$"):
        memory.check_memory(case, plan.make_plan(case, 1, 1), 1 << 30)


def test_close_to_the_memory_limit_is_a_warning():
    case = resolve_with_fixed_tune("aquila2-34b-lambada").case
    one_device = plan.make_plan(case, 1, 1)
    needed = memory.predict_minimum(case, one_device).total
    for size, warned in (
        (needed / 1.099, True),
        (needed, True),
        (needed / 0.951, True),
        (needed / 0.949, False),
    ):
        warning = memory.check_memory(case, one_device, int(size))
        assert (warning is not None) == warned
        assert warning is None or re.search(golden("takes-66-6-gib-device-it"), warning)
    with pytest.raises(RequestError, match=r"needs 66\.6 GiB"):
        memory.check_memory(case, one_device, int(needed / 1.101))


def resolve_training(
    parallel: str, *settings: str, size: str = "full", name: str = "llama1-7b-openwebtext"
):
    """Return a training case with these degrees of parallelism and settings."""
    return resolve_case(name, size, settings=[f"tune.parallel={parallel}", *settings]).case


@pytest.mark.parametrize("parallel", ["DP8", "TP2DP4", "TP2PP4DP1", "PP8", "TP8", "TP2PP2DP2"])
def test_plans_that_train(parallel):
    for sharding in range(4):
        run_plan = plan.make_plan(resolve_training(parallel, f"tune.sharding={sharding}"), 1, 8)
        assert run_plan.tp * run_plan.pp * run_plan.dp == 8


@pytest.mark.parametrize(
    "parallel, settings, devices, says",
    [
        (
            "TP3",
            [],
            3,
            "TP3 does not divide the model's 32 key groups; allowed: 1, 2, 4, 8, 16, 32",
        ),
        (
            "TP8",
            ["question.model.ffn=11004"],
            8,
            "TP8 does not divide the model's 11004 FFN columns; allowed: 1, 2, 4",
        ),
        ("TP8", ["question.train.length=2046"], 8, "TP8 does not divide the 2046 tokens of a row"),
        ("PP33", [], 33, "PP33: the model has 32 layers; allowed: PP1 to PP32"),
        (
            "PP2",
            ["question.model.tied=true"],
            2,
            "a model with tied embeddings cannot be divided; allowed: TP1PP1",
        ),
        (
            "DP8",
            ["question.model.tied=true", "tune.sharding=1"],
            8,
            "a model with tied embeddings cannot be divided",
        ),
        (
            "DP8",
            ["tune.sharding=2", "tune.sharding_degree=3"],
            8,
            "tune.sharding_degree=3 does not divide DP8; allowed: 1, 2, 4, 8",
        ),
        (
            "PP4DP2",
            ["question.train.batch=12", "tune.micro_batch=2"],
            8,
            (
                "PP4 needs at least 4 micro-batches a step, and 12 rows over DP2 in"
                " micro-batches of 2 make 3; lower PP"
            ),
        ),
    ],
)
def test_plans_that_cannot_train_are_refused(parallel, settings, devices, says):
    with pytest.raises(RequestError, match=says) as error:
        plan.make_plan(resolve_training(parallel, *settings), 1, devices)
    assert "\n" not in str(error.value)


def test_a_sample_makes_fewer_micro_batches():
    case = resolve_training("PP4", "tune.micro_batch=2")
    plan.make_plan(case, 1, 4, sample_size=8)
    with pytest.raises(RequestError, match="6 rows over DP1 in micro-batches of 2 make 3"):
        plan.make_plan(case, 1, 4, sample_size=6)
    conversations = resolve_training("PP4", "question.train.batch=1", name="aquila2-7b-alpaca")
    assert plan.make_plan(conversations, 1, 4).pp == 4  # rows are known after packing


def test_settings_without_effect_are_allowed():
    assert plan.make_plan(resolve_training("DP1", "tune.sharding=3"), 1, 1).dp == 1
    assert plan.get_shard_degree(resolve_training("DP1", "tune.sharding=3"), 1) == 1
    assert (
        plan.make_plan(resolve_training("DP8", "tune.sharding_degree=3"), 1, 8).dp == 8
    )  # no sharding
    scoring = resolve_case(
        "llama2-7b-mmlu", settings=["tune.sharding=3", "tune.sharding_degree=3"]
    ).case
    assert plan.make_plan(scoring, 1, 8).dp == 8


def test_the_degree_of_sharding():
    assert plan.get_shard_degree(resolve_training("DP8", "tune.sharding=0"), 8) == 1
    assert plan.get_shard_degree(resolve_training("DP8", "tune.sharding=1"), 8) == 8
    assert (
        plan.get_shard_degree(
            resolve_training("DP8", "tune.sharding=3", "tune.sharding_degree=2"), 8
        )
        == 2
    )


def test_engines_that_hold_a_whole_model_train_on_replicas():
    assert engine_rows.find_engine("transformers").can_divide(
        plan.make_plan(resolve_training("DP"), 1, 8)
    )
    assert not engine_rows.find_engine("transformers").can_divide(
        plan.make_plan(resolve_training("TP2"), 1, 8)
    )
    assert not engine_rows.find_engine("transformers").can_divide(
        plan.make_plan(resolve_training("PP2"), 1, 8)
    )
    assert engine_rows.find_engine("torch").can_divide(
        plan.make_plan(resolve_training("TP2PP2"), 1, 8)
    )


@pytest.mark.parametrize(
    "parallel, settings, bytes_each",
    [
        # fp32 weights, two fp32 states, fp32 gradients, and the 16-bit compute copy
        ("DP1", [], 4 + 8 + 4 + 2),
        ("DP8", ["tune.sharding=1"], (4 + 8) / 8 + 4 + 2),
        ("DP8", ["tune.sharding=2"], (4 + 8 + 4) / 8 + 2),
        ("DP8", ["tune.sharding=3"], (4 + 8 + 4 + 2) / 8),
        ("DP1", ["question.precision=bf16-pure"], 8),
        ("DP1", ["question.precision=fp32"], 16),
    ],
)
def test_state_bytes_per_parameter_in_training(parallel, settings, bytes_each):
    case = resolve_training(parallel, *settings)
    run_plan = plan.make_plan(case, 1, 1 if parallel == "DP1" else 8)
    question = case.question
    [parts] = memory.predict_stages(
        question.model, question.precision, case.tune, run_plan, question.train
    )
    assert sum_state_bytes(parts) / 6_738_415_616 == pytest.approx(bytes_each, rel=1e-6)


def sum_state_bytes(parts):
    """Return the bytes of parameters, copies, gradients and optimizer states."""
    return parts.parameters + parts.copies + parts.gradients + parts.states


def test_the_needed_memory_is_that_of_the_fullest_stage():
    case = resolve_training("TP2PP4DP1")
    run_plan = plan.make_plan(case, 1, 8)
    question = case.question
    stages = memory.predict_stages(
        question.model, question.precision, case.tune, run_plan, question.train, fused_blocks=True
    )
    assert (
        memory.predict_minimum(case, run_plan)
        == max(stages, key=lambda stage: stage.total)
        == stages[0]
    )
    norms = 65 * 4096  # replicated on every tensor-parallel rank
    assert 2 * sum(map(sum_state_bytes, stages)) == 18 * (6_738_415_616 + norms)


def test_training_must_fit_a_device():
    case = resolve_training("DP1", "tune.micro_batch=2")
    says = (
        r"needs 126.9 GiB per device by its shapes \(parameters 25.1, .*\), and a device has"
        r" 80.0 GiB; choose .* or PP, --set"
    )
    with pytest.raises(RequestError, match=says):
        memory.check_memory(case, plan.make_plan(case, 1, 1), 80 << 30)
    assert memory.check_memory(case, plan.make_plan(case, 1, 1), 139 << 30) is None
