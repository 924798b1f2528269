-- The calls of one lane and shard that stay (paper, section 2, "Filtering API Calls"). Runs after judged.sql, with the macro
-- why_not of rule.sql. Parameters: $texts (part files of heuristic_subset), $tau_f (null keeps nothing), $last_text (what
-- filter_rule.sql found; null where no text passes).

-- Every scored call, with the first reason that applies; null where it stays.
CREATE TEMP TABLE decided AS
SELECT judged.*, coalesce(
    why_not(reason, best, delta, $tau_f),
    CASE WHEN NOT coalesce(text_digest <= $last_text, false) THEN 'beyond_examples' END
) AS why
FROM judged LEFT JOIN (
    SELECT shard, digest, segment, text_digest FROM read_parquet($texts, hive_partitioning = false)
) USING (shard, digest, segment);
