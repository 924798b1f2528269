-- The control's places, from $control and the verdict on each call: `decisions`.

-- DECIMAL, so that the sum of the weights is the same in any order.
CREATE TABLE swapped_places AS
SELECT tool, digest, segment, position, swap,
       max(own.delta) AS delta, max(other.delta) AS delta_swapped, count(*) AS calls,
       (1 / count(*) OVER (PARTITION BY tool, digest, segment, position))::DECIMAL(38, 18) AS weight
FROM $control AS other
JOIN decisions AS own USING (tool, shard, digest, segment, position, sample)
WHERE own.eligible AND other.reason IS NULL
GROUP BY tool, digest, segment, position, swap;
COMMENT ON TABLE swapped_places IS 'Positions of the control, once per swap: the best delta of the swapped calls with their own and with other results.';
COMMENT ON COLUMN swapped_places.swap IS 'number of the swap, of those of this place';
COMMENT ON COLUMN swapped_places.delta IS 'best delta with their own results, nats';
COMMENT ON COLUMN swapped_places.delta_swapped IS 'best delta with the results of other documents, nats';
COMMENT ON COLUMN swapped_places.calls IS 'swapped calls at this place';
COMMENT ON COLUMN swapped_places.weight IS '1 / (swaps of the place), so that places weigh alike';
