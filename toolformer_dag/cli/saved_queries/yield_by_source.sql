-- What each source of calls yields: kept calls per 1,000 tokens of sampling and scoring (without the control), and how many are kept by chance
WITH spent AS (
    SELECT tool, sum(tokens) FILTER (stage = 'scored_candidates' OR starts_with(stage, 'chained_candidates')) AS sampling,
           sum(tokens) FILTER (stage IN ('loss_deltas', 'chained_deltas')) AS scoring
    FROM costs GROUP BY tool
)
SELECT tool, source, candidates, scored, kept, by_chance, round(fdr, 3) AS fdr, too_few_swaps,
       round(1000 * kept / nullif(CASE WHEN source = 'model' THEN coalesce(sampling, 0) ELSE 0 END
             + scoring * scored / sum(scored) OVER (PARTITION BY tool), 0), 2) AS kept_per_1000_tokens
FROM candidate_sources LEFT JOIN spent USING (tool)
ORDER BY tool, source
