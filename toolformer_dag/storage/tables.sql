-- The tables of the warehouse, copied from the lake's part files. Parameters: lists of files, each beginning with an
-- empty one that has the columns, so that a lane which has not run gives an empty table.

CREATE TABLE documents AS FROM read_parquet($raw_shards, hive_partitioning = false);
COMMENT ON TABLE documents IS 'A row per document of the shards.';

-- The text itself stands in documents: substr(documents.text, "offset" + 1, characters).
CREATE TABLE texts AS
SELECT * EXCLUDE (text), length(text) AS characters FROM read_parquet($heuristic_subset, hive_partitioning = false);
COMMENT ON TABLE texts IS 'A row per text that a tool wants.';

CREATE TABLE candidates AS FROM read_parquet($scored_candidates, hive_partitioning = false);
COMMENT ON TABLE candidates IS 'A row per sampled call; reason says why a sample was discarded.';

-- A call that several shards make was run once.
CREATE TABLE tool_results AS
SELECT DISTINCT ON (tool, input, context) * FROM read_parquet($tool_results, hive_partitioning = false) ORDER BY tool, input, context, reason NULLS FIRST;
COMMENT ON TABLE tool_results IS 'A row per distinct input in its context.';

CREATE TABLE loss_deltas AS FROM read_parquet($loss_deltas, hive_partitioning = false);
COMMENT ON TABLE loss_deltas IS 'A row per candidate call that has a result.';

CREATE TABLE swapped_results AS FROM read_parquet($swapped_results, hive_partitioning = false);
COMMENT ON TABLE swapped_results IS 'Control: a sample of the scored calls, scored again with results of other documents.';

CREATE TABLE filtered_calls AS FROM read_parquet($filtered_calls, hive_partitioning = false);
COMMENT ON TABLE filtered_calls IS 'The calls that stay, one per position.';

CREATE TABLE augmented_corpus AS FROM read_parquet($augmented_corpus, hive_partitioning = false);
COMMENT ON TABLE augmented_corpus IS 'C*: a row per text with its calls.';

CREATE TABLE rejections AS FROM read_parquet($rejections, hive_partitioning = false);
COMMENT ON TABLE rejections IS 'What was left out: how many of what, by stage, tool, shard and reason.';

CREATE TABLE lanes AS FROM read_parquet($lanes, hive_partitioning = false);
COMMENT ON TABLE lanes IS 'The tools, each with the tau_f that its filtered_calls were made with.';

CREATE TABLE sources AS FROM read_parquet($sources, hive_partitioning = false);
COMMENT ON TABLE sources IS 'The tables and partitions of the lake that were copied, each with its version.';
