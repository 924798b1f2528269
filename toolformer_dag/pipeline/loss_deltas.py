"""loss_deltas: score each call by how much its result helps to predict the text (paper, section 2, "Filtering")."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    CALL_KEY,
    MADE_BY_FIELD,
    SCORED_COLUMNS,
    TEXT_KEY,
    ByChunk,
    ClaimedKeys,
    Column,
    PartRows,
    Planned,
    Stage,
    TableOutput,
    count_rejected_rows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline.chained_candidates import OFFSET_IN_TEXT_COLUMN, find_units_ahead, read_calls_with_results
from toolformer_dag.pipeline.losses import (
    LOSSES_FINITE_CHECK,
    collect_losses_settings,
    compute_losses,
    plan_losses,
    with_losses,
)
from toolformer_dag.settings.tool_settings import RULE_SOURCE
from toolformer_dag.texts import look_ahead
from toolformer_dag.tools.tool import Tool, wrap_tool_errors


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the rows depend on, apart from calls and results."""
    rule = look_ahead.LOOK_AHEAD_VERSION if lane.rejects_look_ahead else None
    # All options of the tool count, since `Tool.keeps` may read any of them.
    return {**collect_losses_settings(plan, lane), **collect_tool_settings(lane), "look_ahead": rule}


def collect_tool_settings(lane: Lane) -> Mapping[str, Any]:
    """Return what determines which calls a lane's tool keeps out: its version and options."""
    settings = {"version": lane.tool.version, "identity": lane.compute_tool_identity()}
    reasons_version = lane.tool.kept_out_version
    if not reasons_version:
        return settings
    return {**settings, "kept_out": reasons_version}


