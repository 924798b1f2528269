"""`judge --estimate`: what judging will cost, with 95 % intervals."""

from toolformer_dag.cli.forecast import time_line, written
from toolformer_dag.computing.workers import worker_count
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces.judging_forecast import JudgingForecast


def forecast_text(forecast: JudgingForecast, settings: Settings) -> str:
    """Return a forecast for people."""
    judged = f"{forecast.to_judge:,} of them to judge"
    counts = f"{forecast.conversations:,} conversations, {forecast.calls:,} calls, {judged}"
    if not forecast.to_judge:
        return f"{counts}. Nothing is left to judge."
    if not forecast.sampled:
        return f"{counts}: too few to tell what they cost."
    losses = written(forecast.losses, "{:,.0f}".format)
    tokens = written(forecast.tokens, "{:,.0f}".format)
    return "\n".join(
        (
            f"{counts}; {forecast.sampled:,} were judged for this forecast.",
            f"Losses still to compute: {losses}, {losses_per_call(forecast):.1f} a call",
            f"Tokens still to compute: {tokens}",
            time_line(forecast.seconds, worker_count(settings)),
            f"The sample took {forecast.spent:,} tokens; `judge` reuses its losses.",
        )
    )


def losses_per_call(forecast: JudgingForecast) -> float:
    """Return how many losses a call takes: it is read without its result, with it and with those of others."""
    return forecast.losses.value / max(1, forecast.to_judge - forecast.sampled)
