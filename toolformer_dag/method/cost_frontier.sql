-- What each threshold gains, and for what cost. Reads decisions, lanes and call_costs.

-- Steps of all thresholds and calls in one order: what stands at or above a threshold is added up behind it.
CREATE VIEW cost_frontier AS
WITH ends AS (
    SELECT tool, greatest(-10000, floor(min(delta) * 100))::INTEGER AS low,
           least(10000, floor(max(delta) * 100) + 1)::INTEGER AS high
    FROM decisions WHERE eligible GROUP BY tool
), thresholds AS (
    SELECT tool, unnest(range(low, high + 1)) / 100 AS tau_f FROM ends
    UNION
    SELECT tool, tau_f FROM lanes JOIN ends USING (tool) WHERE tau_f IS NOT NULL
), steps AS (
    SELECT tool, tau_f, true AS threshold, 0 AS calls, 0.0::DOUBLE AS nats, 0.0::DOUBLE AS cost, 0.0::DOUBLE AS seconds, 0 AS bounds
    FROM thresholds
    UNION ALL
    SELECT tool, delta, false, 1, loss_minus - loss_plus, cost, seconds, 0
    FROM decisions JOIN call_costs USING (tool, shard, digest, segment, position, sample) WHERE best
    UNION ALL
    SELECT tool, delta, false, 0, 0, 0, 0, 1 FROM decisions WHERE eligible AND delta_is_bound
), sums AS (
    SELECT tool, tau_f, threshold, (sum(calls) OVER above)::BIGINT AS calls, sum(nats) OVER above AS nats,
           sum(cost) OVER above AS cost, sum(seconds) OVER above AS seconds, sum(bounds) OVER above AS bounds
    FROM steps WINDOW above AS (PARTITION BY tool ORDER BY tau_f DESC)
)
SELECT tool, sums.tau_f AS tau_f, coalesce(sums.tau_f = lanes.tau_f, false) AS today, calls, nats, cost, seconds
FROM sums JOIN lanes USING (tool)
WHERE threshold AND bounds = 0
ORDER BY tool, sums.tau_f;
COMMENT ON VIEW cost_frontier IS 'What the kept calls gain and cost at every hundredth of a nat and at each tool''s own tau_f. Thresholds at which an upper bound would count are left out.';
COMMENT ON COLUMN cost_frontier.tau_f IS 'threshold, nats';
COMMENT ON COLUMN cost_frontier.today IS 'whether filtered_calls was made with it';
COMMENT ON COLUMN cost_frontier.calls IS 'calls kept: one per position';
COMMENT ON COLUMN cost_frontier.nats IS 'sum of L- - L+ of the kept calls, whatever they cost';
COMMENT ON COLUMN cost_frontier.cost IS 'sum of what they cost, in the unit of the tool';
COMMENT ON COLUMN cost_frontier.seconds IS 'sum of the seconds they took';
