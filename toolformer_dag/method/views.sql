-- Views and macros over decisions, curves and the tables that the stages declare, beside those of kept_by_chance.sql.

-- What follows stands here and not in kept_by_chance.sql, whose text is in the fingerprint of calls that were filtered by chance.
COMMENT ON COLUMN swapped_statistics.ratio IS 'share_swapped / share; null where no swapped place is kept with its own results';
COMMENT ON COLUMN swapped_statistics.fdr IS 'share of the kept places that are kept by chance; null where none is kept, or none was swapped';
COMMENT ON COLUMN swapped_statistics.fdr_high IS 'its one-sided 95 % bound; null where none is kept, or none was swapped';

ALTER VIEW chance_thresholds RENAME TO estimated_thresholds;
CREATE VIEW chance_thresholds AS SELECT *, fdr_high <= by_chance AS with_confidence FROM estimated_thresholds;
COMMENT ON VIEW estimated_thresholds IS 'chance_thresholds without with_confidence.';
COMMENT ON VIEW chance_thresholds IS 'Per tool and false discovery rate: the smallest threshold whose estimated rate is at most that (tau_f) and whose 95 % bound is (tau_f_high), and where there is none, why, and how many swapped places would do (swaps_needed).';
COMMENT ON COLUMN estimated_thresholds.fdr IS 'estimated false discovery rate there; null where none has the rate';
COMMENT ON COLUMN estimated_thresholds.fdr_high IS 'its one-sided 95 % bound, which may be above by_chance; null where none has the rate';
COMMENT ON COLUMN estimated_thresholds.tau_f_high IS 'the smallest threshold whose 95 % bound is at most the rate; null where none is';
COMMENT ON COLUMN estimated_thresholds.verdict IS 'certified: the estimate fdr is at most by_chance, which its 95 % bound need not be (with_confidence); else why no threshold is';
COMMENT ON COLUMN chance_thresholds.with_confidence IS 'whether the 95 % bound fdr_high is at most by_chance too; null where none has the rate';

CREATE VIEW loss_deltas AS
SELECT $loss_deltas
FROM decisions;

CREATE VIEW eligible AS
SELECT $loss_deltas
FROM decisions WHERE eligible;
COMMENT ON VIEW eligible IS 'Scored calls that only the threshold decides.';
COMMENT ON COLUMN eligible.reason IS 'null: nothing but the threshold decides on these calls';

-- Outside of strings only names stand before `=`; the rest is JSON as it is.
CREATE MACRO as_object(input) AS
    '{' || array_to_string(list_transform(regexp_extract_all(input, '"(?:[^"\\]|\\.)*"|[^"]+'),
        lambda piece: CASE WHEN piece[1] = '"' THEN piece
                      ELSE regexp_replace(piece, '([^\s,={}\[\]":]+)=', '"\1":', 'g') END), '') || '}';
COMMENT ON MACRO as_object IS 'Named arguments as the text of a JSON object, if they are some; see arguments_of.';
CREATE MACRO arguments_of(input) AS
    CASE WHEN contains(input, '=') AND json_valid(as_object(input)) THEN as_object(input)::JSON END;
COMMENT ON MACRO arguments_of IS 'The named arguments of an input as JSON, NULL of a text: SELECT arguments_of(input)->>''city'' FROM loss_deltas.';

CREATE MACRO chain_text(chain) AS
    array_to_string(list_transform(from_json(chain, '[{"tool": "VARCHAR", "input": "VARCHAR", "result": "VARCHAR"}]'),
        lambda one: ' [' || one.tool || '(' || one.input || ') -> ' || one.result || ']'), '');
COMMENT ON MACRO chain_text IS 'The calls of a chain with their results, as they stand in the text: SELECT chain_text(chain) FROM filtered_calls WHERE chain IS NOT NULL.';

CREATE VIEW calls AS
SELECT decisions.tool, decisions.shard, decisions.digest, decisions.domain, decisions.date, documents.url,
       documents.title, segment, position, sample, source, kept, reason, best, delta, echo, decisions.tau_f, distance,
       substr(text, greatest(1, char_offset - 79), least(80, char_offset)) AS before,
       coalesce(chain_text(chain), ' [' || lanes.name || '(' || input || ') -> ' || result || ']') AS call,
       substr(text, char_offset + 1, 80) AS after,
       input, arguments_of(input) AS arguments, result, chain, coalesce(json_array_length(chain), 1) AS depth, need, p_api,
       loss_empty, loss_call, loss_before, loss_result, loss_minus, loss_plus, delta_is_bound, char_offset, text_offset,
       texts.characters, texts.tokens
