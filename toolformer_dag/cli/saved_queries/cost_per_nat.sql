-- What it costs to lower the loss by one nat: tokens and tool calls over the sum of delta of each tool's kept calls
SELECT tool, round(coalesce(sum(delta), 0), 2) AS nats, any_value(tokens) AS tokens,
       round(any_value(tokens) / sum(delta)) AS tokens_per_nat, any_value(calls) AS calls,
       round(any_value(calls) / sum(delta), 2) AS calls_per_nat
FROM cost_per_kept_call LEFT JOIN filtered_calls USING (tool)
GROUP BY tool
ORDER BY tool
