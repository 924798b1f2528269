"""The metrics of a server, for Prometheus: requests, texts, tokens and calls."""

from collections.abc import Collection, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from toolformer_dag.decoding.generation import Generation


class DecoderFigures:
    """The counts of one server, as metrics for Prometheus.

    `registry` holds the metrics of this server alone.

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

        # path: such as "/v1/completions". status: the HTTP status.
        self._request_counter = Counter(
            "toolformer_requests", "Requests, by status.", ["path", "status"], registry=self.registry
        )

        # state: "open" for all texts, and of these "waiting" for a batch or "calling" a tool.
        self._text_gauge = Gauge(
            "toolformer_texts", "Texts now: open; waiting, calling among them.", ["state"], registry=self.registry
        )

        # kind: "prompt" or "written".
        self._token_counter = Counter(
            "toolformer_tokens", "Tokens of finished texts.", ["kind"], registry=self.registry
        )

        # tool: its name. got: "result", "lost" (the tool did not answer) or "none" (it had no result).
        self._call_seconds_histogram = Histogram(
            "toolformer_call_seconds", "Seconds that texts waited.", ["tool", "got"], registry=self.registry
        )

    def register_text_gauges(self, texts_by_state: Mapping[str, Collection[object]]) -> None:
        """Report how many texts are in each state.

        Args:
            texts_by_state: The texts by state, such as "open". The metrics show the size that each collection has
                whenever they are read, so the collections may change.
        """
        for state, texts in texts_by_state.items():
            # A method of the collection, which is called again at each reading.
            self._text_gauge.labels(state).set_function(texts.__len__)

    def count_request(self, path: str, status_code: int) -> None:
        """Count an answered request."""
        self._request_counter.labels(path, status_code).inc()

    def count_text(self, prompt_token_count: int, generation: Generation) -> None:
        """Count the tokens of a finished text."""
        self._token_counter.labels("prompt").inc(prompt_token_count)
        self._token_counter.labels("written").inc(generation.token_count)

    def count_call(self, tool_name: str, seconds: float, *, has_result: bool, is_lost: bool) -> None:
        """Count a call whose tool has answered or was given up, and the seconds that its text waited for it.

        Args:
            tool_name: The name of the tool.
            seconds: How long the text waited.
            has_result: Whether the call has a result.
            is_lost: Whether the tool gave no answer at all, for example because its time limit was over.
        """
        if has_result:
            got = "result"
        elif is_lost:
            got = "lost"
        else:
            got = "none"
        self._call_seconds_histogram.labels(tool_name, got).observe(seconds)
