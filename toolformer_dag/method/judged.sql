-- What the threshold decides on: which scored calls may stay, and which is the best of its place. Reads `scored`: the
-- columns of loss_deltas, and `row`, a number of the row. The choice of a threshold runs this over the files of one lane,
-- the warehouse over those of all, or of the shards that changed.

-- Of equal deltas, the first sample.
CREATE TEMP TABLE best_calls AS
SELECT tool, shard, digest, segment, position, one.sample AS sample, one.row AS row
FROM (
    SELECT tool, shard, digest, segment, position,
           arg_max({sample: sample, row: row}, {delta: delta, earlier: -sample}) AS one
    FROM scored
    WHERE reason IS NULL
    GROUP BY ALL
);

CREATE TEMP VIEW judged AS
SELECT scored.*, reason IS NULL AS eligible, best_calls.row IS NOT NULL AS best
FROM scored LEFT JOIN (SELECT row FROM best_calls) AS best_calls USING (row);
