"""Tabulate a study of filters: what each keeps, what it teaches, what stays on real pages."""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from statistics import mean, stdev

import polars as pl

from embedded_model.filter_study import LEVEL, RULES, FilterResult, FilterStudy, Say, annotate, judged_calls
from embedded_model.offset_study import distance_table, remedy_table, with_shorter_texts
from toolformer_dag.evaluation.scores import wilson
from toolformer_dag.lake.queries import quoted
from toolformer_dag.lake.warehouse import query
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.synthetic.phenomena import TOOLS

BENCHMARK = r"^(?<tool>\w+) \((?<wordings>\w+)\)$"
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t, two-sided 95 %, by the number of seeds."""


def kept_table(study: FilterStudy, say: Say) -> pl.DataFrame:
    """Return what each rule keeps of the synthetic pages: per tool, right and wrong calls, the share of wrong ones.

    `rejected_right`: right calls that look ahead by the rule. Without a filter every call counts, not the best of its
    place.
    """
    rows = []
    for rule in RULES:
        plan = study.synthetic(rule)
        statistics = {row["tool"]: row for row in query(annotate(plan, say), _at_tau_f()).to_dicts()}
        calls = judged_calls(plan)
        for tool in TOOLS:
            own = calls.filter(tool=tool)
            kept = own.filter("kept") if rule.filtered else own
            wrong = kept.filter(~pl.col("right")).height
            found = statistics.get(tool, {}) if rule.filtered else {}
            rows.append(
                {
                    "rule": rule.name,
                    "tool": tool,
                    "tau_f": found.get("tau_f"),
                    "kept": kept.height,
                    "right": kept.height - wrong,
                    "wrong": wrong,
                    "wrong, %": _percent(wrong, kept.height),
                    "by chance, %": _share(found.get("fdr")),
                    "at most": _share(found.get("fdr_high")),
                    "rejected right": own.filter(pl.col("right") & (pl.col("reason") == "looks_ahead")).height,
                    "looks ahead": own.filter(reason="looks_ahead").height,
                }
            )
    return pl.DataFrame(rows, infer_schema_length=None)


def real_table(study: FilterStudy, say: Say) -> pl.DataFrame:
    """Return what each rule keeps of the real pages, and what chance keeps there."""
    tables = []
    for rule in RULES:
        if rule.filtered:
            database = annotate(study.real(rule), say)
            tables.append(query(database, _real(rule.name)))
    return pl.concat(tables, how="vertical_relaxed")


def _at_tau_f() -> str:
    return "SELECT swapped_statistics.* FROM swapped_statistics JOIN lanes USING (tool, tau_f)"


def _real(rule: str) -> str:
    return f"""
        WITH ahead AS (SELECT tool, count(*) AS ahead FROM loss_deltas WHERE reason = 'looks_ahead' GROUP BY tool)
        SELECT {quoted(rule)} AS rule, tool, lanes.tau_f, sizes.places, coalesce(ahead, 0) AS "looks ahead",
               coalesce(calls, 0) AS kept, s.by_chance AS "by chance", by_chance_low || '-' || by_chance_high AS "95 %",
               sizes.swaps, round(s.fdr, 3) AS fdr, round(s.fdr_high, 3) AS "at most",
               verdict AS "at {LEVEL}", swaps_needed AS "swaps needed"
        FROM lanes
        JOIN control_sizes AS sizes USING (tool)
        LEFT JOIN swapped_statistics AS s USING (tool, tau_f)
        JOIN chance_thresholds AS t USING (tool)
        LEFT JOIN ahead USING (tool)
        WHERE t.by_chance = {LEVEL}
        ORDER BY tool
    """


def accuracy_table(results: Sequence[FilterResult]) -> pl.DataFrame:
    """Return questions answered right: a row per wordings and rule, a column per tool, over all seeds together."""
    answers = [(one.rule, name, n, right, called) for one in results for name, n, right, called in one.answers]
    frame = pl.DataFrame(answers, ["rule", "benchmark", "n", "right", "called"], orient="row")
    frame = frame.with_columns(pl.col("benchmark").str.extract_groups(BENCHMARK).alias("parts")).unnest("parts")
    every = frame.with_columns(tool=pl.lit("all"))
    counts = (
        pl.concat([frame, every])
        .group_by("wordings", "rule", "tool", maintain_order=True)
        .agg(pl.col("n", "right").sum())
    )
    cells = counts.with_columns(
        cell=pl.struct("right", "n").map_elements(lambda c: _percent(c["right"], c["n"]), return_dtype=pl.String)
    )
    wide = cells.pivot("tool", index=["wordings", "rule"], values="cell", maintain_order=True)
    return wide.select("wordings", "rule", *TOOLS, "all").sort("wordings", maintain_order=True)


def difference_table(results: Sequence[FilterResult]) -> pl.DataFrame:
    """Return each rule against the paper's: mean over seeds of the accuracy of all questions, and its difference.

    Both answer the same questions of a seed; the 95 % interval of the mean difference is Student's over the seeds.
    Perplexities are means, of the texts in the columns.
    """
    by_rule = {rule.name: {one.seed: one for one in results if one.rule == rule.name} for rule in RULES}
    baseline = by_rule[RULES[0].name]
    return pl.DataFrame(
        [_difference(name, found, baseline) for name, found in by_rule.items() if found], infer_schema_length=None
    )


def _difference(
    name: str, found: Mapping[int, FilterResult], baseline: Mapping[int, FilterResult]
) -> dict[str, object]:
    row: dict[str, object] = {"rule": name, "seeds": len(found), "texts": round(mean(o.texts for o in found.values()))}
    for wordings in ("seen", "unseen"):
        shares = {seed: _accuracy(one, wordings) for seed, one in found.items()}
        row[f"{wordings}, %"] = round(mean(shares.values()), 1)
        paired = [shares[seed] - _accuracy(baseline[seed], wordings) for seed in shares.keys() & baseline.keys()]
        row[f"{wordings}, against the paper's"] = "" if found is baseline else _interval(paired)
    for text in next(iter(found.values())).perplexity:
        row[f"perplexity, {text}"] = round(mean(one.perplexity[text] for one in found.values()), 3)
    return row


def _accuracy(one: FilterResult, wordings: str) -> float:
    answers = [answer for answer in one.answers if answer[0].endswith(f"({wordings})")]
    return 100 * sum(right for _, _, right, _ in answers) / sum(n for _, n, _, _ in answers)


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:+.1f}" if values else ""
    half = T_95[len(values)] * stdev(values) / sqrt(len(values))
    return f"{mean(values):+.1f} ({mean(values) - half:+.1f} to {mean(values) + half:+.1f})"


def _percent(part: int, whole: int) -> str:
    if not whole:
        return ""
    low, high = wilson(part, whole)
    return f"{100 * part / whole:.1f} ({100 * low:.1f}-{100 * high:.1f})"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def report(study: FilterStudy, results: Sequence[FilterResult], say: Say) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the tables of a study with their titles."""
    yield "What each filter keeps of the synthetic pages", kept_table(study, say)
    if results:
        yield "Questions answered right, in per cent (95 % interval), all seeds", accuracy_table(results)
        yield "Against the paper's filter", difference_table(results)
    plan = study.synthetic(RULES[1])
    annotate(plan, say)
    calls = judged_calls(plan)
    yield "Right places by distance from the beginning of the text", distance_table(calls)
    rescored = with_shorter_texts(plan, Worker(plan).engine(), calls)
    tau_f = dict(query(plan.settings.paths.warehouse, "SELECT tool, tau_f FROM lanes").iter_rows())
    yield "Remedies, at the same number of wrong places kept", remedy_table(rescored, tau_f)
    if study.real_text:
        yield "Real pages", real_table(study, say)
