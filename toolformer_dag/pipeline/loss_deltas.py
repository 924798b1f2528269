"""loss_deltas: score each call by how much its result helps to predict the text (paper, section 2, "Filtering")."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    CALL_KEY,
    MADE_BY,
    SCORED,
    TEXT_KEY,
    ByChunk,
    Claimed,
    Column,
    PartRows,
    Planned,
    Stage,
    TableOutput,
    count_by_reason,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline.chained_candidates import OFFSET_IN_TEXT, find_units_ahead, read_calls_with_results
from toolformer_dag.pipeline.losses import (
    LOSSES_FINITE,
    compute_losses,
    losses_settings,
    plan_losses,
    with_losses,
)
from toolformer_dag.settings.tool_settings import RULE
from toolformer_dag.texts import look_ahead
from toolformer_dag.tools.tool import Tool, blame_tool


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the rows depend on, apart from calls and results."""
    rule = look_ahead.VERSION if lane.look_ahead else None
    # All options of the tool count, since `Tool.keeps` may read any of them.
    return {**losses_settings(plan, lane), **tool_settings(lane), "look_ahead": rule}


def tool_settings(lane: Lane) -> Mapping[str, Any]:
    """Return what determines which calls a lane's tool keeps out: its version and options."""
    settings = {"version": lane.tool.version, "identity": lane.identity()}
    reasons_version = lane.tool.kept_out_version
    return {**settings, "kept_out": reasons_version} if reasons_version else settings


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the losses of the calls of a shard and of their echoes, where they are not stored yet."""
    texts = output.lane_table("heuristic_subset").read(shard)
    calls = _read_calls(output, shard, texts)
    with_echoes = pl.concat([calls.to_score, calls.echoes])
    return plan_losses(worker, output, with_echoes, texts, claimed)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the scores of a shard's calls from the stored losses: a row per candidate call that has a result.

    The score is delta, by how much the result lowers the loss. `reason` says why a call may not stay whatever its
    delta: why it is not scored (see `_explain_unfit`), does_not_fit or not_finite from the model, or a reason of the
        tool.
    """
    texts = output.lane_table("heuristic_subset").read(shard)
    calls = _read_calls(output, shard, texts)
    scored = with_losses(worker, output, calls.to_score)
    # An echo of a call has another result: the tool's for the very words that the text says after the call. Its loss
    # shows whether these words alone would help as much.
    echoes = with_losses(worker, output, calls.echoes)
    return build_scored_rows(
        output,
        texts,
        scored=_with_echo(scored.calls, echoes.calls),
        unscored=calls.unscored,
        stores=scored.stores,
    )


class _CallsOfShard(NamedTuple):
    """The single calls of a shard that have a result. Columns: see `_read_calls_with_unfit`.

    A rule that proposes a call because the text says "Paris" after it may have chosen the input for that word. So the
    call has an echo: the same call with the tool's result for "Paris" itself.
    """

    to_score: pl.DataFrame
    echoes: pl.DataFrame
    unscored: pl.DataFrame  # calls with a reason in `unfit`


def _read_calls(output: TableOutput, shard: str, texts: pl.DataFrame) -> _CallsOfShard:
    """Return the calls of a shard, by whether they are scored. texts: the texts of the shard."""
    calls = _read_calls_with_unfit(output, shard, texts)
    is_fit = pl.col("unfit").is_null()
    to_score = calls.filter(is_fit)
    return _CallsOfShard(to_score, echoes=_select_echoes(to_score), unscored=calls.filter(~is_fit))


def _with_echo(scored: pl.DataFrame, echoes: pl.DataFrame) -> pl.DataFrame:
    """Add the column `echo`, by how much the echo of a call lowers the loss (nats); null for a call without one."""
    losses = echoes.select(*CALL_KEY, loss_echo="loss_result")
    joined = scored.join(losses, on=CALL_KEY, how="left", maintain_order="left")
    best_without_result = pl.min_horizontal("loss_empty", "loss_call")  # L- in the paper
    return joined.with_columns(echo=best_without_result - pl.col("loss_echo"))


def build_scored_rows(
    output: TableOutput, texts: pl.DataFrame, *, scored: pl.DataFrame, unscored: pl.DataFrame, stores: Sequence[str]
) -> PartRows:
    """Return the rows of a table of scores, for single calls or for chains, in the order of CALL_KEY.

    texts: (text_digest, text) of the calls.
    scored: calls (CALL_COLUMNS) with their losses and `reason`, why the model gave none; null for most.
    unscored: calls with `unfit`, why they were not scored.
    stores: the names of the row stores that the losses come from.
    """
    reasons_of_tools = _ask_tools(output.lane, texts, scored)  # why a tool keeps a call out, else null
    scored = scored.with_columns(reason=pl.coalesce("reason", reasons_of_tools))  # the model's reason comes first
    unscored = unscored.with_columns(reason=pl.col("unfit"))
    calls = pl.concat([scored, unscored], how="diagonal")
    table = output.stage.shaped(calls).sort(CALL_KEY)
    # The record of chains names this stage too, so that rejections of single calls and of chains are counted together.
    return PartRows([table], rejected=count_by_reason(table), stores=stores, facts={MADE_BY: STAGE.name})


