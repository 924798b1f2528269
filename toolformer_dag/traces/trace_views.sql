-- What is said of recorded calls, over measured_calls and trace_swaps: losses are stored, verdicts are SQL.
-- A call is held against other results by the first of three means (alternatives.py) that has some. Each of these results
-- is held against the others of its call in the same way, which tells how far chance goes: the threshold is what a share
-- of them exceeds. Gains are compared as shares of the loss (relative gain): the loss of an answer of
-- few likely words changes little, whatever it rests on.

COMMENT ON COLUMN trace_messages.record_id IS 'the record''s own id; null where it has none';
COMMENT ON COLUMN trace_messages.number IS 'number in the conversation, from 0: the turn of its calls';
COMMENT ON COLUMN trace_messages.role IS 'system, user, assistant, or another one as it was recorded';
COMMENT ON COLUMN trace_messages.text IS 'what was said, without calls and results';

CREATE VIEW trace_chance AS
WITH rests AS (  -- where another result does better, the answer may rest on that one, which is no chance
    SELECT conversation, turn, call, NOT any_value(failed) AND min(loss) > any_value(loss_result) AS counts
    FROM trace_swaps JOIN measured_calls USING (conversation, turn, call) GROUP BY ALL
)
SELECT a.conversation, a.turn, a.call, a.swap, any_value(a.means) AS means, any_value(a.result) AS result,
       any_value(a.overlap) AS overlap, avg(b.loss) - any_value(a.loss) AS gain, coalesce(1 - any_value(a.loss) / nullif(avg(b.loss), 0), 0) AS relative_gain,
       any_value(counts) AS counts
FROM trace_swaps AS a JOIN trace_swaps AS b USING (conversation, turn, call)
JOIN rests USING (conversation, turn, call)
WHERE a.swap <> b.swap
GROUP BY ALL;
COMMENT ON VIEW trace_chance IS 'Results that calls are held against, each with what it gains over the other ones of its call: gain by chance.';
COMMENT ON COLUMN trace_chance.swap IS 'number of the result, of those of its call';
COMMENT ON COLUMN trace_chance.means IS 'other_results of the tool, exchanged_values in the call''s own result, or results of other_tools';
COMMENT ON COLUMN trace_chance.result IS 'a result that the call is held against';
COMMENT ON COLUMN trace_chance.overlap IS 'share of the weighted words that stand in it';
COMMENT ON COLUMN trace_chance.gain IS 'mean loss with the other swapped results less that with this one, nats per token';
COMMENT ON COLUMN trace_chance.relative_gain IS 'gain as a share of the mean loss with the other swapped results';
COMMENT ON COLUMN trace_chance.counts IS 'whether it counts for the threshold: the recorded result does better than each of them';

CREATE MACRO trace_threshold(share) AS (
    SELECT CASE WHEN count(*) * share >= 1
           THEN list(relative_gain ORDER BY relative_gain DESC)[floor(count(*) * share)::INTEGER + 1] END
    FROM trace_chance WHERE counts
);
COMMENT ON MACRO trace_threshold IS 'The relative gain that at most so large a share of swapped results exceeds; NULL where there are too few to tell.';

