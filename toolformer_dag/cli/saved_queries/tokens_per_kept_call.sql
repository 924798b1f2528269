-- What each tool's kept calls cost in all runs: tokens through the model, with the control and without it, tool calls and seconds
SELECT tool, kept, tokens, round(tokens_per_kept_call) AS tokens_per_kept_call,
       round(tokens_per_kept_call_without_control) AS tokens_per_kept_call_without_control, calls, round(seconds, 1) AS seconds,
       round(seconds_per_kept_call, 3) AS seconds_per_kept_call
FROM cost_per_kept_call
ORDER BY tool