def _ask_tools(lane: Lane, texts: pl.DataFrame, calls: pl.DataFrame) -> pl.Series:
    """Ask the tools which calls may not stay, however much they help; return the reasons, null for most.

    calls: CALL_COLUMNS; `called` is the key of the lane (a tool with its settings) whose tool is called.
    texts: (text_digest, text) of the calls.

    Raises ToolDown if a tool's code fails.
    """
    text_of = dict(texts.select("text_digest", "text").iter_rows())
    tool_of = {called_lane.key: called_lane.tool for called_lane in lane.chainable.values()}
    columns = calls.select("called", "text_digest", OFFSET_IN_TEXT, "input")
    reasons = []
    for lane_key, digest, offset, input in columns.iter_rows():
        reasons.append(_ask_tool(tool_of[lane_key], text_of[digest], offset, input))
    return pl.Series(reasons, dtype=pl.String)


def _ask_tool(tool: Tool, text: str, offset: int, input: str) -> str | None:
    """Return why a tool keeps a call out that stands before a character of its text; None if it may stay."""
    with blame_tool(tool, "keeps"):
        return tool.kept_out(text, offset, input)


def _read_calls_with_unfit(output: TableOutput, shard: str, texts: pl.DataFrame) -> pl.DataFrame:
    """Return the single calls of a shard that have a result (CALL_COLUMNS), with three more columns.

    - echoed: the tool's result for the words that a rule saw in the text after the call
    - ahead: numbers and names of the input that the text has only after the call
    - unfit: why the call is not scored; null for most
    """
    calls = read_calls_with_results(output, shard, level=1)  # level 2 would be calls after one other call
    calls = calls.join(_read_echoed_results(output, shard), on=("words", "context"), how="left", maintain_order="left")
    calls = calls.with_columns(ahead=find_units_ahead(output.lane, texts, calls))
    return calls.with_columns(unfit=_explain_unfit())  # computed from `echoed`, `ahead` and columns of CALL_COLUMNS


def _read_echoed_results(output: TableOutput, shard: str) -> pl.DataFrame:
    """Return (context, words, echoed): the tool's results, under the name of an echo, for inputs that are words.

    The echo of [Search(capital of France)] for the word "Paris" is the result of [Search(Paris)].
    """
    results = output.lane_table("tool_results").read(shard)
    return results.select("context", words="input", echoed="result")


def _explain_unfit() -> pl.Expr:
    """Return an expression for why a call is not scored: the first reason that holds, else null.

    A rule proposes a call for `words` that it saw in the text after it, such as "Paris". The call's echo is the tool's
    result for these words as input, in the column `echoed`.
    """
    has_echo = _has_words("echoed") & (pl.col("echoed") != pl.col("result"))
    # For a call without words the conditions on them are null, and do not hold.
    condition_of_reason = {
        "looks_ahead": pl.col("ahead").is_not_null(),  # the input names what the text has only later
        "words_not_held": ~_has_words("result"),  # the result does not have the words
        "no_echo": ~has_echo,  # there is no other result with the words to compare with
        "same_result": _is_repeated_result(),  # a call of the rule at this position has it already
    }
    return pl.coalesce(pl.when(holds).then(pl.lit(reason)) for reason, holds in condition_of_reason.items())


def _has_words(result: str) -> pl.Expr:
    """Return whether the result in a column holds the `words` that a rule saw, in any case; null without words."""
    lower_result = pl.col(result).fill_null("").str.to_lowercase()
    return lower_result.str.contains(pl.col("words").str.to_lowercase(), literal=True)


def _is_repeated_result() -> pl.Expr:
    """Return whether a call only repeats the result that a rule's first call at its position has.

    Of the rule's calls -1, -2, -3 at a position with the results "7", "7", "9" only -2 repeats one; a sampled call with
    the result "7" does too. Null if no rule proposed a call with this result.
    """
    by_rule = pl.col("source") == RULE
    same_result_here = (*TEXT_KEY, "position", "result")
    # `sample` numbers proposed calls from -1 down, so the largest number is the first call.
    first_by_rule = pl.when(by_rule).then("sample").max().over(same_result_here)
    return pl.col("sample") != first_by_rule


def _select_echoes(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the calls that a rule proposed for words of the text, with the result of their echo as `result`."""
    return calls.filter(pl.col("words").is_not_null()).with_columns(result="echoed")


AHEAD = Column(pl.List(pl.String()), "units of the input that the text has only after the call; null for most")
STAGE = Stage(
    name="loss_deltas",
    description="The three losses and their delta for every call with a result, kept or not (paper, section 2).",
    columns={**SCORED, "ahead": AHEAD},
    key=CALL_KEY,
    settings=settings,
    reads=("heuristic_subset", "scored_candidates", "tool_results"),
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    checks={"losses_finite": LOSSES_FINITE},
    make=ByChunk(chunks, compute_losses, rows),
)
