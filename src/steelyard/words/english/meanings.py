"""English names and explanations of metrics, scores of tasks and settings, by code."""

MEANINGS: dict[str, tuple[str, str]] = {
    "e2e_time": (
        "End-to-end time",
        "from the start of the run to the finished record, everything in it",
    ),
    "p_val_whole": (
        "Validation rate, whole",
        "reference pass: real work / wall time of the loop over the data",
    ),
    "p_val_core": (
        "Validation rate, core",
        "reference pass: real work / compute time, without data and copies",
    ),
    "p_infer_whole": (
        "Inference rate, whole",
        "engine's pass: real work / wall time of the loop, batching, copies, scoring in it",
    ),
    "p_infer_core": (
        "Inference rate, core",
        "engine's pass: real work / compute time, without data and copies",
    ),
    "p_infer_whole_padded": (
        "Inference rate, padding counted",
        (
            "every sample counted as long as the model has positions, as the published rows count;"
            " for comparison only"
        ),
    ),
    "p_infer_core_padded": ("Inference rate, core, padding counted", "the same over compute time"),
    "p_whole": (
        "Rate, whole",
        "work / wall time of all steps, with evaluations, checkpoints and data waits",
    ),
    "p_train": ("Training rate", "the same less evaluation and checkpoint time; all steps"),
    "p_core": (
        "Compute rate",
        "work / compute time over the steady window; waiting for data is not in it",
    ),
    "tokens_per_device_s": (
        "Tokens per accelerator",
        "tokens per second per accelerator over wall time; training: steady window",
    ),
    "samples_per_s": (
        "Samples per second",
        "samples of the headline pass / its wall time; training: steady window",
    ),
    "mfu": (
        "Model FLOPs utilisation",
        "causal FLOPs / wall time / datasheet dense peak of the matmul precision",
    ),
    "mfu_core": ("MFU, core", "the same over compute time"),
    "mfu_achievable": (
        "MFU, achievable",
        "the same over the matmul rate measured on this machine in the same run",
    ),
    "mfu_palm": (
        "MFU, PaLM",
        "2N + 4·L·h·T FLOPs per scored token (6N + 12·L·h·T trained), full attention square",
    ),
    "mfu_nominal": (
        "MFU, nominal",
        (
            "2 × nominal parameters per scored token (6 × trained); only to compare with published"
            " rows"
        ),
    ),
    "mfu_padded": (
        "MFU, nominal, padding counted",
        "as some published rows count: padding is work",
    ),
    "mfu_one_sequence": (
        "MFU, nominal, one sequence a sample",
        "as some published rows count: a sample is one padded sequence, whatever it has",
    ),
    "agreement": (
        "Agreement",
        "share of answers equal in the reference pass and the engine's pass",
    ),
    "loss": ("Loss", "training loss, mean of the last tenth of the steps, in nats"),
    "loss_first": (
        "Loss, first tenth",
        "training loss, mean of the first tenth of the steps, in nats",
    ),
    "grad_norm": ("Gradient norm", "of all gradients in the last step, before clipping"),
    "mem": (
        "Device memory in use",
        "highest over devices, GiB; on a CPU, of all the run's processes together",
    ),
    "mem_reserved": ("Memory reserved", "the framework's peak, GiB"),
    "mem_allocated": ("Memory allocated", "the framework's peak, GiB"),
    "mem_predicted": (
        "Memory predicted",
        "from shapes: parameters, gradients, states, activations, logits of the fullest rank, GiB",
    ),
    "mem_total": ("Device memory", "what the device has, GiB"),
    "energy": (
        "Energy",
        (
            "devices' energy counters over the pass, else their power integrated; training: steady"
            " window"
        ),
    ),
    "energy_per_token": ("Energy per token", "energy / tokens of the pass"),
    "energy_per_sample": ("Energy per sample", "energy / samples of the pass"),
    "tokens_per_joule": ("Tokens per joule", "tokens of the pass / energy"),
    "samples_per_joule": ("Samples per joule", "samples of the pass / energy"),
    "flops_causal": (
        "FLOPs, causal",
        "matmul FLOPs the model's definition needs; the headline convention",
    ),
    "flops_palm": ("FLOPs, PaLM", "full attention square"),
    "flops_nominal": ("FLOPs, nominal", "from the nominal parameter count"),
    "matmul_rate": (
        "Measured matmul rate",
        "the case's own matmuls on this machine, in its precision and in the same run",
    ),
    "padded_share": (
        "Padding",
        "share of computed positions that were padding; never counted as work",
    ),
    "straggler_share": (
        "Cost of the slowest rank",
        "share of a step (scoring: of the pass) saved if it were as fast as the others' median",
    ),
    "harness_overhead": ("Harness overhead", "what measuring cost, against the same work run bare"),
    "score.acc": (
        "Accuracy",
        "answers right by argmax over the whole vocabulary, from the same pass that was timed",
    ),
    "score.acc_val": ("Accuracy, reference pass", "the same of the reference pass"),
    "score.acc_se": ("Standard error of accuracy", "from the number of questions"),
    "mmlu.acc_choice": (
        "Accuracy among the choices",
        "argmax over the four letters only, as the field's common harness does",
    ),
    "mmlu.acc_choice_val": (
        "Accuracy among the choices, reference pass",
        "the same of the reference pass",
    ),
    "mmlu.acc_macro": ("Accuracy, mean of subjects", "every subject counts the same"),
    "lambada.loss": (
        "Loss",
        (
            "mean over samples of each one's mean cross-entropy per token, in nats, from the same"
            " pass that was timed"
        ),
    ),
    "lambada.loss_val": ("Loss, reference pass", "the same of the reference pass"),
    "lambada.loss_token": (
        "Loss per token",
        "cross-entropy over all predicted tokens of the set, each counted the same",
    ),
    "lambada.perplexity": ("Perplexity", "exp of the loss per token"),
    "lambada.perplexity_last": (
        "Perplexity of the last word",
        "exp of the mean over passages of the last word's cross-entropy, as the field does",
    ),
    "lambada.acc": (
        "Accuracy",
        (
            "last words right by argmax over the whole vocabulary, all their tokens, from the pass"
            " that was timed"
        ),
    ),
    "held_out.loss_before": (
        "Held-out loss before",
        "mean cross-entropy per target of rows never trained on, before the first step",
    ),
    "held_out.loss_after": ("Held-out loss after", "the same after the last step"),
    "superglue_record.acc": (
        "Accuracy",
        (
            "questions whose candidate with the highest score is one of the answers, at the last"
            " evaluation"
        ),
    ),
    "superglue_record.acc_before": (
        "Accuracy before training",
        "of the evaluation before the first step",
    ),
    "superglue_record.em": (
        "Exact match",
        (
            "the chosen candidate's text is that of an answer, compared as ReCoRD's own evaluation"
            " does"
        ),
    ),
    "superglue_record.f1": (
        "F1",
        (
            "of the words of the chosen candidate and the nearest answer, as ReCoRD's own"
            " evaluation has it"
        ),
    ),
    "setting.engine": (
        "Engine",
        (
            "what ran the model: part of Steelyard if it has no mark; else another package's, and"
            " tested (steelyard conform found that this version computes what engine torch does),"
            " not tested, or found not to conform"
        ),
    ),
    "setting.precision": ("Precision", "what matmuls run in and weights are kept in"),
    "setting.division": (
        "Division",
        "closed: every token of every sequence is computed; open: any way to the same answer",
    ),
    "setting.config": ("Configuration", "nodes x devices of a node, such as 2x8"),
    "setting.parallel": (
        "Parallel strategy",
        "degrees as TPxPPyDPz, such as TP2PP1DP4; SHn: sharding stage n",
    ),
    "setting.fix_hp": ("Changed settings", "what was tuned without changing the question"),
    "setting.mem_stages": (
        "Memory by stage",
        "GiB of the fullest rank of each pipeline stage * ranks of the stage",
    ),
}
