"""What a server counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Figures:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("toolformer_requests", "Requests, by status.", ["path", "status"], registry=own)
        self.texts = Gauge("toolformer_texts", "Texts now: open; waiting, calling among them.", ["state"], registry=own)
        self.tokens = Counter("toolformer_tokens", "Tokens of finished texts.", ["kind"], registry=own)
        self.calls = Histogram("toolformer_call_seconds", "Seconds that texts waited.", ["tool", "got"], registry=own)
