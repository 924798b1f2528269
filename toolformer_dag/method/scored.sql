-- Calls with their score as delta. CALLED: part files with `row`; COSTS: what the calls cost; SCORE: the expression of each
-- tool; TOOLS: the tools that have one.

WITH called AS (CALLED), costs AS (COSTS), valued AS (
    SELECT *, SCORE AS score
    FROM (SELECT called.*, coalesce(costs.cost, 0) AS cost FROM called LEFT JOIN costs USING (tool, shard, digest, segment, position, sample))
)
SELECT * EXCLUDE (score, cost) REPLACE (
           CASE WHEN tool IN (TOOLS) THEN score ELSE delta END AS delta,
           CASE WHEN reason IS NULL AND tool IN (TOOLS) AND NOT coalesce(isfinite(score), false) THEN 'no_score'
                ELSE reason END AS reason)
FROM valued