CREATE MACRO judged_at(share) AS TABLE
WITH swapped AS (
    SELECT conversation, turn, call, any_value(means) AS means, count(*) AS swaps, avg(loss) AS loss
    FROM trace_swaps GROUP BY ALL
), chance AS (
    SELECT conversation, turn, call, list(gain ORDER BY swap) AS swapped_gains FROM trace_chance GROUP BY ALL
), last_calls AS (  -- behind them no call follows, which would be likelier after a first one, whatever that gave
    SELECT conversation, max(turn) AS last_turn FROM measured_calls GROUP BY conversation
), measured AS (
    SELECT m.*, turn < last_turn AS calls_again, least(loss_none, loss_empty) - loss_result AS delta, swapped.loss - loss_result AS gain,
           1 - loss_result / nullif(swapped.loss, 0) AS relative_gain, means, coalesce(swaps, 0) AS swaps,
           trace_threshold(share) * swapped.loss AS threshold, swapped_gains
    FROM measured_calls AS m
    LEFT JOIN swapped USING (conversation, turn, call) LEFT JOIN chance USING (conversation, turn, call)
    JOIN last_calls USING (conversation)
), told AS (
    SELECT *, CASE
        WHEN failed AND (not_judged IS NOT NULL OR calls_again) THEN 'error_result'
        WHEN failed THEN if(loss_result < loss_none, 'failure_admitted', 'success_claimed')
        WHEN not_judged IS NOT NULL THEN not_judged
        WHEN swaps = 0 THEN 'no_other_result'
        WHEN threshold IS NULL THEN 'too_few_swaps'
        WHEN means = 'other_tools' THEN if(gain > threshold AND delta > 0, 'above_other_tools', 'no_more_than_other_tools')
        WHEN gain > threshold AND delta <= 0 THEN 'as_likely_without'
        WHEN means = 'other_results' THEN if(gain > threshold, 'above_chance', 'no_more_than_others')
        ELSE if(gain > threshold, 'above_other_values', 'no_more_than_other_values') END AS reason
    FROM measured
)
SELECT conversation, record_id, source, turn, call, tool, arguments, result, delta, gain, relative_gain, threshold,
       swapped_gains, overlap,
       CASE WHEN failed THEN 'failed call'
            WHEN reason IN ('above_chance', 'above_other_values', 'above_other_tools') THEN 'helps'
            WHEN gain IS NULL OR threshold IS NULL OR means = 'other_tools' THEN 'cannot be told'
            ELSE 'does not help' END AS verdict,
       reason, means, swaps, tokens, loss_none, loss_empty, loss_result, beginning
FROM told;
COMMENT ON MACRO TABLE judged_at IS 'Every recorded call with its verdict, where so large a share of swapped results may pass for help.';

CREATE VIEW trace_calls AS FROM judged_at($share);
COMMENT ON VIEW trace_calls IS 'Every recorded call with its verdict at traces.share; `order by gain` has the answers first that rest least on their results.';
COMMENT ON COLUMN trace_calls.conversation IS 'file or split, and line or row, as in traces.jsonl:12';
COMMENT ON COLUMN trace_calls.record_id IS 'the record''s own id; null where it has none';
COMMENT ON COLUMN trace_calls.source IS 'file or split';
COMMENT ON COLUMN trace_calls.turn IS 'number of the message of the conversation, from 0; results are no messages';
COMMENT ON COLUMN trace_calls.call IS 'number of the call in its message, from 0';
COMMENT ON COLUMN trace_calls.tool IS 'name of the tool';
COMMENT ON COLUMN trace_calls.arguments IS 'arguments of the call';
COMMENT ON COLUMN trace_calls.result IS 'the recorded result; null where there is none';
COMMENT ON COLUMN trace_calls.delta IS 'min(loss_none, loss_empty) - loss_result: above 0 for many a swapped result too';
COMMENT ON COLUMN trace_calls.gain IS 'mean loss with swapped results less loss_result, nats per token; null without any';
COMMENT ON COLUMN trace_calls.relative_gain IS 'gain as a share of the mean loss with swapped results';
COMMENT ON COLUMN trace_calls.threshold IS 'the gain above which it helps: the relative gain that a share of all swapped results exceeds, times the mean loss with its own';
COMMENT ON COLUMN trace_calls.swapped_gains IS 'what each swapped result gains over the other ones';
COMMENT ON COLUMN trace_calls.overlap IS 'share of the weighted words that stand in the result: no model, the bar to beat';
COMMENT ON COLUMN trace_calls.verdict IS 'helps, does not help, cannot be told, failed call';
COMMENT ON COLUMN trace_calls.reason IS 'why, and by which means';
COMMENT ON COLUMN trace_calls.means IS 'what it was held against: other_results of the tool, exchanged_values in its own, or results of other_tools';
COMMENT ON COLUMN trace_calls.swaps IS 'results that it was held against';
COMMENT ON COLUMN trace_calls.tokens IS 'weighted tokens';
COMMENT ON COLUMN trace_calls.loss_none IS 'loss of the weighted tokens had the call never been made, nats per token';
COMMENT ON COLUMN trace_calls.loss_empty IS 'the same with the call and an empty result';
COMMENT ON COLUMN trace_calls.loss_result IS 'the same with the recorded result';
COMMENT ON COLUMN trace_calls.beginning IS 'hash of the messages before that of the call';

