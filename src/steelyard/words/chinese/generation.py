"""Chinese texts of generation: names and meanings of its metrics, texts of its checks and notes."""

MEANINGS: dict[str, tuple[str, str]] = {
    "score.exact_tokens": ("最可能 token 占比", "抽检的输出 token 中，参考引擎也认为最可能者的比例"),
    "score.answer_distance": ("答案偏差", "抽检的输出 token 与最可能 token 的最大差距（nat）"),
    "score.checked_requests": ("抽检请求数", "由参考引擎重新评分的请求数"),
}
TEXTS: dict[str, str] = {
    "data.generate": "提示词",
    "tool.generate": "推理服务引擎",
}
