-- Views and macros over the tables that the stages declare, beside those of chance.sql.

CREATE MACRO kept_at(tau) AS TABLE
SELECT * FROM eligible
WHERE CASE WHEN NOT delta >= tau THEN false
           WHEN delta_is_bound THEN error(format('{} has calls without L(c) at this tau: lower filtering.loss_floor', tool))
           ELSE true END
QUALIFY row_number() OVER (PARTITION BY tool, digest, segment, position ORDER BY delta DESC, sample) = 1;
COMMENT ON MACRO TABLE kept_at IS 'The calls that would stay at another threshold: SELECT tool, count(*) FROM kept_at(0.8) GROUP BY tool.';

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
    SELECT tool, 6, 'loss_deltas', 'calls that do not look ahead', count(*) FILTER (reason IS DISTINCT FROM 'looks_ahead')
    FROM loss_deltas GROUP BY tool
    UNION ALL
    SELECT tool, 7, 'loss_deltas', 'calls that help', count(*) FILTER (delta > 0) FROM loss_deltas GROUP BY tool
    UNION ALL
    SELECT tool, 8, 'filtered_calls', 'calls', count(*) FROM filtered_calls GROUP BY tool
    UNION ALL
    SELECT tool, 9, 'filtered_calls', 'texts', count(DISTINCT (digest, segment)) FROM filtered_calls GROUP BY tool
    UNION ALL
    SELECT tool, 10, 'augmented_corpus', 'texts', count(*)
    FROM (SELECT unnest(tools) AS tool FROM augmented_corpus) GROUP BY tool  -- DuckDB 1 takes no unnest beside GROUP BY
)
SELECT tool, step, stage, what, coalesce(count, 0) AS count
FROM (SELECT lanes.tool, steps.* FROM lanes CROSS JOIN (
          VALUES (1, 'raw_shards', 'documents'), (2, 'heuristic_subset', 'texts'), (3, 'scored_candidates', 'samples'),
                 (4, 'scored_candidates', 'calls'), (5, 'tool_results', 'calls with a result'),
                 (6, 'loss_deltas', 'calls that do not look ahead'), (7, 'loss_deltas', 'calls that help'),
                 (8, 'filtered_calls', 'calls'), (9, 'filtered_calls', 'texts'), (10, 'augmented_corpus', 'texts')) AS steps(step, stage, what))
LEFT JOIN counts USING (tool, step, stage, what)
WHERE NOT (what = 'calls that help' AND tool IN (SELECT tool FROM loss_deltas WHERE delta_is_bound AND delta > 0))
ORDER BY tool, step;
COMMENT ON VIEW funnel IS 'What is left after every stage, per tool; without the calls that help where filtering.loss_floor leaves that open.';

CREATE VIEW offset_statistics AS
WITH placed AS (
    SELECT eligible.tool, eligible.digest, eligible.segment, position, max(delta) AS delta,
           any_value(least(600, (char_offset - texts."offset") // 100 * 100)) AS from_character
    FROM eligible JOIN texts USING (tool, shard, digest, segment)
    GROUP BY ALL
)
SELECT tool, from_character, count(*) AS places,
       CASE WHEN bool_and(exact_above IS NULL) OR quantile_disc(delta, 0.5) > any_value(exact_above) THEN median(delta) END AS delta,
       CASE WHEN bool_and(exact) THEN count(*) FILTER (delta >= tau_f) END AS kept,
       CASE WHEN bool_and(exact) THEN count(*) FILTER (delta >= tau_f) / count(*) END AS share
FROM placed
JOIN (SELECT *, coalesce(tau_f > exact_above, true) AS exact FROM lanes JOIN loss_floors USING (tool)) USING (tool)
GROUP BY tool, from_character
ORDER BY tool, from_character;
COMMENT ON VIEW offset_statistics IS 'By distance of the call from the beginning of its text, in hundreds of characters (600: and more): places, median of their best deltas, and what is kept at the tool''s tau_f; NULL where filtering.loss_floor leaves that open. z stands before the whole text, so that delta falls with the distance.';
