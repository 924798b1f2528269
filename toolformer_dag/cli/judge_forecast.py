"""`judge --estimate`: what judging will cost, with 95 % intervals."""

from toolformer_dag.cli.forecast import format_range, format_time_line
from toolformer_dag.computing.workers import choose_worker_count
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces.judging_forecast import JudgingForecast


def format_judging_forecast(judging_forecast: JudgingForecast, settings: Settings) -> str:
    """Format a forecast as `judge --estimate` prints it: the numbers of calls, then what judging them will cost."""
    counts = (
        f"{judging_forecast.conversation_count:,} conversations, {judging_forecast.call_count:,} calls, "
        f"{judging_forecast.unjudged_call_count:,} of them to judge"
    )
    if not judging_forecast.unjudged_call_count:
        return f"{counts}. Nothing is left to judge."
    if not judging_forecast.sampled_call_count:
        return f"{counts}: too few to tell what they cost."

    sample_line = f"{counts}; {judging_forecast.sampled_call_count:,} were judged for this forecast."
    cost_lines = _format_cost_lines(judging_forecast, choose_worker_count(settings))
    return "\n".join((sample_line, *cost_lines))


def _format_cost_lines(judging_forecast: JudgingForecast, num_workers: int) -> list[str]:
    """Return the lines of a forecast that name costs: losses, tokens, time, and what the sample took already.

    Args:
        judging_forecast: The forecast, with a sample.
        num_workers: How many workers will share the time.
    """
    losses = format_range(judging_forecast.loss_count_range, "{:,.0f}".format)
    tokens = format_range(judging_forecast.token_count_range, "{:,.0f}".format)
    losses_per_call = compute_losses_per_call(judging_forecast)
    return [
        f"Losses still to compute: {losses}, {losses_per_call:.1f} a call",
        f"Tokens still to compute: {tokens}",
        format_time_line(judging_forecast.seconds_range, num_workers),
        f"The sample took {judging_forecast.sample_token_count:,} tokens; `judge` reuses its losses.",
    ]


def compute_losses_per_call(judging_forecast: JudgingForecast) -> float:
    """Return how many losses judging a call takes.

    The model reads a call several times: without its result, with it, and with results of other calls.
    """
    calls_left = judging_forecast.unjudged_call_count - judging_forecast.sampled_call_count
    return judging_forecast.loss_count_range.value / max(1, calls_left)