FROM decisions LEFT JOIN lanes USING (tool) LEFT JOIN texts USING (tool, shard, digest, segment)
LEFT JOIN documents ON documents.rowid = decisions.document;
COMMENT ON VIEW calls IS 'Every scored call in its text, with its verdict: SELECT before, call, after FROM calls WHERE kept ORDER BY delta DESC LIMIT 10.';
COMMENT ON COLUMN calls.before IS 'up to 80 characters of the document before the call';
COMMENT ON COLUMN calls.call IS 'the call with its result, as it would stand in the text';
COMMENT ON COLUMN calls.after IS 'up to 80 characters of the document after the call';
COMMENT ON COLUMN calls.arguments IS 'the named arguments as JSON; null where the call takes one text';
COMMENT ON COLUMN calls.depth IS 'how many calls stand there: 1 for a single call';
COMMENT ON COLUMN calls.url IS 'address of the document';
COMMENT ON COLUMN calls.title IS 'title of the document';

CREATE VIEW distinct_calls AS
SELECT tool, shard, digest, segment, position, source, input, any_value(result) AS result, chain, count(*) AS samples,
       max(delta) AS delta, bool_or(kept) AS kept, any_value(domain) AS domain, any_value(date) AS date
FROM decisions GROUP BY tool, shard, digest, segment, position, source, input, chain;
COMMENT ON VIEW distinct_calls IS 'Scored calls, each once however often it was sampled: SELECT tool, input, result, delta FROM distinct_calls WHERE kept ORDER BY delta DESC.';
COMMENT ON COLUMN distinct_calls.samples IS 'how often it was sampled at the position';
COMMENT ON COLUMN distinct_calls.delta IS 'largest delta of its samples, which differ by rounding alone; null where the call was not judged';
COMMENT ON COLUMN distinct_calls.kept IS 'whether one of its samples stays';

COMMENT ON MACRO why_not IS 'Why a call would not stay at a threshold tau, the first reason that applies; NULL where it would.';

CREATE MACRO kept_at(tau) AS TABLE
SELECT $loss_deltas
FROM decisions
WHERE CASE WHEN NOT best OR why_not(NULL, best, delta, tau) IS NOT NULL THEN false
           WHEN delta_is_bound THEN error(format('{} has calls without L(c) at this tau: lower filtering.loss_floor', tool))
           ELSE true END;
COMMENT ON MACRO TABLE kept_at IS 'The calls that would stay at another threshold: SELECT tool, count(*) FROM kept_at(0.8) GROUP BY tool.';

CREATE VIEW funnel AS
WITH steps(step, stage, what) AS (
    VALUES (1, 'raw_shards', 'documents'), (2, 'heuristic_subset', 'texts'), (3, 'scored_candidates', 'samples'),
           (4, 'scored_candidates', 'calls'), (5, 'tool_results', 'calls with a result'),
           (6, 'loss_deltas', 'calls that do not look ahead'), (7, 'loss_deltas', 'calls that help'),
           (8, 'filtered_calls', 'calls'), (9, 'filtered_calls', 'texts'), (10, 'augmented_corpus', 'texts')
), counts(tool, step, count) AS (
    SELECT tool, 1, (SELECT count(*) FROM documents) FROM lanes
    UNION ALL
    SELECT tool, 2, count(*) FROM texts GROUP BY tool
    UNION ALL
    SELECT tool, unnest([3, 4]), unnest([count(*), count(input)]) FROM sampled GROUP BY tool
    UNION ALL
    SELECT tool, unnest([5, 6]), unnest([count(*), count(*) FILTER (reason IS DISTINCT FROM 'looks_ahead')])
    FROM loss_deltas GROUP BY tool
    UNION ALL
    SELECT tool, 7, count(*) FILTER (delta > 0) FROM eligible GROUP BY tool
    UNION ALL
    SELECT tool, unnest([8, 9]), unnest([count(*), count(DISTINCT (digest, segment))]) FROM filtered_calls GROUP BY tool
    UNION ALL
    SELECT tool, 10, count(*)
    FROM (SELECT unnest(tools) AS tool FROM augmented_corpus) GROUP BY tool  -- DuckDB 1 takes no unnest of what it groups by
)
SELECT tool, step, stage, what, coalesce(count, 0) AS count
FROM lanes CROSS JOIN steps LEFT JOIN counts USING (tool, step)
WHERE NOT (what = 'calls that help' AND tool IN (SELECT tool FROM loss_deltas WHERE delta_is_bound AND delta > 0))
ORDER BY tool, step;
COMMENT ON VIEW funnel IS 'What is left after every stage, per tool; without the calls that help where filtering.loss_floor leaves that open.';
COMMENT ON COLUMN funnel.step IS 'number of the row, from 1';
COMMENT ON COLUMN funnel.stage IS 'the stage that left them';
COMMENT ON COLUMN funnel.what IS 'what is counted';
COMMENT ON COLUMN funnel.count IS 'how many';

