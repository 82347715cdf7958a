"""Chinese translations of the texts in shipped case files, by the English text: titles,
descriptions, sources and notes of published rows.

A record holds the English of its time, so a text that no case file has any more stays here.
"""

_LOSS = "每样本填充至 2048 个 token 且计入填充；引言部分也参与学习，故损失不可比"

CASES: dict[str, str] = {
    "Llama-2-7B continues OpenWebText": "Llama-2-7B 续写 OpenWebText",
    (
        "Generation: runs of 1,024 tokens of OpenWebText documents are continued by 256 tokens"
        " each, greedily, under a load of requests."
    ): (
        "生成：在请求负载下，以 OpenWebText 文档中连续的 1,024 个 token 为提示，各贪心续写 256 个"
        " token。"
    ),
    "Llama-3.1-8B generates": "Llama-3.1-8B 生成",
    (
        "Generation: prompts of 1,024 seeded token ids are continued by 256 tokens each,"
        " greedily, under a load of requests."
    ): "生成：在请求负载下，以种子生成的 1,024 个 token id 为提示，各贪心续写 256 个 token。",
    "Aquila2-34B scores LAMBADA, tensor parallel": "Aquila2-34B 评测 LAMBADA，张量并行",
    (
        "Prefill only: every passage of LAMBADA's test set goes through the model once, and"
        " every token of it is predicted."
    ): ("仅预填充：LAMBADA 测试集的每段文本经过模型一次，并预测其每个 token。"),
    "FlagPerf, inference case aquila_34b_lambada (Nvidia A100), results page": (
        "FlagPerf 推理用例 aquila_34b_lambada（Nvidia A100）结果页"
    ),
    (
        "every passage padded to 4096 tokens and the padding counted: 8711 is 177.5 real"
        " tokens/s; MFU 2 x 34e9 FLOPs per padded token over 8 x 312 TFLOP/s"
    ): (
        "每段文本填充至 4096 个 token 且计入填充：8711 相当于实际 177.5 token/秒；MFU 按每个填充后"
        " token 2 x 34e9 FLOPs、"
        "8 x 312 TFLOP/s 计算"
    ),
    "Aquila2-7B learns alpaca's instructions": "Aquila2-7B 在 alpaca 上指令微调",
    (
        "Fine-tuning: 48,828 samples in batches of 128, several to a row of 2048 tokens, the"
        " loss on the assistant's turns."
    ): ("微调：48,828 条样本，批大小 128，每行 2048 个 token 可容多条样本，损失仅计助手回合。"),
    "FlagPerf, training case aquila2_7b (Nvidia A800), results page": (
        "FlagPerf 训练用例 aquila2_7b（Nvidia A800）结果页"
    ),
    (
        "accumulation 4; each sample padded to 2048 tokens and the padding counted; the header"
        " was learned too, so the loss is not comparable"
    ): (f"梯度累积 4；{_LOSS}"),
    (
        "accumulation 8; each sample padded to 2048 tokens and the padding counted; the header"
        " was learned too, so the loss is not comparable"
    ): (f"梯度累积 8；{_LOSS}"),
    (
        "accumulation 16, global batch 128; each sample padded to 2048 tokens and the padding"
        " counted; the header was learned too, so the loss is not comparable"
    ): (f"梯度累积 16，全局批大小 128；{_LOSS}"),
    "GLM-large learns ReCoRD until its accuracy is 0.8": "GLM-large 在 ReCoRD 上训练至准确率 0.8",
    (
        "Training to a target: a cloze whose candidates are the entities of a passage,"
        " evaluated every 19,200 samples."
    ): ("训练至目标：以文中实体为候选的完形填空，每 19,200 条样本评估一次。"),
    "FlagPerf, training case glm (Nvidia A100), results page": (
        "FlagPerf 训练用例 glm（Nvidia A100）结果页"
    ),
    (
        "batch 8 a device; MFU: 6 x 335e6 x 512 FLOPs a sample, whatever the number of its"
        " candidates, over the TF32 peak of 156 TFLOP/s"
    ): (
        "每卡批大小 8；MFU 按每样本 6 x 335e6 x 512 FLOPs 计算，不论候选数，峰值取 TF32 的 156"
        " TFLOP/s"
    ),
    "batch 16 a device; MFU counted as in the first row": "每卡批大小 16；MFU 口径同第一行",
    "batch 16; no accuracy is stated; MFU counted as in the first row": (
        "批大小 16；未给出准确率；MFU 口径同第一行"
    ),
    "batch 8 a device; MFU counted as in the first row": "每卡批大小 8；MFU 口径同第一行",
    "Llama-1-13B learns OpenWebText": "Llama-1-13B 在 OpenWebText 上预训练",
    "Llama-1-7B learns OpenWebText": "Llama-1-7B 在 OpenWebText 上预训练",
    (
        "Training from random weights: 100 steps of 2048 rows of 2048 tokens, documents packed"
        " across rows."
    ): ("从随机权重开始训练：100 步，每步 2048 行，每行 2048 个 token，文档跨行拼接。"),
    "FlagPerf, training case llama1 (Nvidia A100), results page": (
        "FlagPerf 训练用例 llama1（Nvidia A100）结果页"
    ),
    **{
        f"micro-batch {micro}, accumulation {steps}, {again}; global batch 4 Mi tokens": (
            f"micro-batch {micro}，梯度累积"
            f" {steps}，{'不' if again == 'no recompute' else ''}重计算；全局批大小 4 Mi token"
        )
        for micro, steps, again in (
            *(
                (2, 128, "recompute"),
                (2, 256, "recompute"),
                (2, 1024, "recompute"),
                (4, 512, "recompute"),
            ),
            *((4, 64, "no recompute"), (4, 128, "no recompute"), (4, 512, "no recompute")),
        )
    },
    "Llama-2-7B answers MMLU, 5-shot": "Llama-2-7B 回答 MMLU，5-shot",
    (
        "Prefill only: every prompt of MMLU's 57 test subjects goes through the model once, and"
        " the next token is the answer."
    ): ("仅预填充：MMLU 57 个学科测试集的每个提示经过模型一次，下一个 token 即为答案。"),
    "FlagPerf, inference case llama2_7b_mmlu (Nvidia A100), results page": (
        "FlagPerf 推理用例 llama2_7b_mmlu（Nvidia A100）结果页"
    ),
    "counted as 2 x 7e9 FLOPs per token over 312 TFLOP/s": (
        "按每 token 2 x 7e9 FLOPs、312 TFLOP/s 计算"
    ),
    "83 TFLOP/s, over four times the A100's fp32 peak: it can only be TF32; MFU over 156 TFLOP/s": (
        "83 TFLOP/s，超过 A100 的 fp32 峰值四倍以上，只可能是 TF32；MFU 按 156 TFLOP/s 计算"
    ),
}
