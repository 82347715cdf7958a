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
    "ttft_mean": (
        "TTFT, mean",
        (
            "time to the first token, from the scheduled time of the request to the first "
            "chunk with a token; mean over the requests of the window"
        ),
    ),
    "ttft_p50": (
        "TTFT, p50",
        (
            "time to the first token, from the scheduled time of the request to the first "
            "chunk with a token; median over the requests of the window"
        ),
    ),
    "ttft_p90": (
        "TTFT, p90",
        (
            "time to the first token, from the scheduled time of the request to the first "
            "chunk with a token; 90th percentile over the requests of the window"
        ),
    ),
    "ttft_p99": (
        "TTFT, p99",
        (
            "time to the first token, from the scheduled time of the request to the first "
            "chunk with a token; 99th percentile over the requests of the window"
        ),
    ),
    "ttft_sent_p50": (
        "TTFT from sending, p50",
        (
            "time to the first token, from when the request was sent; median over the requests "
            "of the window"
        ),
    ),
    "ttft_sent_p90": (
        "TTFT from sending, p90",
        (
            "time to the first token, from when the request was sent; 90th percentile over the "
            "requests of the window"
        ),
    ),
    "ttft_sent_p99": (
        "TTFT from sending, p99",
        (
            "time to the first token, from when the request was sent; 99th percentile over the "
            "requests of the window"
        ),
    ),
    "tpot_mean": (
        "TPOT, mean",
        (
            "time per output token after the first: (last − first token) / (n − 1) of each "
            "request; mean over the requests of the window"
        ),
    ),
    "tpot_p50": (
        "TPOT, p50",
        (
            "time per output token after the first: (last − first token) / (n − 1) of each "
            "request; median over the requests of the window"
        ),
    ),
    "tpot_p90": (
        "TPOT, p90",
        (
            "time per output token after the first: (last − first token) / (n − 1) of each "
            "request; 90th percentile over the requests of the window"
        ),
    ),
    "tpot_p99": (
        "TPOT, p99",
        (
            "time per output token after the first: (last − first token) / (n − 1) of each "
            "request; 99th percentile over the requests of the window"
        ),
    ),
    "chunk_gap_p50": (
        "Chunk gap, p50",
        (
            "time between two chunks of a request that carry tokens; median over all chunks of "
            "the window's requests"
        ),
    ),
    "chunk_gap_p90": (
        "Chunk gap, p90",
        (
            "time between two chunks of a request that carry tokens; 90th percentile over all "
            "chunks of the window's requests"
        ),
    ),
    "chunk_gap_p99": (
        "Chunk gap, p99",
        (
            "time between two chunks of a request that carry tokens; 99th percentile over all "
            "chunks of the window's requests"
        ),
    ),
    "e2e_p50": (
        "Request time, p50",
        (
            "time of a request, from its scheduled time to its end; median over the requests "
            "of the window"
        ),
    ),
    "e2e_p90": (
        "Request time, p90",
        (
            "time of a request, from its scheduled time to its end; 90th percentile over the "
            "requests of the window"
        ),
    ),
    "e2e_p99": (
        "Request time, p99",
        (
            "time of a request, from its scheduled time to its end; 99th percentile over the "
            "requests of the window"
        ),
    ),
    "queue_delay_p50": (
        "Queue delay, p50",
        (
            "time that a request waits in the client, from its scheduled time until it is "
            "sent; median over the requests of the window"
        ),
    ),
    "queue_delay_p90": (
        "Queue delay, p90",
        (
            "time that a request waits in the client, from its scheduled time until it is "
            "sent; 90th percentile over the requests of the window"
        ),
    ),
    "queue_delay_p99": (
        "Queue delay, p99",
        (
            "time that a request waits in the client, from its scheduled time until it is "
            "sent; 99th percentile over the requests of the window"
        ),
    ),
    "output_tokens_per_s": (
        "Output tokens per second",
        "output tokens that arrive in the window / its length, all devices together",
    ),
    "tokens_per_s": (
        "Tokens per second",
        (
            "prompt and output tokens that arrive in the window / its length; a prompt arrives "
            "with its first output token"
        ),
    ),
    "interactivity": (
        "Interactivity",
        "output tokens per second that one user sees after the first: 1 / mean TPOT",
    ),
    "goodput": (
        "Goodput",
        (
            "requests of the window that keep all limits of the case / its length; a failed or "
            "too short one keeps none"
        ),
    ),
    "mfu_prefill": ("Prefill MFU", "model FLOPs of prefill (causal) / its time / datasheet peak"),
    "mbu": (
        "Decode MBU",
        "bytes of weights and KV cache that decoding must read / its time / datasheet bandwidth",
    ),
    "energy_per_output_token": (
        "Energy per output token",
        "energy of all devices in the window / output tokens that arrive in it",
    ),
    "energy_prefill_per_token": (
        "Prefill energy per token",
        "energy of stretches of prefill / their prompt tokens",
    ),
    "energy_decode_per_token": (
        "Decode energy per token",
        "energy of stretches of decoding / their output tokens",
    ),
    "window_requests": ("Requests of the window", "requests issued in the window"),
    "ramp_time": ("Ramp-up", "time from the first request to the steady part"),
    "drain_time": ("Drain", "time from the end of the steady part to the last end of a request"),
}
TEXTS: dict[str, str] = {
    "data.generate": "Prompts",
    "tool.generate": "Serving engine",
    "metric.no_window": (
        "the requests are too few for a window (send more: --sample N), or none was answered"
    ),
    "metric.not_counted": (
        "in division open, and where an engine does not count it, it is unknown what was computed"
    ),
    "metric.other_definition": "it was measured by definition {stated}; this version knows {known}",
    "metric.no_tokens_after_first": "no request of the window has a second chunk of tokens",
    "metric.no_slo": "the case states no limits (slo)",
    "metric.no_bandwidth": "the datasheet row of {row} has no memory bandwidth",
    "metric.no_decode_bytes": (
        "the weights that a model of family {family} reads in a step are unknown"
    ),
    "metric.not_seen": "the server was not started here, and its hardware is only declared",
    "percentile.few": "needs {least:,} requests, the window has {count:,}",
    "percentile.of": "over {count:,} requests; bound by LoadGen's early stopping {bound:.4g} s",
    "percentile.of_chunks": "over {chunks:,} gaps of {count:,} requests",
    "mean.of": "over {count:,} requests",
    "goodput.of": "{good:,} of {count:,} requests keep all limits",
    "phase.prefill": "prefill",
    "phase.decode": "decoding",
    "phase.steps": "convention {convention}, over {time:.4g} s of the engine's steps",
    "phase.requests": (
        "convention {convention}, over {time:.4g} s of the requests, which came one at a time"
    ),
    "phase.mixed": "no step of the window has {phase} alone",
    "phase.unknown": (
        "the engine does not tell prefill from decoding, and several requests ran together"
    ),
    "phase.chunks": (
        "no request has a second token in a second chunk, or all first chunks have several"
    ),
    "phase.short": (
        "no stretch of {phase} alone lasts {least:.2g} s, so that telemetry could see it"
    ),
    "phase.stretches": "from {count} stretch(es) of one phase alone",
    "window.concurrency": (
        "window: requests {first} to {last} ({count}), issued from {begin:.3f} s to {end:.3f} "
        "s: after the end of every request of the first wave, up to the last one that is issued"
    ),
    "window.rate": (
        "window: requests {first} to {last} ({count}), issued from {begin:.3f} s to {end:.3f} "
        "s: after the first mean time of a request, up to the last arrival"
    ),
    "window.offline": (
        "window: the whole pass, requests {first} to {last} ({count}), from {begin:.3f} s to "
        "{end:.3f} s; {ramp:.3f} s until the first one ended, {drain:.3f} s after the last one "
        "began"
    ),
    "check.no_requests.bad": "{pass}: the record has no request samples",
    "check.requests.ok": "all {count:,} requests ended regularly",
    "check.requests.bad": (
        "{bad:,} of {count:,} requests did not end regularly: {outcomes}; {error}"
    ),
    "requests.outcome": "{count:,} {outcome}",
    "outcome.ok": "ended regularly",
    "outcome.refused": "refused",
    "outcome.cut": "cut off",
    "outcome.garbage": "not understood",
    "outcome.empty": "without any token",
    "outcome.flooded": "with more than any right answer has",
    "outcome.timeout": "timed out",
    "outcome.unreachable": "without a connection",
    "outcome.failed": "failed",
    "outcome.missing": "missing",
    "requests.no_error": "no error text was kept",
    "requests.first_error": "the first error: {error}",
    "requests.refused_end": (
        "the first error: {error}; if the server cannot ignore its end-of-text token, set "
        "question.data.lengths=natural"
    ),
    "check.lengths_exact.ok": "all {count:,} answers have exactly as many tokens as were asked for",
    "check.lengths_exact.bad": (
        "{bad:,} of {count:,} answers have another number of tokens than asked: request "
        "{first} has {got:,} of {asked:,}"
    ),
    "check.lengths_natural.ok": (
        "all {count:,} answers have at most as many tokens as were asked for"
    ),
    "check.lengths_natural.bad": (
        "{bad:,} of {count:,} answers are longer than asked: request {first} has {got:,} "
        "tokens of {asked:,}"
    ),
    "check.question_lengths.ok": "the lengths of the requests are those of the question",
    "check.question_lengths.bad": "the requests have other lengths than the question: {fields}",
    "check.token_counts.ok": "the counts of tokens agree; they were counted {how}",
    "check.token_counts.bad": "tokens were counted {how}: {problem}",
    "counted.ids": "by their ids",
    "counted.usage": "by the server's usage",
    "counted.chunks": "by chunks",
    "counted.nothing": (
        "the server says neither the ids of tokens nor how many there are, and a chunk may "
        "carry any number"
    ),
    "counted.prompts": (
        "the server counts {theirs:,} tokens in the prompt of request {first}; {ours:,} were sent"
    ),
    "counted.outputs": (
        "request {first}: the server's usage counts {theirs:,} output tokens, and its chunks carry"
        " {ours:,}"
    ),
    "counted.answers": (
        "the answer of request {first} was kept with {kept:,} tokens, and {total:,} were counted"
    ),
    "counted.text": (
        "the generated texts have {text:,} tokens by the model's tokenizer, and {total:,} were "
        "counted"
    ),
    "check.cold_cache.ok": (
        "the server took {cached:,} tokens of the prompts from its cache ({share:.1%}), within "
        "the allowed {most:.0%}"
    ),
    "check.cold_cache.bad": (
        "the server took {cached:,} tokens of the prompts from its cache ({share:.1%}); at "
        "most {most:.0%} is allowed"
    ),
    "check.salted.bad": (
        "the salt of the prompts has {digits} hex digits; 16 are needed for a cache to be cold"
    ),
    "note.cache_unknown": (
        "the server does not say how many prompt tokens it took from a cache; all prompts were new"
    ),
    "check.client.ok": "the client kept up: {what}",
    "check.client.bad": "the client did not keep up: {what}",
    "client.late": (
        "requests were sent {late:.2f} ms later than they were due, on the mean; the limit is "
        "{most:.2f} ms"
    ),
    "client.lag": (
        "its loop woke up {lag:.2f} ms late (99th percentile); the limit is {most:.2f} ms"
    ),
    "client.mock": (
        "it stamped chunks of a mock server {error:.2f} ms late (99th percentile); the limit "
        "is {most:.2f} ms"
    ),
    "client.cpu": "it used {share:.0%} of a core; the limit is {most:.0%}",
    "note.client_slow": "the client did not keep up: {what}",
    "note.bursts": (
        "{share:.0%} of the chunks came within {gap:.2g} s of the one before, in bursts: TPOT and "
        "interactivity are not those of tokens"
    ),
    "note.no_client_facts": "the record does not say how well the client kept up",
    "check.steady.ok": (
        "latencies are steady: {name} has a median of {first:.4g} s in the first third of the "
        "requests and of {last:.4g} s in the last"
    ),
    "check.steady.bad": (
        "no part of the run is steady: {name} has a median of {first:.4g} s in the first third "
        "of the requests and of {last:.4g} s in the last; the load may be beyond what the "
        "server can do, or the run too short"
    ),
    "check.no_steady_window.bad": (
        "no part of the run is steady: of {count:,} requests fewer than three were issued after "
        "the first {slots} had all ended; one of these took too long"
    ),
    "note.trace": "requests arrive by a trace, which is as steady as it is",
    "check.possible_requests.ok": (
        "the times of the requests agree with each other and with the load"
    ),
    "check.possible_requests.bad": "the times of the requests cannot be true: {problem}",
    "possible.end": "a request ends at {last:.3f} s, and the pass at {wall:.3f} s",
    "possible.in_flight": "{most:,} requests were in flight at a time, and the load has {slots:,}",
    "possible.schedule": (
        "request {first} is scheduled at {stated:.4f} s; by the load it is at {asked:.4f} s"
    ),
    "possible.due": "request {first} is due at {due:.4f} s, when a slot had been free for it",
    "check.answers.ok": (
        "{requests:,} answers were checked: {exact:.1%} of the tokens are the likeliest, none "
        "is farther than {largest:.3g} nats from it, within the {limit} nats allowed in "
        "{precision}"
    ),
    "check.answers.bad": (
        "{requests:,} answers were checked: {exact:.1%} of the tokens are the likeliest, and "
        "one is {largest:.3g} nats from it; {precision} allows {limit} nats"
    ),
    "check.answers_exact.bad": (
        "{requests:,} answers were checked: only {exact:.1%} of the tokens are the likeliest; "
        "batch noise in {precision} leaves at least {least:.0%}"
    ),
    "check.answers_not_finite.bad": (
        "{requests:,} answers were checked, and the reference has a logit that is not finite"
    ),
    "check.answers_left.bad": "{compared:,} tokens were checked, and {kept:,} were kept for it",
    "check.unchecked.bad": (
        "no answer was checked: run pass `check` too, send prompts as token ids or plain text "
        "(engine.api=completions), or ask for the server's log-probabilities "
        "(--set engine.logprobs=true)"
    ),
    "check.own_logprobs.bad": (
        "the server's log-probabilities cover {covered:,} answers whole; {least:,} are a tenth of "
        "the requests, and {partly:,} more are covered in part"
    ),
    "note.client_not_measured": (
        "the error of this client's stamps is unknown: it could not be measured on the mock server"
    ),
    "note.weights_unknown": (
        "the answers were not checked: the weights of the server are unknown here"
    ),
    "note.own_logprobs": (
        "the answers were compared by the log-probabilities that the server itself reports"
    ),
    "check.few_checked.bad": (
        "only {checked:,} answers were checked; {least:,} are a tenth of the requests"
    ),
    "note.declared": (
        "the server was not started here; that it runs on {device} is declared, not seen"
    ),
    "note.undeclared": (
        "the server was not started here, and nothing is declared of its hardware (engine.device)"
    ),
    "check.no_window.bad": (
        "the requests are too few for a window; send {least:,} or more (--sample N), or run three "
        "repeats (--repeat 3)"
    ),
    "check.no_steady_part.bad": (
        "an interval of an offline run needs requests that wait, {least} turns of them, for a "
        "server that runs fewer at a time; send more (--sample N), or run three repeats "
        "(--repeat 3)"
    ),
    "check.few_turns.bad": (
        "the window has {count} turns of the load, which are as many requests each as run "
        "together; at least {least} are needed to prove the rate: send more (--sample N), or run "
        "three repeats (--repeat 3)"
    ),
    "items.request": "requests",
    "unit.requests/s": "requests/s",
    "unit.requests/J": "requests/J",
    "unit.J/request": "J/request",
}
