-- Views and macros over the tables that the stages declare.

CREATE VIEW eligible AS
SELECT * FROM loss_deltas
SEMI JOIN (SELECT tool, digest, min(shard) AS shard FROM loss_deltas GROUP BY tool, digest) USING (tool, digest, shard)
WHERE reason IS NULL;
COMMENT ON VIEW eligible IS 'Scored calls that only the threshold decides. A document that lies in several shards counts once.';

CREATE MACRO kept_at(tau) AS TABLE
SELECT * FROM eligible
WHERE delta >= tau
QUALIFY row_number() OVER (PARTITION BY tool, digest, segment, position ORDER BY delta DESC, sample) = 1;
COMMENT ON MACRO TABLE kept_at IS 'The calls that would stay at another threshold: SELECT tool, count(*) FROM kept_at(0.8) GROUP BY tool.';

CREATE VIEW filter_statistics AS
WITH thresholds AS (
    SELECT tool, unnest([0.5, 1.0, 2.0]) AS tau_f FROM lanes
    UNION
    SELECT tool, tau_f FROM lanes WHERE tau_f IS NOT NULL
), best AS (
    SELECT tool, digest, segment, position, max(delta) AS delta FROM eligible
    WHERE delta >= (SELECT min(tau_f) FROM thresholds)
    GROUP BY ALL
), texts_with_calls AS (
    SELECT thresholds.tool, thresholds.tau_f, digest, segment, count(*) AS calls
    FROM thresholds JOIN best ON thresholds.tool = best.tool AND best.delta >= thresholds.tau_f
    GROUP BY ALL
)
SELECT tool, tau_f, coalesce(sum(calls), 0)::BIGINT AS calls, count(digest) AS examples
FROM thresholds LEFT JOIN texts_with_calls USING (tool, tau_f)
GROUP BY tool, tau_f
ORDER BY tool, tau_f;
COMMENT ON VIEW filter_statistics IS 'Table 2 of the paper: calls and examples (texts with at least one call) at 0.5, 1.0, 2.0 and the tool''s own tau_f.';

-- The control beside Table 2: what is kept when calls are told results of other documents. `calls` are kept in truth, as
-- in filter_statistics. `kept` and `kept_swapped` count, one per position, what stays of the `sampled` calls with their
-- own and with exchanged results; `ratio` is kept_swapped / kept. `by_chance`: share_swapped of all scored calls.
CREATE VIEW swapped_statistics AS
WITH best AS (
    SELECT tool, digest, segment, position, count(*) AS sampled, max(eligible.delta) AS delta, max(other.delta) AS swapped
    FROM swapped_results AS other JOIN eligible USING (tool, shard, digest, segment, position, sample)
    GROUP BY ALL
), counts AS (
    SELECT tool, tau_f, calls, coalesce(sum(sampled), 0)::BIGINT AS sampled,
           count(*) FILTER (delta >= tau_f) AS kept, count(*) FILTER (swapped >= tau_f) AS kept_swapped
    FROM filter_statistics LEFT JOIN best USING (tool)
    GROUP BY ALL
), shares AS (
    SELECT *, kept / nullif(sampled, 0) AS share, kept_swapped / nullif(sampled, 0) AS share_swapped,
           kept_swapped / nullif(kept, 0) AS ratio
    FROM counts
)
SELECT shares.*, round(share_swapped * scored)::BIGINT AS by_chance
FROM shares LEFT JOIN (SELECT tool, count(*) AS scored FROM eligible GROUP BY tool) USING (tool)
ORDER BY tool, tau_f;
COMMENT ON VIEW swapped_statistics IS 'Beside each count of Table 2: how many calls would be kept by chance, told results of other documents.';

CREATE VIEW funnel AS
WITH counts AS (
    SELECT tool, 1 AS step, 'raw_shards' AS stage, 'documents' AS what,
           (SELECT count(*) FROM documents) AS count
    FROM lanes
    UNION ALL
    SELECT tool, 2, 'heuristic_subset', 'texts', count(*) FROM texts GROUP BY tool
    UNION ALL
    SELECT tool, 3, 'scored_candidates', 'samples', count(*) FROM candidates GROUP BY tool
    UNION ALL
    SELECT tool, 4, 'scored_candidates', 'calls', count(input) FROM candidates GROUP BY tool
    UNION ALL
    SELECT tool, 5, 'tool_results', 'calls with a result', count(*) FROM loss_deltas GROUP BY tool
    UNION ALL
    SELECT tool, 6, 'loss_deltas', 'calls that help', count(*) FILTER (delta > 0) FROM loss_deltas GROUP BY tool
    UNION ALL
    SELECT tool, 7, 'filtered_calls', 'calls', count(*) FROM filtered_calls GROUP BY tool
    UNION ALL
    SELECT tool, 8, 'filtered_calls', 'texts', count(DISTINCT (digest, segment)) FROM filtered_calls GROUP BY tool
    UNION ALL
    SELECT tool, 9, 'augmented_corpus', 'texts', count(*)
    FROM (SELECT unnest(tools) AS tool FROM augmented_corpus) GROUP BY tool  -- DuckDB 1 takes no unnest beside GROUP BY
)
SELECT tool, step, stage, what, coalesce(count, 0) AS count
FROM (SELECT lanes.tool, steps.* FROM lanes CROSS JOIN (
          VALUES (1, 'raw_shards', 'documents'), (2, 'heuristic_subset', 'texts'), (3, 'scored_candidates', 'samples'),
                 (4, 'scored_candidates', 'calls'), (5, 'tool_results', 'calls with a result'),
                 (6, 'loss_deltas', 'calls that help'), (7, 'filtered_calls', 'calls'), (8, 'filtered_calls', 'texts'),
                 (9, 'augmented_corpus', 'texts')) AS steps(step, stage, what))
LEFT JOIN counts USING (tool, step, stage, what)
ORDER BY tool, step;
COMMENT ON VIEW funnel IS 'What is left after every stage, per tool.';
