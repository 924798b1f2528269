"""`judge --estimate`: what judging will cost, with 95 % intervals."""

from toolformer_dag.cli.forecast import format_range, format_time_line
from toolformer_dag.computing.workers import worker_count
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces.judging_forecast import JudgingForecast


def format_judging_forecast(forecast: JudgingForecast, settings: Settings) -> str:
    """Return a forecast as the lines that `judge --estimate` prints."""
    counts = (
        f"{forecast.conversations:,} conversations, {forecast.calls:,} calls, {forecast.to_judge:,} of them to judge"
    )
    if not forecast.to_judge:
        return f"{counts}. Nothing is left to judge."
    if not forecast.sampled:
        return f"{counts}: too few to tell what they cost."
    sampled = f"{counts}; {forecast.sampled:,} were judged for this forecast."
    return "\n".join((sampled, *_format_cost_lines(forecast, worker_count(settings))))


def _format_cost_lines(forecast: JudgingForecast, workers: int) -> list[str]:
    """Return a line each for losses, tokens, time and what the sample took."""
    losses = format_range(forecast.losses, "{:,.0f}".format)
    tokens = format_range(forecast.tokens, "{:,.0f}".format)
    return [
        f"Losses still to compute: {losses}, {compute_losses_per_call(forecast):.1f} a call",
        f"Tokens still to compute: {tokens}",
        format_time_line(forecast.seconds, workers),
        f"The sample took {forecast.spent:,} tokens; `judge` reuses its losses.",
    ]


def compute_losses_per_call(forecast: JudgingForecast) -> float:
    """Return how many losses a call takes: without its result, with it, and with results of other calls."""
    return forecast.losses.value / max(1, forecast.to_judge - forecast.sampled)
