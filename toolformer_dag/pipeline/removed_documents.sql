-- The documents that are left out before texts are chosen, each with its reason.
-- Parameters: $files (part files of screened_documents), $deduplicate.

-- Of equal texts the copy in the first shard stays, whatever the order in which shards were read.
CREATE TEMP TABLE copies AS
SELECT text_digest, min({shard: shard, digest: digest}) AS kept
FROM read_parquet($files, hive_partitioning = false)
WHERE $deduplicate
GROUP BY text_digest
HAVING count(*) > 1;

CREATE TEMP TABLE removed AS
SELECT shard, digest, if(benchmark IS NULL, 'duplicate_text', 'in_benchmark') AS reason, benchmark,
       if(benchmark IS NULL, kept.shard, NULL) AS kept_shard, if(benchmark IS NULL, kept.digest, NULL) AS kept_digest
FROM read_parquet($files, hive_partitioning = false) LEFT JOIN copies USING (text_digest)
WHERE benchmark IS NOT NULL OR kept <> {shard: shard, digest: digest};