CREATE VIEW candidate_sources AS
WITH proposed AS (
    SELECT tool, source, count(*) AS candidates, count(input) AS calls FROM sampled GROUP BY ALL
), scored AS (
    SELECT tool, source, count(*) FILTER (loss_result IS NOT NULL) AS scored,
           count(DISTINCT (digest, segment, position)) FILTER (eligible) AS places,
           count(*) FILTER (kept) AS kept
    FROM decisions GROUP BY ALL
), control AS (
    SELECT tool, source, count(*) AS swapped, count(*) FILTER (delta >= tau_f) AS kept_swapped,
           coalesce(sum((delta >= tau_f)::INTEGER * weight), 0)::DOUBLE AS decoys, sum(weight)::DOUBLE AS weights
    FROM (
        SELECT tool, other.source, max(other.delta) AS delta,
               1 / count(*) OVER (PARTITION BY tool, other.source, digest, segment, position) AS weight
        FROM $control AS other JOIN decisions AS own USING (tool, shard, digest, segment, position, sample)
        WHERE own.eligible AND other.reason IS NULL GROUP BY tool, other.source, digest, segment, position, swap
    ) JOIN lanes USING (tool) GROUP BY ALL
), estimated AS (
    SELECT tool, source, candidates, calls, coalesce(scored, 0) AS scored, coalesce(places, 0) AS places,
           coalesce(kept, 0) AS kept, coalesce(kept, 0) / candidates AS share, coalesce(swapped, 0) AS swapped,
           coalesce(kept_swapped, 0) AS kept_swapped,
           unnest(chance_estimates(coalesce(decoys, 0), coalesce(weights, 0), coalesce(places, 0), coalesce(kept, 0)))
    FROM proposed LEFT JOIN scored USING (tool, source) LEFT JOIN control USING (tool, source)
)
SELECT *, kept_swapped = 0 AND coalesce(fdr > 0.05, false) AS too_few_swaps
FROM estimated
ORDER BY tool, source;
COMMENT ON VIEW candidate_sources IS 'What each source of calls ([tools.NAME] proposals) yields, calls after others among them: how many were scored and kept, and how many would be kept by chance. The saved query yield_by_source has their tokens.';
COMMENT ON COLUMN candidate_sources.source IS 'model, rule, or the name of a file';
COMMENT ON COLUMN candidate_sources.candidates IS 'calls, and samples that were discarded; calls after others (chains) among them, which the model samples';
COMMENT ON COLUMN candidate_sources.calls IS 'those of them that are calls; of a chain its last call';
COMMENT ON COLUMN candidate_sources.scored IS 'calls that have losses';
COMMENT ON COLUMN candidate_sources.places IS 'positions with calls that only the threshold decides';
COMMENT ON COLUMN candidate_sources.kept IS 'those that the filter keeps: one per position';
COMMENT ON COLUMN candidate_sources.share IS 'kept / candidates';
COMMENT ON COLUMN candidate_sources.swapped IS 'swaps of the control';
COMMENT ON COLUMN candidate_sources.kept_swapped IS 'those that would be kept';
COMMENT ON COLUMN candidate_sources.by_chance IS 'places that would be kept by chance';
COMMENT ON COLUMN candidate_sources.by_chance_low IS 'lower end of its 95 % interval';
COMMENT ON COLUMN candidate_sources.by_chance_high IS 'upper end of its 95 % interval';
COMMENT ON COLUMN candidate_sources.fdr IS 'share of the kept places that are kept by chance; null where none is kept';
COMMENT ON COLUMN candidate_sources.fdr_high IS 'its one-sided 95 % bound; null where none is kept';
COMMENT ON COLUMN candidate_sources.too_few_swaps IS 'whether no swap was kept and too few were made to tell 5 % from more';

