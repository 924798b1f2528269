-- The kept calls that lower the loss most, in their texts
SELECT tool, round(delta, 2) AS delta, right(left(text, char_offset), 60) AS before, input, result,
       substr(text, char_offset + 1, 60) AS after
FROM (FROM filtered_calls ORDER BY delta DESC LIMIT 20) JOIN documents USING (shard, digest)
ORDER BY delta DESC
