-- The texts of a shard that have scored calls, each with the largest delta among the calls that only the threshold keeps
-- out. Parameters: $files (part files of loss_deltas), $texts (of heuristic_subset).

CREATE TEMP TABLE scored_texts AS
SELECT shard, digest, segment, text_digest, delta
FROM (
    SELECT shard, digest, segment, max(delta) FILTER (reason IS NULL) AS delta
    FROM read_parquet($files, hive_partitioning = false)
    GROUP BY ALL
)
LEFT JOIN read_parquet($texts, hive_partitioning = false) USING (shard, digest, segment)
ORDER BY digest, segment;