CREATE VIEW offset_statistics AS
WITH placed AS (
    SELECT tool, delta, least(600, text_offset // 100 * 100) AS from_character FROM decisions WHERE best
)
SELECT tool, from_character, count(*) AS places,
       CASE WHEN bool_and(exact_above IS NULL) OR quantile_disc(delta, 0.5) > any_value(exact_above) THEN median(delta) END AS delta,
       CASE WHEN bool_and(exact) THEN count(*) FILTER (delta >= tau_f) END AS kept,
       CASE WHEN bool_and(exact) THEN count(*) FILTER (delta >= tau_f) / count(*) END AS share
FROM placed
JOIN (SELECT *, coalesce(tau_f > exact_above, true) AS exact FROM lanes JOIN loss_floors USING (tool)) USING (tool)
GROUP BY tool, from_character
ORDER BY tool, from_character;
COMMENT ON VIEW offset_statistics IS 'By distance of the call from the beginning of its text, in hundreds of characters (600: and more): places, median of their best deltas, and what is kept at the tool''s tau_f; NULL where filtering.loss_floor leaves that open. z stands before the whole text, so that delta falls with the distance.';
COMMENT ON COLUMN offset_statistics.from_character IS 'distance of the call from the beginning of its text, rounded down to hundreds';
COMMENT ON COLUMN offset_statistics.places IS 'positions with eligible calls';
COMMENT ON COLUMN offset_statistics.delta IS 'median of their best deltas, nats';
COMMENT ON COLUMN offset_statistics.kept IS 'kept at the tool''s tau_f';
COMMENT ON COLUMN offset_statistics.share IS 'kept / places';

CREATE VIEW curve_statistics AS
WITH ends AS (
    SELECT tool, round(min(delta) * 100)::INTEGER AS low, round(max(delta) * 100)::INTEGER + 1 AS high FROM curves GROUP BY tool
), steps AS (
    SELECT tool, unnest(range(low, high + 1)) AS bin FROM ends
), counts AS (
    SELECT tool, bin / 100 AS tau_f, sum(scored) OVER above AS scored, sum(best) OVER above AS calls,
           sum(texts) OVER above AS examples, sum(control) OVER above AS kept, sum(swapped) OVER above AS kept_swapped,
           sum(weight) OVER above AS weight
    FROM steps LEFT JOIN (SELECT *, round(delta * 100)::INTEGER AS bin FROM curves) USING (tool, bin)
    WINDOW above AS (PARTITION BY tool ORDER BY bin DESC)
)
SELECT *, kept_swapped = 0 AND coalesce(fdr > 0.05, false) AS too_few_swaps
FROM (
    SELECT tool, tau_f, coalesce(scored, 0)::BIGINT AS scored, coalesce(calls, 0)::BIGINT AS calls,
           coalesce(examples, 0)::BIGINT AS examples, coalesce(kept, 0)::BIGINT AS kept,
           coalesce(kept_swapped, 0)::BIGINT AS kept_swapped,
           unnest(chance_estimates(coalesce(weight, 0)::DOUBLE, swapped, places, coalesce(calls, 0)))
    FROM counts JOIN control_sizes USING (tool) JOIN loss_floors USING (tool)
    WHERE exact_above IS NULL OR tau_f > exact_above
)
ORDER BY tool, tau_f;
COMMENT ON VIEW curve_statistics IS 'swapped_statistics at every hundredth of a nat, from the smallest delta to beyond the largest; below and above, counts do not change. Thresholds at which an upper bound would count are left out.';
COMMENT ON COLUMN curve_statistics.tau_f IS 'threshold, nats';
COMMENT ON COLUMN curve_statistics.scored IS 'eligible calls at or above it';
COMMENT ON COLUMN curve_statistics.calls IS 'calls kept: one per position';
COMMENT ON COLUMN curve_statistics.examples IS 'texts with at least one kept call';
COMMENT ON COLUMN curve_statistics.kept IS 'of the swapped places, those kept with their own results';
COMMENT ON COLUMN curve_statistics.kept_swapped IS 'swaps kept with the results of other documents';
COMMENT ON COLUMN curve_statistics.by_chance IS 'places that would be kept by chance: share_swapped of all places';
COMMENT ON COLUMN curve_statistics.by_chance_low IS 'lower end of its 95 % interval';
COMMENT ON COLUMN curve_statistics.by_chance_high IS 'upper end of its 95 % interval';
COMMENT ON COLUMN curve_statistics.fdr IS 'share of the kept places that are kept by chance; null where none is kept';
COMMENT ON COLUMN curve_statistics.fdr_high IS 'its one-sided 95 % bound; null where none is kept';
COMMENT ON COLUMN curve_statistics.too_few_swaps IS 'whether no swap was kept and too few were made to tell 5 % from more';
