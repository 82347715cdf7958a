"""English texts of generation: names and meanings of its metrics, texts of its checks and notes."""

MEANINGS: dict[str, tuple[str, str]] = {
    "score.exact_tokens": (
        "Likeliest tokens",
        "share of the checked output tokens that a reference engine finds likeliest too",
    ),
    "score.answer_distance": (
        "Distance of answers",
        "largest distance of a checked output token from the likeliest one, in nats",
    ),
    "score.checked_requests": (
        "Checked requests",
        "requests whose output tokens were scored again by a reference engine",
    ),
}
TEXTS: dict[str, str] = {
    "data.generate": "Prompts",
    "tool.generate": "Serving engine",
}
