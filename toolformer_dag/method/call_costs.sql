-- What scored calls cost. Reads decisions, lanes, texts, and tool_costs: the cost and seconds of every distinct call. The
-- pipeline runs it over files of one lane, the warehouse over all.

-- A chain costs all its calls, added in a fixed order, so that the sum has the same bits everywhere.
WITH links AS (
    SELECT decisions.tool, shard, digest, segment, position, sample, lanes.tool AS called, link.input AS input
    FROM (
        SELECT tool, shard, digest, segment, position, sample,
               unnest(from_json(chain, '[{"tool": "VARCHAR", "input": "VARCHAR"}]')) AS link
        FROM decisions WHERE chain IS NOT NULL
    ) AS decisions LEFT JOIN lanes ON lanes.name = link.tool
)
SELECT decisions.tool, shard, digest, segment, position, sample, coalesce(cost, 0) AS cost, coalesce(seconds, 0) AS seconds
FROM decisions LEFT JOIN texts USING (tool, shard, digest, segment)
LEFT JOIN tool_costs
    ON decisions.tool = tool_costs.tool AND decisions.input = tool_costs.input AND texts.context = tool_costs.context
WHERE chain IS NULL
UNION ALL
SELECT links.tool, shard, digest, segment, position, sample, coalesce(sum(cost ORDER BY called, links.input), 0),
       coalesce(sum(seconds ORDER BY called, links.input), 0)
FROM links LEFT JOIN texts USING (tool, shard, digest, segment)
LEFT JOIN tool_costs
    ON called = tool_costs.tool AND links.input = tool_costs.input AND texts.context = tool_costs.context
GROUP BY ALL
