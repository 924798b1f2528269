-- The texts of a shard that have scored calls, each with the largest delta among the calls that only the threshold keeps
-- out. Reads `scored`, as judged.sql does. Parameter: $texts (part files of heuristic_subset).

CREATE TEMP TABLE scored_texts AS
SELECT shard, digest, segment, text_digest, delta
FROM (
    SELECT shard, digest, segment, max(delta) FILTER (reason IS NULL) AS delta
    FROM scored
    GROUP BY ALL
)
LEFT JOIN read_parquet($texts, hive_partitioning = false) USING (shard, digest, segment)
ORDER BY digest, segment;
