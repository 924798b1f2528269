-- The questions that a model answers right with tools alone (won) or without them alone (lost), with what it wrote
SELECT benchmark, question, model, k, outcome, right(prompt, 120) AS prompt, array_to_string(gold, ' / ') AS gold,
       written_with, written_without, called || '(' || call_input || ')' AS call, call_result
FROM won_and_lost
ORDER BY outcome DESC, benchmark, model, k, question
