-- Scored calls with cost_weight times their cost taken off delta. Runs behind costs.sql. Parameters: $files (part files of
-- loss_deltas or swapped_results), $weight (nats per unit of cost).
CREATE TABLE priced AS
SELECT rows.* REPLACE (delta - $weight * coalesce(cost, 0) AS delta)
FROM read_parquet($files, hive_partitioning = false) AS rows
LEFT JOIN call_costs USING (tool, shard, digest, segment, position, sample);
