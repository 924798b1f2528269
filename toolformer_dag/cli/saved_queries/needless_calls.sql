-- The calls after which an answer is no better than without tools, those that made it worse first
SELECT benchmark, question, model, k, outcome, right(prompt, 120) AS prompt, array_to_string(gold, ' / ') AS gold,
       called || '(' || call_input || ')' AS call, call_result, written_with, written_without
FROM needless_calls
ORDER BY outcome <> 'worse', benchmark, model, k, question
