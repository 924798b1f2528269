-- What it costs to lower the loss by one nat: tokens (with the control) and tool calls over the sum of L- - L+ of each tool's kept calls
SELECT tool, round(coalesce(sum(loss_minus - loss_plus), 0), 2) AS nats, any_value(tokens) AS tokens,
       round(any_value(tokens) / sum(loss_minus - loss_plus)) AS tokens_per_nat, any_value(calls) AS calls,
       round(any_value(calls) / sum(loss_minus - loss_plus), 2) AS calls_per_nat
FROM cost_per_kept_call LEFT JOIN filtered_calls USING (tool)
GROUP BY tool
ORDER BY tool