CREATE MACRO trace_counts(kind) AS TABLE
SELECT kind AS counted, count(*) AS calls, count(*) FILTER (verdict = 'helps') AS helps,
       count(*) FILTER (verdict = 'does not help') AS does_not_help,
       count(*) FILTER (verdict = 'cannot be told') AS cannot_be_told,
       count(*) FILTER (verdict = 'failed call') AS failed,
       round(count(*) FILTER (verdict = 'helps') / nullif(count(*) FILTER (verdict IN ('helps', 'does not help')), 0), 3)
           AS share_that_helps,
       avg(gain) AS gain, avg(overlap) AS overlap,
       sum(length(arguments) + coalesce(length(result), 0))::BIGINT AS characters
FROM trace_calls GROUP BY ALL ORDER BY calls DESC, counted;
COMMENT ON MACRO TABLE trace_counts IS 'Verdicts, mean gain and mean overlap by a column of trace_calls, whose values are in `counted`.';

CREATE VIEW trace_tools AS SELECT counted AS tool, * EXCLUDE counted FROM trace_counts(tool);
COMMENT ON VIEW trace_tools IS 'Verdicts by tool, and what its calls cost: which tools are worth their tokens.';
COMMENT ON COLUMN trace_tools.share_that_helps IS 'of the calls that help or do not, the share that help; null where none is told';
COMMENT ON COLUMN trace_tools.characters IS 'characters of all arguments and results, some four to a token';
CREATE VIEW trace_turns AS SELECT counted AS turn, * EXCLUDE counted FROM trace_counts(turn);
COMMENT ON VIEW trace_turns IS 'Verdicts by number of the message in its conversation.';
CREATE VIEW trace_sources AS
SELECT source, forms, conversations, s.calls, results, not_understood, helps, does_not_help, cannot_be_told, failed, gain,
       overlap
FROM sources_read AS s LEFT JOIN trace_counts(source) ON counted = source
ORDER BY s.calls DESC, source;
COMMENT ON VIEW trace_sources IS 'What was read of each file or split, what was not understood, and the verdicts of its calls.';
COMMENT ON COLUMN trace_sources.source IS 'file or split';
COMMENT ON COLUMN trace_sources.forms IS 'forms of its records; null where none was read';
COMMENT ON COLUMN trace_sources.conversations IS 'conversations that were read';
COMMENT ON COLUMN trace_sources.calls IS 'calls of the assistant in them';
COMMENT ON COLUMN trace_sources.results IS 'calls with a recorded result';
COMMENT ON COLUMN trace_sources.not_understood IS 'rows of trace_rejections';

CREATE VIEW trace_summary AS
SELECT format('{} calls: {} help, {} do not, {} cannot be told, {} failed; by tool: {}', count(*),
              count(*) FILTER (verdict = 'helps'), count(*) FILTER (verdict = 'does not help'),
              count(*) FILTER (verdict = 'cannot be told'), count(*) FILTER (verdict = 'failed call'),
              (SELECT coalesce(string_agg(concat(tool, ' ', concat_ws('/', helps, does_not_help, cannot_be_told, failed)), ', '), '-')
               FROM trace_tools)) AS told
FROM trace_calls;
COMMENT ON VIEW trace_summary IS 'Verdicts in a line, by tool in the same order: helps/does not/cannot be told/failed.';
