"""English texts of pages about generation: loads and their curves, and the requests of a run."""

TEXTS: dict[str, str] = {
    "exact_tokens": "exact",
    "no_gate": "no gate",
    "terminal.compared": "* compared with the reference engine; this case sets no gate",
    "terminal.not_compared": (
        "* not compared with the reference engine in every run; this case sets no gate"
    ),
    "terminal.smoke": "Size smoke shows that a case runs; intervals are not judged.",
    "window.requests": "{0} requests",
    "verdict.loads": (
        "No verdict: each load is a question of its own; report --format html draws the curve."
    ),
    "column.load": "load",
    "column.load.short": "load",
    "column.ttft.short": "TTFT",
    "column.tpot.short": "TPOT",
    "column.percentiles": "p50/p90/p99",
    "load": "Load",
    "load.unknown": "No {0}: {1}.",
    "load.few": "needs {0} requests, the windows have {1} to {2}",
    "load.meaning.name": "Load",
    "load.meaning": (
        "how requests are sent, a part of the question: C16 is a closed loop of 16 slots, 8 req/s"
        " an open loop, offline all at once"
    ),
    "load.at": "{0} · {1}",
    "load.curve": "Throughput against interactivity",
    "load.curve.x": "interactivity: output tokens/s of one user",
    "load.curve.y": "output tokens/s per device",
    "load.ttft": "Time to first token against {0}",
    "load.tpot": "Time per output token against {0}",
    "load.concurrency": "requests in flight",
    "load.rate": "requests per second",
    "load.series": "{0}, {1}",
    "load.slo.ttft": "limit on TTFT: {0}",
    "load.slo.tpot": "limit on TPOT: {0}",
    "load.slo.interactivity": "limit on TPOT, {0}: at least {1} tokens/s",
    "load.point": "{0}, {1}: {2} output tokens/s per device at {3} tokens/s a user",
    "load.point.time": "{0}, {1}, {2}: {3}",
    "load.point.status": "{0} ({1})",
    "load.engine": "engine",
    "load.name": "load",
    "load.rate_column": "per device",
    "load.interactivity": "interactivity",
    "load.frontier": "on the steps",
    "load.frontier.yes": "yes",
    "load.frontier.no": "no",
    "load.goodput": "goodput",
    "load.requests": "requests",
    "load.requests.sub": "in the window",
    "load.status": "status",
    "load.all_values": "All values",
    "load.note": (
        "Each load is a question of its own with a key of its own; runs here differ in it alone."
        " Points are measured; nothing between them is interpolated: the steps show the highest"
        " throughput that was measured at this interactivity or a higher one. Hollow points are"
        " not valid or not proven, and no step. Interactivity: 1 / TPOT."
    ),
    "load.hollow": "hollow: not valid, or not proven",
    "why.requests": "requests failed or are missing",
    "why.short_output": "answers shorter than asked",
    "why.token_counts": "token counts disagree",
    "why.warm_cache": "warm cache",
    "why.client_bound": "client too slow",
    "why.unsteady": "no steady window",
    "why.unchecked": "answers not checked",
    "why.wrong_answers": "wrong answers",
    "summary.too_few_requests": (
        "Unproven, {0}: too few requests, and no three repeats that agree."
    ),
    "requests": "Requests",
    "requests.load": "Load",
    "requests.load.text": "{0}: {1}",
    "requests.load.offline": "all requests at once",
    "requests.load.concurrency": "closed loop, a request is scheduled when a slot is free",
    "requests.load.rate": "open loop, arrivals are fixed before the first request",
    "requests.limits": "Limits of goodput",
    "requests.lengths": "Lengths",
    "requests.lengths.exact": "exact: every answer has as many tokens as asked for",
    "requests.lengths.natural": (
        "natural: an answer ends where the model ends it; never compared with exact lengths"
    ),
    "requests.sent": "Requests",
    "requests.sent.text": "{0} planned, {1} answered, {2} output tokens",
    "requests.outcomes": "Outcomes",
    "requests.outcomes.count": "{0} {1}",
    "requests.error": "Error",
    "requests.window": "Window",
    "requests.window.text": "{0} requests",
    "requests.ramp": "Ramp-up",
    "requests.drain": "Drain",
    "requests.counted_by": "Tokens counted by",
    "requests.counted_by.ids": "their ids",
    "requests.counted_by.usage": "the server's usage",
    "requests.counted_by.chunks": "chunks: the server says nothing of tokens",
    "requests.salt": "Salt",
    "requests.salt.none": "none: prompts of other runs may be equal, and cached",
    "requests.client": "Client",
    "requests.client.lag": "woke up late by {0} (99th percentile), {1} at most",
    "requests.client.cpu": "{0} of a core",
    "requests.client.inside": "the engine worked in its process",
    "requests.client.mock": (
        "stamps on the mock server late by {0} (median), {1} (99th percentile), {2} at most, of {3}"
        " requests"
    ),
    "requests.device": "Device",
    "requests.checked": "Answers checked",
    "requests.checked.text": (
        "{0} requests by engine {1}: {2} of {3} tokens are the likeliest; the farthest is {4} nats"
        " from it"
    ),
    "requests.checked.none": "none",
    "requests.checker.unknown": "not recorded",
    "latencies": "Latencies",
    "latencies.name": "Time",
    "latencies.mean": "mean",
    "latencies.definition": "definition",
    "latencies.note": (
        "Below a number: its 95 % interval. All over the {0} requests of the window. An id changes"
        " when a definition does; times of different ids are never compared."
    ),
    "latency.ttft": "first token, from the schedule",
    "latency.ttft_sent": "first token, from sending",
    "latency.tpot": "each output token after the first",
    "latency.chunk_gap": "between chunks",
    "latency.e2e": "whole request, from the schedule",
    "latency.queue_delay": "schedule to sending",
    "unit.output tokens/s": "output tokens/s",
    "device.undeclared": "hardware not declared and not seen",
    "device.declared": "{0} (declared by the user, not seen)",
}
