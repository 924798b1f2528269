-- The texts of C*, in the order of their keys, each with the calls that may stand in it.
-- Parameters: $preferences (whether `least_helpful` is filled).

-- Kept calls with the three losses. The fields from here on are those of a call in every form.
CREATE TEMP TABLE kept AS
SELECT digest, char_offset,
       {tool: tool, shard: shard, segment: segment, position: position, sample: sample, char_offset: char_offset,
        input: input, result: result, delta: scored.delta, loss_empty: loss_empty, loss_call: loss_call,
        loss_result: loss_result, chain: scored.chain} AS call
FROM (SELECT tool, shard, digest, segment, position, sample FROM filtered_calls)
JOIN loss_deltas AS scored USING (tool, shard, digest, segment, position, sample);

-- The scored call that helps least at each position of a document of C*; of equals, the first sample.
CREATE TEMP TABLE least_helpful AS
SELECT digest, char_offset,
       {tool: tool, shard: shard, segment: segment, position: position, sample: sample, char_offset: char_offset,
        input: input, result: result, delta: delta, loss_empty: loss_empty, loss_call: loss_call,
        loss_result: loss_result, chain: chain} AS call
FROM eligible SEMI JOIN augmented_corpus USING (shard, digest)
WHERE $preferences AND chain IS NULL
QUALIFY row_number() OVER (PARTITION BY tool, shard, digest, segment, position ORDER BY delta, sample) = 1;

CREATE TEMP TABLE spans AS
SELECT digest, segment, "offset", "offset" + length(text) AS "end" FROM augmented_corpus;

CREATE TEMP TABLE kept_in_text AS
SELECT spans.digest, spans.segment, list(call ORDER BY char_offset, call.tool) AS kept
FROM spans JOIN kept ON kept.digest = spans.digest AND char_offset >= "offset" AND char_offset < "end"
GROUP BY ALL;

CREATE TEMP TABLE least_helpful_in_text AS
SELECT spans.digest, spans.segment, list(call ORDER BY char_offset, call.tool, call.position) AS least_helpful
FROM spans JOIN least_helpful AS l ON l.digest = spans.digest AND char_offset >= "offset" AND char_offset < "end"
GROUP BY ALL;
