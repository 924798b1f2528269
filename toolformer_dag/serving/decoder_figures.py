"""The metrics of a server, for Prometheus: requests, texts, tokens and calls."""

from collections.abc import Collection, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from toolformer_dag.decoding.generation import Generation


class DecoderFigures:
    """The counts of one server; `registry` holds its own Prometheus metrics alone.

    | metric | labels |
    |---|---|
    | requests | `path`: as "/v1/completions"; `status`: the HTTP status |
    | texts now | `state`: "open" for all, and of these "waiting" for a batch or "calling" a tool |
    | tokens of finished texts | `kind`: "prompt" or "written" |
    | seconds of calls | `tool`: its name; `got`: "result", "lost" (the tool did not answer) or "none" (it had none) |
    """

    def __init__(self) -> None:
        """Register the metrics of a server, without any counts yet."""
        self.registry = CollectorRegistry()
        # path: as "/v1/completions". status: the HTTP status.
        self._requests = Counter(
            "toolformer_requests", "Requests, by status.", ["path", "status"], registry=self.registry
        )
        # state: "open" for all texts, and of these "waiting" for a batch or "calling" a tool.
        self._texts = Gauge(
            "toolformer_texts", "Texts now: open; waiting, calling among them.", ["state"], registry=self.registry
        )
        # kind: "prompt" or "written".
        self._tokens = Counter("toolformer_tokens", "Tokens of finished texts.", ["kind"], registry=self.registry)
        # tool: its name. got: "result", "lost" (the tool did not answer) or "none" (it had no result).
        self._calls = Histogram(
            "toolformer_call_seconds", "Seconds that texts waited.", ["tool", "got"], registry=self.registry
        )

    def show_texts(self, texts_by_state: Mapping[str, Collection[object]]) -> None:
        """Report the size of each collection, by state, as it is whenever the metrics are read."""
        for state, texts in texts_by_state.items():
            self._texts.labels(state).set_function(texts.__len__)

    def count_request(self, path: str, status: int) -> None:
        """Count an answered request."""
        self._requests.labels(path, status).inc()

    def count_text(self, prompt_tokens: int, generation: Generation) -> None:
        """Count the tokens of a finished text."""
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("written").inc(generation.tokens)

    def count_call(self, tool: str, seconds: float, *, has_result: bool, lost: bool) -> None:
        """Count an answered call and the seconds that its text waited for it.

        `lost`: the tool gave no answer at all, for example within its time limit.
        """
        if has_result:
            got = "result"
        elif lost:
            got = "lost"
        else:
            got = "none"
        self._calls.labels(tool, got).observe(seconds)
