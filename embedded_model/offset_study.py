"""Measure how delta falls with the distance of a call from the beginning of its text, and what mends it.

z stands before the whole text, so a call at its end is far from what it shall help to predict. Two remedies are
compared with the stored delta: a text that begins shortly before the call, and adding to delta what the distance takes.
All are compared at the same number of wrong calls kept, because a lower threshold keeps more right ones too.
"""

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toolformer_dag.model.engine import Engine
from toolformer_dag.model.requests import LossRequest
from toolformer_dag.pipeline.plan import Plan

PLACE = ("tool", "digest", "segment", "position")
CALL = ("tool", "text", "place", "input", "result")
NEAR, FAR = 100, 400
"""Characters: places nearer and farther than these are counted apart."""
BEFORE = (60, 120, 240)
"""Characters of the text before the call with which it is scored again."""
DELTA, CORRECTED = "delta", "delta + b x distance"
RESAMPLES = 500


def shortened(before: int) -> str:
    """Return the name of the delta of a call whose text begins at most `before` characters before it."""
    return f"text from {before} characters before"


def with_shorter_texts(plan: Plan, engine: Engine, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the eligible calls (`text`, `place`, `input`, `result`) with a column per length of BEFORE.

    A text is cut between words; what follows the call stays whole.
    """
    names = {lane.key: lane.tool.name for lane in plan.lanes}
    scored = calls.filter(pl.col("reason").is_null())
    distinct = scored.select(CALL).unique(maintain_order=True)
    rescored = distinct
    for before in BEFORE:
        requests = [
            _request(engine, names[tool], text, place, call, result, before)
            for tool, text, place, call, result in distinct.iter_rows()
        ]
        deltas = [losses.delta for losses in engine.losses(requests)]
        rescored = rescored.with_columns(pl.Series(shortened(before), deltas, pl.Float64))
    return scored.join(rescored, on=CALL)


def _request(engine: Engine, name: str, text: str, place: int, call: str, result: str, before: int) -> LossRequest:
    start = text.find(" ", place - before) + 1 if place > before else 0
    start = start if start <= place else place
    return LossRequest(text[start:], engine.position_at(text[start:], place - start), name, call, result)


def distance_table(calls: pl.DataFrame) -> pl.DataFrame:
    """Return per tool and hundred characters of distance: right places, their median delta, how many are kept."""
    best = _best(calls.filter(pl.col("reason").is_null()), DELTA).filter("right")
    bins = best.with_columns(from_character=pl.min_horizontal(pl.col("place") // 100 * 100, pl.lit(500)))
    return (
        bins.group_by("tool", "from_character")
        .agg(right=pl.len(), median_delta=pl.median(DELTA), kept=pl.col("kept").sum())
        .with_columns(share=pl.col("kept") / pl.col("right"))
        .sort("tool", "from_character")
    )


def remedy_table(calls: pl.DataFrame, tau_f: Mapping[str, float], seed: int = 0) -> pl.DataFrame:
    """Compare scores: per tool, right places kept at as many wrong ones as delta >= tau_f keeps, near and far ones.

    `calls`: of `with_shorter_texts`. The slope b of the correction is fitted to the right calls, which no filter
    knows, so that it says the most that such a correction can do. `gain_low` to `gain_high`: 95 % interval of the
    right places gained over delta, by resampling documents.
    """
    scores = [DELTA, *map(shortened, BEFORE), CORRECTED]
    rows = []
    for (tool,), own in sorted(calls.partition_by("tool", as_dict=True).items()):
        corrected = own.with_columns((pl.col(DELTA) + _slope(own) * pl.col("place")).alias(CORRECTED))
        places = {score: _best(corrected, score) for score in scores}
        wrong = places[DELTA].filter(~pl.col("right") & (pl.col(DELTA) >= tau_f[str(tool)])).height
        gains = _gains(places, tau_f[str(tool)], np.random.default_rng(seed))
        for score, best in places.items():
            kept = best.filter(pl.col(score) >= _threshold(best[score].to_numpy(), best["right"].to_numpy(), wrong))
            right = kept.filter("right")
            of = best.filter("right")
            low, high = np.quantile(gains[score], [0.025, 0.975])
            rows.append(
                {
                    "tool": tool,
                    "score": score,
                    "wrong": wrong,
                    "right": right.height,
                    "of": of.height,
                    "near": _share(right.filter(pl.col("place") < NEAR), of.filter(pl.col("place") < NEAR)),
                    "far": _share(right.filter(pl.col("place") >= FAR), of.filter(pl.col("place") >= FAR)),
                    "average_precision": average_precision(best[score].to_numpy(), best["right"].to_numpy()),
                    "gain_low": float(low),
                    "gain_high": float(high),
                }
            )
    return pl.DataFrame(rows)


def average_precision(scores: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Return the mean, over right calls, of the share of right ones among those scored as high; 0 without any."""
    ordered = right[np.argsort(-scores, kind="stable")]
    precision = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)
    return float(precision[ordered].mean()) if ordered.any() else 0.0


def _best(calls: pl.DataFrame, score: str) -> pl.DataFrame:
    """The call that the filter would take of each place."""
    return calls.sort(score, "sample", descending=[True, False]).unique(PLACE, keep="first", maintain_order=True)


def _slope(calls: pl.DataFrame) -> float:
    """By how many nats per character the delta of right calls falls (least squares)."""
    right = _best(calls, DELTA).filter("right")
    if right.height < 3:
        return 0.0
    return -float(np.polyfit(right["place"].to_numpy(), right[DELTA].to_numpy(), 1)[0])


def _threshold(scores: NDArray[np.float64], right: NDArray[np.bool_], wrong: int) -> float:
    """The smallest score at which at most so many wrong places are kept."""
    worst = np.sort(scores[~right])[::-1]
    return float(np.nextafter(worst[wrong], np.inf)) if len(worst) > wrong else -np.inf


def _gains(places: Mapping[str, pl.DataFrame], tau_f: float, random: np.random.Generator) -> dict[str, list[int]]:
    """Right places gained over delta at as many wrong ones, in documents drawn with replacement."""
    documents = places[DELTA]["digest"].unique(maintain_order=True)
    number = dict(zip(documents, range(len(documents)), strict=True))
    columns = {
        score: (best[score].to_numpy(), best["right"].to_numpy(), np.array([number[one] for one in best["digest"]]))
        for score, best in places.items()
    }
    gains: dict[str, list[int]] = {score: [] for score in places}
    for _ in range(RESAMPLES):
        times = np.bincount(random.integers(0, len(documents), len(documents)), minlength=len(documents))
        drawn = {score: [np.repeat(one, times[of]) for one in (s, r)] for score, (s, r, of) in columns.items()}
        deltas, right = drawn[DELTA]
        wrong = int((~right & (deltas >= tau_f)).sum())
        kept = {score: int((r & (s >= _threshold(s, r, wrong))).sum()) for score, (s, r) in drawn.items()}
        for score, count in kept.items():
            gains[score].append(count - kept[DELTA])
    return gains


def _share(part: pl.DataFrame, whole: pl.DataFrame) -> float | None:
    return part.height / whole.height if whole.height else None