def chunks(worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys) -> Planned:
    """Plan the losses of the calls of a shard and of their echoes, as far as they are not stored yet.

    An echo is the same call with another result (see `_CallsOfShard`).

    Args:
        claimed_keys: The losses that earlier shards of this run compute already. The newly planned ones are added.
    """
    texts = output.get_lane_table("heuristic_subset").read_part(shard)
    calls_of_shard = _read_calls_of_shard(output, shard, texts)
    calls_and_echoes = pl.concat([calls_of_shard.scorable_calls, calls_of_shard.echo_calls])
    return plan_losses(worker, output, calls_and_echoes, texts, claimed_keys)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Score the calls of a shard from the stored losses.

    The score of a call is delta: how much the call's result lowers the loss of the text.

    Returns:
        A row per candidate call that has a result. Its column `reason` says why the call may not stay whatever its
        delta, and is null for the others. The reason comes from `_build_unfit_reason` (for calls that are not scored),
        from the model (does_not_fit, not_finite) or from the tool.
    """
    texts = output.get_lane_table("heuristic_subset").read_part(shard)
    calls_of_shard = _read_calls_of_shard(output, shard, texts)
    calls_with_losses = with_losses(worker, output, calls_of_shard.scorable_calls)

    # An echo is a call with another result: what the tool returns for the very words that the text says after the
    # call. Its loss shows whether these words alone would help as much.
    echoes_with_losses = with_losses(worker, output, calls_of_shard.echo_calls)
    scored_calls = _with_echo_deltas(calls_with_losses.calls, echoes_with_losses.calls)

    return build_scored_rows(
        output,
        texts,
        scored_calls=scored_calls,
        unscored_calls=calls_of_shard.unscorable_calls,
        store_names=calls_with_losses.store_names,
    )


class _CallsOfShard(NamedTuple):
    """The single calls of a shard that have a result, in the columns of `_read_calls_with_unfit_reason`.

    A rule that proposes a call because the text says "Paris" after it may have chosen the input for that word. So the
    call has an echo: the same call with the tool's result for "Paris" itself.

    Attributes:
        scorable_calls: The calls without a reason in `unfit`.
        echo_calls: The echoes of the scorable calls that have one.
        unscorable_calls: The calls with a reason in `unfit`.
    """

    scorable_calls: pl.DataFrame
    echo_calls: pl.DataFrame
    unscorable_calls: pl.DataFrame


def _read_calls_of_shard(output: TableOutput, shard: str, texts: pl.DataFrame) -> _CallsOfShard:
    """Return the calls of a shard, parted into those that can be scored, their echoes, and the others.

    The echo of a call that a rule proposed because of a word after it, such as "Paris", is the same call with the
    tool's result for "Paris" itself. Echoes are no calls of the table and are not among the scorable calls.

    Args:
        texts: The texts of the shard.
    """
    calls = _read_calls_with_unfit_reason(output, shard, texts)
    is_fit = pl.col("unfit").is_null()
    scorable_calls = calls.filter(is_fit)
    return _CallsOfShard(
        scorable_calls=scorable_calls,
        echo_calls=_select_echoes(scorable_calls),
        unscorable_calls=calls.filter(~is_fit),
    )


def _with_echo_deltas(scored_calls: pl.DataFrame, scored_echoes: pl.DataFrame) -> pl.DataFrame:
    """Add the column `echo`: by how many nats the echo of a call lowers the loss. It is null for a call without one."""
    echo_losses = scored_echoes.select(*CALL_KEY, loss_echo="loss_result")
    calls_with_echo_losses = scored_calls.join(echo_losses, on=CALL_KEY, how="left", maintain_order="left")

    loss_without_result = pl.min_horizontal("loss_empty", "loss_call")  # L- in the paper
    return calls_with_echo_losses.with_columns(echo=loss_without_result - pl.col("loss_echo"))


def build_scored_rows(
    output: TableOutput,
    texts: pl.DataFrame,
    *,
    scored_calls: pl.DataFrame,
    unscored_calls: pl.DataFrame,
    store_names: Sequence[str],
) -> PartRows:
    """Build the rows of a table of scores, either for single calls or for chains of calls.

    Args:
        texts: The texts of the calls, in the columns text_digest and text.
        scored_calls: Calls in the columns CALL_COLUMNS, with their losses and `reason`: why the model gave no
            losses, null for most calls.
        unscored_calls: Calls that have no losses, with `unfit`: why they were not scored.
        store_names: The names of the row stores that the losses come from.

    Returns:
        A row per call, in the order of CALL_KEY. Its `reason` says why the call may not stay, and is null for most.
    """
    reasons_of_tools = _ask_tools_for_reasons(output.lane, texts, scored_calls)
    # The model's reason comes before the tool's.
    with_reasons = scored_calls.with_columns(reason=pl.coalesce("reason", reasons_of_tools))
    without_scores = unscored_calls.with_columns(reason=pl.col("unfit"))

    all_calls = pl.concat([with_reasons, without_scores], how="diagonal")
    call_rows = output.stage.shape_frame(all_calls).sort(CALL_KEY)

    return PartRows(
        frames=[call_rows],
        rejection_counts=count_rejected_rows(call_rows),
        store_names=store_names,
        # Chains name this stage too, so that rejected single calls and rejected chains are counted together.
        record_fields={MADE_BY_FIELD: STAGE.name},
    )


def _ask_tools_for_reasons(lane: Lane, texts: pl.DataFrame, calls: pl.DataFrame) -> pl.Series:
    """Ask each call's tool whether the call may stay.

    Args:
        calls: The calls, in the columns CALL_COLUMNS. `called` is the key of the lane (a tool with its settings)
            whose tool is called.
        texts: The texts of the calls, in the columns text_digest and text.

    Returns:
        For each call the reason why it may not stay, however much it helps. It is null for most calls.

    Raises:
        ToolDown: The code of a tool fails.
    """
    text_by_digest = dict(texts.select("text_digest", "text").iter_rows())
    tool_by_lane = {called_lane.key: called_lane.tool for called_lane in lane.chainable_lanes_by_name.values()}

    reasons = []
    call_fields = calls.select("called", "text_digest", OFFSET_IN_TEXT_COLUMN, "input")
    for lane_key, text_digest, offset_in_text, input in call_fields.iter_rows():
        tool = tool_by_lane[lane_key]
        text = text_by_digest[text_digest]
        reasons.append(_ask_tool_for_reason(tool, text, offset_in_text, input))
    return pl.Series(reasons, dtype=pl.String)


def _ask_tool_for_reason(tool: Tool, text: str, offset: int, input: str) -> str | None:
    """Return why a tool keeps a call out that stands before a character of its text. None if the call may stay.

    Raises:
        ToolDown: The code of the tool fails.
    """
    with wrap_tool_errors(tool, "keeps"):
        return tool.kept_out(text, offset, input)


def _read_calls_with_unfit_reason(output: TableOutput, shard: str, texts: pl.DataFrame) -> pl.DataFrame:
    """Read the single calls of a shard that have a result, and find out which of them cannot be scored.

    Args:
        texts: The texts of the shard.

    Returns:
        The calls in the columns CALL_COLUMNS and three more:
        - echoed: the tool's result for the words that a rule saw in the text after the call
        - ahead: numbers and names of the call's input that the text has only after the call
        - unfit: why the call is not scored, null for most
    """
    calls = read_calls_with_results(output, shard, level=1)  # level 1: calls that do not follow other calls
    echoed_results = _read_echoed_results(output, shard)
    calls = calls.join(echoed_results, on=("words", "context"), how="left", maintain_order="left")
    calls = calls.with_columns(ahead=find_units_ahead(output.lane, texts, calls))

    # The reason is computed from `echoed`, `ahead` and other columns.
    return calls.with_columns(unfit=_build_unfit_reason())


def _read_echoed_results(output: TableOutput, shard: str) -> pl.DataFrame:
    """Return (context, words, echoed): the tool's results, under the name of an echo, for inputs that are words.

    The echo of [Search(capital of France)] for the word "Paris" is the result of [Search(Paris)].
    """
    results = output.get_lane_table("tool_results").read_part(shard)
    return results.select("context", words="input", echoed="result")


def _build_unfit_reason() -> pl.Expr:
    """Build an expression that says why a call cannot be scored.

    A rule may propose [Search(capital of France)] because the text says "Paris" after it: these are its `words`. Any
    result that holds "Paris" may help. So the call's result is compared with another one that holds it: that of the
    echo [Search(Paris)], in the column `echoed`. Without two different results with the words, it cannot be scored.

    Returns:
        An expression for the first reason that applies to a call, null if none does.
    """
    has_different_echo = _contains_rule_words("echoed") & (pl.col("echoed") != pl.col("result"))

    # If a call has no words, the conditions on words are null, which counts as false.
    condition_by_reason = {
        "looks_ahead": pl.col("ahead").is_not_null(),  # the input names what the text has only after the call
        "words_not_held": ~_contains_rule_words("result"),  # the result does not contain the words
        "no_echo": ~has_different_echo,  # there is no other result with the words to compare with
        "same_result": _is_repeated_rule_result(),  # a call that a rule proposed here has it already
    }
    return pl.coalesce(pl.when(applies).then(pl.lit(reason)) for reason, applies in condition_by_reason.items())


def _contains_rule_words(result_column: str) -> pl.Expr:
    """Return an expression: whether the result in a column holds the `words` that a rule saw, in any case.

    It is null for a call without words.
    """
    lower_result = pl.col(result_column).fill_null("").str.to_lowercase()
    return lower_result.str.contains(pl.col("words").str.to_lowercase(), literal=True)


def _is_repeated_rule_result() -> pl.Expr:
    """Build an expression that tells whether a call only repeats the result of a call that a rule proposed.

    Only calls at the same position are compared. The calls of a rule are numbered -1, -2, -3, ... in the column
    `sample`. If their results are "7", "7" and "9", only call -2 is a repetition. A call that the model sampled is one
    too if its result is "7".

    Returns:
        The expression. It is null if no rule proposed a call with the same result.
    """
    is_by_rule = pl.col("source") == RULE_SOURCE
    same_result_here = (*TEXT_KEY, "position", "result")

    # The numbers go down from -1, so the largest number is that of the first call.
    first_by_rule = pl.when(is_by_rule).then("sample").max().over(same_result_here)
    return pl.col("sample") != first_by_rule


def _select_echoes(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the calls that a rule proposed for words of the text, with the result of their echo as `result`."""
    return calls.filter(pl.col("words").is_not_null()).with_columns(result="echoed")


AHEAD_COLUMN = Column(pl.List(pl.String()), "units of the input that the text has only after the call; null for most")
STAGE = Stage(
    name="loss_deltas",
    description="The three losses and their delta for every call with a result, kept or not (paper, section 2).",
    columns={**SCORED_COLUMNS, "ahead": AHEAD_COLUMN},
    key_columns=CALL_KEY,
    collect_settings=settings,
    reads=("heuristic_subset", "scored_candidates", "tool_results"),
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    checks={"losses_finite": LOSSES_FINITE_CHECK},
    row_maker=ByChunk(chunks, compute_losses, rows),
)
