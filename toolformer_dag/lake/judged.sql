-- What the threshold decides on: which scored calls may stay, and which is the best of its place. Reads `scored`: the
-- columns of loss_deltas, and `row`, a number of the row; and swapped_results. The filter runs this over the files of one
-- lane, the warehouse over all.

-- A document that lies in several shards counts once, in the first of them.
CREATE TEMP TABLE homes AS SELECT tool, digest, min(shard) AS shard FROM scored GROUP BY ALL;

-- Of equal deltas, the first sample.
CREATE TEMP TABLE best_calls AS
SELECT tool, shard, digest, segment, position, one.sample AS sample, one.row AS row
FROM (
    SELECT tool, shard, digest, segment, position,
           arg_max({sample: sample, row: row}, {delta: delta, earlier: -sample}) AS one
    FROM scored SEMI JOIN homes USING (tool, digest, shard)
    WHERE reason IS NULL
    GROUP BY ALL
);

CREATE TEMP VIEW judged AS
SELECT scored.*, homes.shard IS NULL AS repeated, homes.shard IS NOT NULL AND reason IS NULL AS eligible,
       best_calls.row IS NOT NULL AS best
FROM scored LEFT JOIN homes USING (tool, digest, shard)
LEFT JOIN (SELECT row FROM best_calls) AS best_calls USING (row);

-- DECIMAL, so that the sum of the weights is the same in any order.
CREATE TABLE swapped_places AS
SELECT tool, digest, segment, position, swap,
       max(own.delta) AS delta, max(other.delta) AS delta_swapped, count(*) AS calls,
       (1 / count(*) OVER (PARTITION BY tool, digest, segment, position))::DECIMAL(38, 18) AS weight
FROM swapped_results AS other
JOIN judged AS own USING (tool, shard, digest, segment, position, sample)
WHERE own.eligible AND other.reason IS NULL
GROUP BY tool, digest, segment, position, swap;
COMMENT ON TABLE swapped_places IS 'Positions of the control, once per swap: the best delta of the swapped calls with their own and with other results.';
COMMENT ON COLUMN swapped_places.swap IS 'number of the swap, of those of this place';
COMMENT ON COLUMN swapped_places.delta IS 'best delta with their own results, nats';
COMMENT ON COLUMN swapped_places.delta_swapped IS 'best delta with the results of other documents, nats';
COMMENT ON COLUMN swapped_places.calls IS 'swapped calls at this place';
COMMENT ON COLUMN swapped_places.weight IS '1 / (swaps of the place), so that places weigh alike';
