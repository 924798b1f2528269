-- The tables of the file of judge, over those of the stages in the lake: conversations, recorded_calls,
-- exchanged_results, call_losses, rejected_records; and judge_settings, a row.

CREATE TABLE measured_calls AS
SELECT conversation, record_id, source, turn, call, beginning, tool, arguments, result, failed,
       not_judged, tokens, loss_none, loss_empty, loss_result, overlap
FROM recorded_calls JOIN call_losses USING (shard, conversation, turn, call);
COMMENT ON TABLE measured_calls IS 'What was measured of every recorded call; trace_calls says what follows from it.';

CREATE TABLE trace_swaps AS
SELECT conversation, turn, call, unnest(range(len(swapped_losses)))::INTEGER AS swap, means,
       unnest(results[:len(swapped_losses)]) AS result,
       unnest(swapped_losses) AS loss, unnest(swapped_overlaps) AS overlap
FROM exchanged_results JOIN call_losses USING (shard, conversation, turn, call)
WHERE len(swapped_losses) > 0;
COMMENT ON TABLE trace_swaps IS 'The losses of recorded calls with the results that they are held against, nats per token.';

CREATE TABLE trace_messages AS
WITH read AS (
    SELECT conversation, record_id, from_json(messages, '[{"role": "VARCHAR", "content": "VARCHAR"}]') AS messages
    FROM conversations
)
SELECT conversation, record_id, unnest(range(len(messages)))::INTEGER AS number,
       unnest(messages).role AS role, unnest(messages).content AS text
FROM read;
COMMENT ON TABLE trace_messages IS 'What was said in the conversations; calls and their results stand in trace_calls.';

CREATE TABLE trace_rejections AS FROM rejected_records;
COMMENT ON TABLE trace_rejections IS 'What of the records could not be used as it was recorded, with the reason.';

CREATE TABLE sources_read AS
WITH read AS (
    SELECT source, string_agg(DISTINCT form, ', ' ORDER BY form) AS forms, count(*) AS conversations
    FROM conversations GROUP BY source
), made AS (
    SELECT source, count(*) AS calls, count(result) AS results FROM recorded_calls GROUP BY source
), unread AS (
    SELECT source, count(*) AS not_understood FROM rejected_records GROUP BY source
)
SELECT source, forms, coalesce(conversations, 0) AS conversations, coalesce(calls, 0) AS calls,
       coalesce(results, 0) AS results, coalesce(not_understood, 0) AS not_understood
FROM read FULL JOIN unread USING (source) LEFT JOIN made USING (source)
ORDER BY source;
COMMENT ON TABLE sources_read IS 'What was read of each file; trace_sources shows it beside the verdicts.';

CREATE TABLE trace_settings AS FROM judge_settings;
COMMENT ON TABLE trace_settings IS 'The judge, how conversations were written for it, what it read, and the share by chance.';
