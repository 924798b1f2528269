-- Tables 2 to 10 and Figure 4 of the paper, and the questions that tools won and lost. Reads outcomes, question_overlap, accuracy,
-- perplexity, costs, the tables of the stages, paper_figures and paper_examples. Shares are in per cent, as in the paper.

CREATE MACRO is_gold(gold, said) AS list_bool_or(list_transform(gold, lambda one:
    lower(trim(one)) = lower(trim(said)) OR coalesce(TRY_CAST(one AS DOUBLE) = TRY_CAST(said AS DOUBLE), false)));
COMMENT ON MACRO is_gold IS 'Whether a text is one of the right answers, as a number or without case: SELECT avg(is_gold(gold, call_result)::INT) FROM outcomes WHERE called = ''Calculator''.';
CREATE MACRO interval_end(correct, n, z) AS round(100 * wilson(correct / n, n, z), 4);
COMMENT ON MACRO interval_end IS 'End of the 95 % interval (Wilson) of a share, in per cent: z = -1.96 gives the lower, 1.96 the upper one.';

CREATE MACRO paper_table_of(benchmark) AS CASE
    WHEN starts_with(benchmark, 'LAMA ') OR starts_with(benchmark, 'question_answering (') THEN 3
    WHEN benchmark IN ('ASDiv', 'SVAMP', 'MAWPS') OR starts_with(benchmark, 'calculator (') THEN 4
    WHEN benchmark IN ('WebQuestions', 'Natural Questions', 'TriviaQA') OR starts_with(benchmark, 'wiki_search (') THEN 5
    WHEN starts_with(benchmark, 'MLQA (') OR starts_with(benchmark, 'XQuAD ') OR starts_with(benchmark, 'machine_translation (') THEN 6
    WHEN benchmark IN ('TempLAMA', 'Dateset') OR starts_with(benchmark, 'calendar (') THEN 7
END;
COMMENT ON MACRO paper_table_of IS 'The table of the paper in which a benchmark stands; the synthetic world''s questions stand beside those that ask for the same tool.';

CREATE MACRO without_seed(condition) AS regexp_replace(condition, ' [(]seed [0-9]+[)]', '');
COMMENT ON MACRO without_seed IS 'A condition without the seed of a further checkpoint: `Toolformer (seed 1)` becomes `Toolformer`.';

CREATE MACRO condition_order(condition) AS CASE
    WHEN without_seed(condition) = 'base' THEN 1 WHEN without_seed(condition) = 'base + C' THEN 2
    WHEN without_seed(condition) = 'Toolformer (disabled)' THEN 3 WHEN without_seed(condition) = 'Toolformer' THEN 4
    WHEN starts_with(condition, 'no model: ') THEN 6 ELSE 5
END;
COMMENT ON MACRO condition_order IS 'The place of a condition among the rows of a table: the paper''s four, further models, what needs no model.';

CREATE MACRO only_in_table_9(condition) AS regexp_matches(condition, ' [(]k = [0-9]+[)]( [(]All En[)])?$');
COMMENT ON MACRO only_in_table_9 IS 'Whether a condition has a k of decoding beside those of the other tables ([evaluation] decoding_k).';

CREATE VIEW answers AS
SELECT paper_table_of(benchmark) AS paper_table, replace(benchmark, ', all En)', ')') AS benchmark, question,
       condition || CASE WHEN ends_with(benchmark, ', all En)') THEN ' (All En)' ELSE '' END AS condition,
       model, k, called, calls, correct, NOT regexp_matches(benchmark, '^[a-z_]+ [(]') AS published,
       condition_order(condition) + CASE WHEN ends_with(benchmark, ', all En)') THEN 10 ELSE 0 END AS place
FROM outcomes;
COMMENT ON VIEW answers IS 'outcomes as the tables of the paper see them: questions of MLQA in English are conditions of their own (All En). published: whether the benchmark is one of the paper''s and not of the synthetic world.';
COMMENT ON COLUMN answers.paper_table IS 'number of the table of the paper in which the benchmark stands, 3 to 7; null in none';
COMMENT ON COLUMN answers.calls IS 'all calls in order: tool, input, result, and why there is none';
COMMENT ON COLUMN answers.published IS 'whether the benchmark is one of the paper''s; else it is of the synthetic world';
COMMENT ON COLUMN answers.place IS 'place among the rows of a table: the paper''s four, further models, what needs no model';

CREATE VIEW benchmark_results AS
WITH counted AS (
    SELECT paper_table, benchmark, condition, model, k, place, published,
           count(*) AS n, count(*) FILTER (correct) AS correct, count(called) AS calls
    FROM answers GROUP BY ALL
), with_all AS (
    FROM counted
    UNION ALL BY NAME
    SELECT paper_table, 'All' AS benchmark, condition, model, k, place, true AS published,
           sum(n)::BIGINT AS n, sum(correct)::BIGINT AS correct, sum(calls)::BIGINT AS calls
    FROM counted WHERE published AND paper_table < 7
    GROUP BY paper_table, condition, model, k, place HAVING count(*) > 1
)
SELECT paper_table, benchmark, condition, model, k, n, correct, 100 * correct / n AS accuracy,
       interval_end(correct, n, -1.959963984540054) AS low, interval_end(correct, n, 1.959963984540054) AS high,
       100 * calls / n AS calls, place, published
FROM with_all;
COMMENT ON VIEW benchmark_results IS 'Right answers per benchmark and condition, with 95 % intervals and the share of questions with a call, in per cent. All: every question of the paper''s benchmarks in that table.';
COMMENT ON COLUMN benchmark_results.paper_table IS 'number of the table of the paper, 3 to 7; null in none';
COMMENT ON COLUMN benchmark_results.benchmark IS 'name of the benchmark; All: every question of the paper''s benchmarks in the table';
COMMENT ON COLUMN benchmark_results.n IS 'questions';
COMMENT ON COLUMN benchmark_results.correct IS 'right answers';
COMMENT ON COLUMN benchmark_results.accuracy IS 'right answers, per cent';
COMMENT ON COLUMN benchmark_results.low IS 'lower end of its 95 % interval, per cent';
COMMENT ON COLUMN benchmark_results.high IS 'upper end of its 95 % interval, per cent';
COMMENT ON COLUMN benchmark_results.calls IS 'questions with a call, per cent';
COMMENT ON COLUMN benchmark_results.place IS 'place among the rows of a table: the paper''s four, further models, what needs no model';
COMMENT ON COLUMN benchmark_results.published IS 'whether the benchmark is one of the paper''s; else it is of the synthetic world';

CREATE MACRO paper_table(number) AS TABLE
SELECT 'ours' AS figures_of, condition AS model, benchmark, n, correct, accuracy, low, high, calls, place
FROM benchmark_results WHERE paper_table = number AND NOT only_in_table_9(condition)
UNION ALL
SELECT 'the paper', model, item, NULL, NULL, figure, NULL, NULL, NULL, 100 + place
FROM paper_figures WHERE paper_figures.paper_table = number AND measure = 'accuracy'
ORDER BY place, model, benchmark;
COMMENT ON MACRO TABLE paper_table IS 'One of the Tables 3 to 7: ours with n, right answers, per cent, 95 % interval and share of calls; then the paper''s figures.';

CREATE VIEW tool_shares AS
WITH used AS (
    SELECT paper_table, benchmark, condition, published, place, [call.tool FOR call IN calls IF call.tool <> ''] AS tools
    FROM answers WHERE k > 0
), called AS (
    SELECT * EXCLUDE (tools), unnest(CASE WHEN len(tools) = 0 THEN ['no tool'] ELSE list_distinct(tools) END) AS called
    FROM used
), counted AS (
    SELECT paper_table, benchmark, condition, called, published, count(*) AS questions FROM called GROUP BY ALL
), sized AS (
    SELECT paper_table, benchmark, condition, published, count(*) AS n FROM used GROUP BY ALL
), with_all AS (
    SELECT paper_table, benchmark, condition, called, n, questions
    FROM counted JOIN sized USING (paper_table, benchmark, condition, published)
    UNION ALL BY NAME
    SELECT paper_table, 'All' AS benchmark, condition, called, all_n AS n, sum(questions)::BIGINT AS questions
    FROM counted JOIN (
        SELECT paper_table, condition, sum(n)::BIGINT AS all_n FROM sized
        WHERE published AND paper_table < 7 GROUP BY ALL HAVING count(*) > 1
    ) USING (paper_table, condition)
    WHERE published GROUP BY ALL
)
SELECT paper_table, 'ours' AS figures_of, benchmark, condition, called, n, questions, 100 * questions / n AS share,
       interval_end(questions, n, -1.959963984540054) AS low, interval_end(questions, n, 1.959963984540054) AS high
FROM with_all
UNION ALL
SELECT paper_table, 'the paper', item, model, substr(measure, 8), NULL, NULL, figure, NULL, NULL
FROM paper_figures WHERE starts_with(measure, 'called ')
ORDER BY paper_table, figures_of, benchmark, condition, share DESC, called;
COMMENT ON VIEW tool_shares IS 'Which tool was called for how many questions, in per cent with 95 % intervals; a question with calls of two tools counts for both. The paper tells some in its text: the QA tool in 98.1 % of LAMA.';
COMMENT ON COLUMN tool_shares.paper_table IS 'number of the table of the paper, 3 to 7';
COMMENT ON COLUMN tool_shares.figures_of IS '`ours` or `the paper`';
COMMENT ON COLUMN tool_shares.benchmark IS 'name of the benchmark; All: every question of the paper''s benchmarks in the table';
COMMENT ON COLUMN tool_shares.called IS 'name in the text of the tool; `no tool` for questions without a call';
COMMENT ON COLUMN tool_shares.n IS 'questions of the benchmark; null in the paper''s rows';
COMMENT ON COLUMN tool_shares.questions IS 'those of them in which the tool was called; null in the paper''s rows';
COMMENT ON COLUMN tool_shares.share IS 'questions / n, per cent';
COMMENT ON COLUMN tool_shares.low IS 'lower end of its 95 % interval, per cent; null in the paper''s rows';
COMMENT ON COLUMN tool_shares.high IS 'upper end of its 95 % interval, per cent; null in the paper''s rows';

CREATE VIEW table_2 AS
SELECT filter_statistics.tool, filter_statistics.tau_f, filter_statistics.examples, filter_statistics.calls,
       swapped_statistics.by_chance, swapped_statistics.by_chance_low, swapped_statistics.by_chance_high,
       swapped_statistics.too_few_swaps, figure::BIGINT AS paper
FROM filter_statistics
LEFT JOIN swapped_statistics ON swapped_statistics.tool = filter_statistics.tool AND swapped_statistics.tau_f = filter_statistics.tau_f
LEFT JOIN paper_figures ON paper_table = 2 AND item = filter_statistics.tool AND "at" = filter_statistics.tau_f
ORDER BY filter_statistics.tool, filter_statistics.tau_f;
COMMENT ON VIEW table_2 IS 'Examples with calls by tool and tau_f, the calls in them, how many would be kept by chance with its 95 % interval, and the paper''s examples.';
COMMENT ON COLUMN table_2.tau_f IS 'threshold, nats';
COMMENT ON COLUMN table_2.examples IS 'texts with at least one kept call';
COMMENT ON COLUMN table_2.calls IS 'calls kept: one per position';
COMMENT ON COLUMN table_2.by_chance IS 'places that would be kept by chance: share_swapped of all places';
COMMENT ON COLUMN table_2.by_chance_low IS 'lower end of its 95 % interval';
COMMENT ON COLUMN table_2.by_chance_high IS 'upper end of its 95 % interval';
COMMENT ON COLUMN table_2.too_few_swaps IS 'whether no swap was kept and too few were made to tell 5 % from more';
COMMENT ON COLUMN table_2.paper IS 'the paper''s examples; null where it has no such tool or threshold';

CREATE VIEW table_3 AS SELECT * EXCLUDE (place) FROM paper_table(3);
COMMENT ON VIEW table_3 IS 'LAMA: see paper_table.';
CREATE VIEW table_4 AS SELECT * EXCLUDE (place) FROM paper_table(4);
COMMENT ON VIEW table_4 IS 'Mathematics, with the baselines that need no model: see paper_table.';
CREATE VIEW table_5 AS SELECT * EXCLUDE (place) FROM paper_table(5);
COMMENT ON VIEW table_5 IS 'Question answering: see paper_table.';
CREATE VIEW table_6 AS SELECT * EXCLUDE (place) FROM paper_table(6);
COMMENT ON VIEW table_6 IS 'Questions in other languages; (All En): the same questions in English. See paper_table.';
CREATE VIEW table_7 AS SELECT * EXCLUDE (place) FROM paper_table(7);
COMMENT ON VIEW table_7 IS 'Questions about time: see paper_table.';

CREATE VIEW table_8 AS
SELECT * EXCLUDE (place) FROM (
    SELECT 'ours' AS figures_of, condition AS model, source, texts AS n, tokens, perplexity, low, high, bits_per_byte,
           condition_order(condition) AS place
    FROM perplexity
    UNION ALL
    SELECT 'the paper', model, item, NULL, NULL, figure, NULL, NULL, NULL, 100 + place FROM paper_figures WHERE paper_table = 8
) ORDER BY place, model, source;
COMMENT ON VIEW table_8 IS 'Perplexity with calls disabled, by source, with n texts and the 95 % interval over texts like these; then the paper''s.';
COMMENT ON COLUMN table_8.figures_of IS '`ours` or `the paper`';
COMMENT ON COLUMN table_8.model IS 'condition of the model; in the paper''s rows its name there';
COMMENT ON COLUMN table_8.source IS 'the texts';
COMMENT ON COLUMN table_8.n IS 'number of texts; null in the paper''s rows';
COMMENT ON COLUMN table_8.low IS 'lower end of its 95 % interval over texts like these; null for a single text';
COMMENT ON COLUMN table_8.high IS 'upper end of its 95 % interval; null in the paper''s rows';
COMMENT ON COLUMN table_8.bits_per_byte IS 'bits per byte of UTF-8, which are comparable between tokenizers; null in the paper''s rows';
COMMENT ON COLUMN table_8.tokens IS 'number of predicted tokens; null in the paper''s rows';

CREATE VIEW table_9 AS
WITH calling AS (
    SELECT benchmark, model, k, count(*) AS n, count(*) FILTER (correct) AS correct, count(called) AS n_call,
           count(*) FILTER (correct AND called IS NOT NULL) AS correct_call
    FROM outcomes WHERE model IN (SELECT model FROM outcomes WHERE k > 0) GROUP BY ALL
), shares AS (
    SELECT *, n - n_call AS n_no_call, correct - correct_call AS correct_no_call FROM calling
)
SELECT 'ours' AS figures_of, benchmark, model, k, n, 100 * correct / n AS accuracy,
       interval_end(correct, n, -1.959963984540054) AS low, interval_end(correct, n, 1.959963984540054) AS high,
       n_call, 100 * correct_call / nullif(n_call, 0) AS with_call,
       interval_end(correct_call, nullif(n_call, 0), -1.959963984540054) AS with_call_low,
       interval_end(correct_call, nullif(n_call, 0), 1.959963984540054) AS with_call_high,
       n_no_call, 100 * correct_no_call / nullif(n_no_call, 0) AS without_call,
       interval_end(correct_no_call, nullif(n_no_call, 0), -1.959963984540054) AS without_call_low,
       interval_end(correct_no_call, nullif(n_no_call, 0), 1.959963984540054) AS without_call_high,
       100 * n_call / n AS calls
FROM shares
UNION ALL BY NAME
SELECT 'the paper' AS figures_of, item AS benchmark, model, "at"::BIGINT AS k,
       max(figure) FILTER (measure = 'accuracy') AS accuracy, max(figure) FILTER (measure = 'with a call') AS with_call,
       max(figure) FILTER (measure = 'without a call') AS without_call, max(figure) FILTER (measure = 'calls') AS calls
FROM paper_figures WHERE paper_table = 9 GROUP BY ALL
ORDER BY benchmark, k, figures_of, model;
COMMENT ON VIEW table_9 IS 'Right answers over k of decoding: of all questions (accuracy), of those with a call and without one, each with n and its 95 % interval, and the share of questions with a call, in per cent; the paper''s row stands beside ours.';
COMMENT ON COLUMN table_9.figures_of IS '`ours` or `the paper`';
COMMENT ON COLUMN table_9.benchmark IS 'name of the benchmark';
COMMENT ON COLUMN table_9.model IS 'the model that was asked; in the paper''s rows its name there';
COMMENT ON COLUMN table_9.n IS 'questions; null in the paper''s rows';
COMMENT ON COLUMN table_9.accuracy IS 'right answers, per cent (the paper''s All)';
COMMENT ON COLUMN table_9.low IS 'lower end of its 95 % interval, per cent; null in the paper''s rows';
COMMENT ON COLUMN table_9.high IS 'upper end of its 95 % interval, per cent; null in the paper''s rows';
COMMENT ON COLUMN table_9.n_call IS 'questions with a call; null in the paper''s rows';
COMMENT ON COLUMN table_9.with_call IS 'right answers to questions with a call, per cent (the paper''s AC); null without such a question, or where the paper has no figure';
COMMENT ON COLUMN table_9.with_call_low IS 'lower end of its 95 % interval, per cent; null without such a question, and in the paper''s rows';
COMMENT ON COLUMN table_9.with_call_high IS 'upper end of its 95 % interval, per cent; null without such a question, and in the paper''s rows';
COMMENT ON COLUMN table_9.n_no_call IS 'questions without a call; null in the paper''s rows';
COMMENT ON COLUMN table_9.without_call IS 'right answers to questions without a call, per cent (the paper''s NC); null without such a question, or where the paper has no figure';
COMMENT ON COLUMN table_9.without_call_low IS 'lower end of its 95 % interval, per cent; null without such a question, and in the paper''s rows';
COMMENT ON COLUMN table_9.without_call_high IS 'upper end of its 95 % interval, per cent; null without such a question, and in the paper''s rows';
COMMENT ON COLUMN table_9.calls IS 'questions with a call, per cent';

-- Ranked by keys alone: a large warehouse has tens of millions of calls. A hundred are enough to find five positions.
CREATE VIEW table_10 AS
WITH below AS (
    SELECT tool, shard, digest, segment, position, sample, delta FROM eligible JOIN lanes USING (tool)
    WHERE tau_f IS NULL OR delta < tau_f
    QUALIFY row_number() OVER (PARTITION BY tool ORDER BY delta DESC, digest, segment, position, shard, sample) <= 100
), rejected AS (
    FROM below ANTI JOIN filtered_calls USING (tool, digest, segment, position)
    QUALIFY row_number() OVER (PARTITION BY tool, digest, segment, position ORDER BY delta DESC, shard, sample) = 1
), near AS (
    SELECT *, true AS kept
    FROM (SELECT tool, shard, digest, segment, position, sample, delta FROM filtered_calls)
    QUALIFY row_number() OVER (PARTITION BY tool ORDER BY delta, digest, segment, position, shard, sample) <= 5
    UNION ALL
    SELECT *, false FROM rejected
    QUALIFY row_number() OVER (PARTITION BY tool ORDER BY delta DESC, digest, segment, position, shard, sample) <= 5
)
SELECT 'ours' AS figures_of, tool, kept, near.delta, tau_f, near.delta - tau_f AS distance,
       right(left(documents.text, char_offset), 120) AS before,
       coalesce(trim(chain_text(chain)), format('{}({}) -> {}', lanes.name, input, result)) AS call,
       substr(documents.text, char_offset + 1, 80) AS after,
       NULL::BOOLEAN AS useful,
       shard, digest, char_offset
FROM near
JOIN loss_deltas USING (tool, shard, digest, segment, position, sample) JOIN lanes USING (tool)
JOIN documents USING (shard, digest)
UNION ALL BY NAME
SELECT 'the paper' AS figures_of, * FROM paper_examples
ORDER BY figures_of, delta DESC, tool, digest, char_offset, shard, call;
COMMENT ON VIEW table_10 IS 'Of each tool the five kept and the five rejected calls that are nearest to tau_f, with the text around them; then the calls of the paper''s Table 10.';
COMMENT ON COLUMN table_10.figures_of IS '`ours` or `the paper`';
COMMENT ON COLUMN table_10.kept IS 'whether the call was kept; null in the paper''s rows';
COMMENT ON COLUMN table_10.before IS 'up to 120 characters of the document before the call';
COMMENT ON COLUMN table_10.call IS 'the call with its result; of a chain each call, in brackets';
COMMENT ON COLUMN table_10.after IS 'up to 80 characters of the document after the call';
COMMENT ON COLUMN table_10.tool IS 'key of the lane; in the paper''s rows the name of the tool there';
COMMENT ON COLUMN table_10.tau_f IS 'the threshold that the call was held against; null in the paper''s rows, or where there was none';
COMMENT ON COLUMN table_10.distance IS 'delta - tau_f: how far the call is above the threshold, nats; null without a threshold';
COMMENT ON COLUMN table_10.shard IS 'name of the shard; null in the paper''s rows';
COMMENT ON COLUMN table_10.digest IS 'id of the document; null in the paper''s rows';
COMMENT ON COLUMN table_10.char_offset IS 'character of the document before which the call is written; null in the paper''s rows';
COMMENT ON COLUMN table_10.useful IS 'whether a person finds the call useful, as the paper judged its own; null in ours, to be filled in';

-- The interval of an average follows from those of its shares (Zou & Donner 2008): of one benchmark it is the same, Wilson's.
CREATE VIEW figure_4 AS
WITH grouped AS (
    SELECT CASE paper_table WHEN 3 THEN 'LAMA' WHEN 4 THEN 'Math' WHEN 5 THEN 'QA' END AS benchmarks, *
    FROM benchmark_results WHERE paper_table IN (3, 4, 5) AND benchmark <> 'All' AND k IS NOT NULL
      AND NOT only_in_table_9(condition)
), averaged AS (
    SELECT benchmarks, published, model, condition, k > 0 AS tools, count(*) AS averaged, sum(n)::BIGINT AS n, avg(accuracy ORDER BY benchmark, k) AS accuracy,
           sqrt(sum((accuracy - low) ** 2 ORDER BY benchmark, k)) / count(*) AS below,
           sqrt(sum((high - accuracy) ** 2 ORDER BY benchmark, k)) / count(*) AS above
    FROM grouped GROUP BY ALL
)
SELECT 'ours' AS figures_of, benchmarks, published, condition, tools,
       CASE WHEN tools THEN 'with tools' WHEN model IN (SELECT model FROM averaged WHERE tools) THEN 'disabled' ELSE 'other' END AS curve,
       parameters, averaged, n, averaged.accuracy,
       averaged.accuracy - below AS low, averaged.accuracy + above AS high
FROM averaged JOIN (SELECT DISTINCT model, parameters FROM accuracy WHERE parameters IS NOT NULL) USING (model)
UNION ALL BY NAME
SELECT 'the paper' AS figures_of, CASE paper_table WHEN 3 THEN 'LAMA' WHEN 4 THEN 'Math' WHEN 5 THEN 'QA' END AS benchmarks,
       true AS published, model AS condition, model = 'Toolformer' AS tools,
       CASE model WHEN 'Toolformer' THEN 'with tools' WHEN 'Toolformer (disabled)' THEN 'disabled' ELSE 'other' END AS curve,
       CASE model WHEN 'OPT (66B)' THEN 66_000_000_000 WHEN 'GPT-3 (175B)' THEN 175_000_000_000 ELSE 6_700_000_000 END AS parameters,
       count(*) AS averaged, avg(figure ORDER BY item, model) AS accuracy
FROM paper_figures WHERE paper_table IN (3, 4, 5) AND measure = 'accuracy' GROUP BY paper_table, model
ORDER BY benchmarks, figures_of, published DESC, parameters, condition;
COMMENT ON VIEW figure_4 IS 'Average of the benchmarks of Tables 3 to 5 over the size of the model, in per cent with 95 % intervals (from Wilson''s of its benchmarks). curve: the same model with tools and disabled, or another one. The paper''s averages are of its tables: it prints no numbers for its smaller models.';
COMMENT ON COLUMN figure_4.figures_of IS '`ours` or `the paper`';
COMMENT ON COLUMN figure_4.benchmarks IS 'whose average it is: LAMA (Table 3), Math (4), QA (5)';
COMMENT ON COLUMN figure_4.published IS 'whether these are benchmarks of the paper; else those of the synthetic world';
COMMENT ON COLUMN figure_4.tools IS 'whether tools could be called';
COMMENT ON COLUMN figure_4.curve IS '`with tools`, `disabled` for the same model without, `other` for another one';
COMMENT ON COLUMN figure_4.averaged IS 'number of benchmarks';
COMMENT ON COLUMN figure_4.n IS 'number of their questions; null in the paper''s rows';
COMMENT ON COLUMN figure_4.accuracy IS 'mean of the benchmarks'' right answers, per cent';
COMMENT ON COLUMN figure_4.low IS 'lower end of its 95 % interval, per cent; null in the paper''s rows';
COMMENT ON COLUMN figure_4.high IS 'upper end of its 95 % interval, per cent; null in the paper''s rows';

CREATE VIEW with_and_without AS
SELECT tool.*, plain.correct AS correct_without, plain.written AS written_without, plain.p_start AS p_start_without
FROM outcomes AS plain JOIN outcomes AS tool USING (benchmark, question, model)
WHERE plain.k = 0 AND tool.k > 0;
COMMENT ON VIEW with_and_without IS 'outcomes with tools, each beside the same model''s without them.';
COMMENT ON COLUMN with_and_without.correct_without IS 'whether the answer without tools is right';
COMMENT ON COLUMN with_and_without.written_without IS 'what was written without tools';
COMMENT ON COLUMN with_and_without.p_start_without IS 'p_start of the answer without tools';
COMMENT ON COLUMN with_and_without.calls IS 'all calls of the text with tools in order: tool, input, result, and why there is none';

-- The interval is that of Agresti and Min (2005) for paired shares: Wald's, with half a question added to each of the four counts.
CREATE MACRO paired(condition_a, condition_b) AS TABLE
WITH pairs AS (
    SELECT benchmark, a.correct AS correct_a, b.correct AS correct_b
    FROM outcomes AS a JOIN outcomes AS b USING (benchmark, question)
    WHERE a.condition = condition_a AND b.condition = condition_b
), counted AS (
    SELECT coalesce(benchmark, 'All') AS benchmark, count(*) AS n, count(*) FILTER (correct_a AND NOT correct_b) AS only_a,
           count(*) FILTER (correct_b AND NOT correct_a) AS only_b
    FROM pairs GROUP BY GROUPING SETS ((benchmark), ()) HAVING count(*) > 0
), adjusted AS (
    SELECT *, (only_a - only_b) / (n + 2) AS middle, only_a + only_b + 1 AS discordant FROM counted
)
SELECT benchmark, n, only_a, only_b, 100 * (only_a - only_b) / n AS difference,
       100 * (middle - 1.959963984540054 * sqrt(discordant / (n + 2) - middle ** 2) / sqrt(n + 2)) AS low,
       100 * (middle + 1.959963984540054 * sqrt(discordant / (n + 2) - middle ** 2) / sqrt(n + 2)) AS high
FROM adjusted ORDER BY benchmark = 'All', benchmark;
COMMENT ON MACRO TABLE paired IS 'Two conditions, question by question: FROM paired(''Toolformer'', ''base + C''). Questions that only the one or only the other answers right, the difference of their shares in per cent, and its 95 % interval for paired shares. All: every question that both were asked.';

CREATE VIEW won_and_lost AS
SELECT benchmark, question, model, k, CASE WHEN correct THEN 'won' ELSE 'lost' END AS outcome,
       prompt, gold, written_without, written AS written_with, called, call_input, call_result, calls
FROM with_and_without WHERE correct <> correct_without
ORDER BY benchmark, model, k, question;
COMMENT ON VIEW won_and_lost IS 'Questions that a model answers right with tools and wrong without (won), or the other way round (lost).';
COMMENT ON COLUMN won_and_lost.k IS 'k of decoding of the answer with tools';
COMMENT ON COLUMN won_and_lost.outcome IS 'won: right with tools only; lost: right without them only';
COMMENT ON COLUMN won_and_lost.written_without IS 'what was written without tools';
COMMENT ON COLUMN won_and_lost.written_with IS 'what was written with them, calls included';
COMMENT ON COLUMN won_and_lost.calls IS 'all calls of that text in order: tool, input, result, and why there is none';

CREATE VIEW needless_calls AS
SELECT benchmark, question, model, condition, k,
       CASE WHEN correct THEN 'right anyway' WHEN correct_without THEN 'worse' ELSE 'wrong anyway' END AS outcome,
       prompt, gold, written_without, written AS written_with, called, call_input, call_result, calls
FROM with_and_without WHERE len(calls) > 0 AND (correct_without OR NOT correct)
ORDER BY benchmark, model, k, question;
COMMENT ON VIEW needless_calls IS 'Questions in which a model called a tool and its answer was not better for it: what was called, and what it wrote with tools and without.';
COMMENT ON COLUMN needless_calls.k IS 'k of decoding of the answer with tools';
COMMENT ON COLUMN needless_calls.outcome IS 'worse: right without tools only; right anyway, wrong anyway: as without tools';
COMMENT ON COLUMN needless_calls.written_without IS 'what was written without tools';
COMMENT ON COLUMN needless_calls.written_with IS 'what was written with them, calls included';
COMMENT ON COLUMN needless_calls.calls IS 'all calls of that text in order: tool, input, result, and why there is none';

CREATE VIEW needless_shares AS
WITH called AS (
    SELECT benchmark, condition, model, k, count(*) AS n, count(*) FILTER (len(calls) > 0) AS with_calls
    FROM outcomes WHERE k > 0 GROUP BY ALL
), found AS (
    SELECT benchmark, condition, count(*) AS needless, count(*) FILTER (outcome = 'worse') AS worse FROM needless_calls GROUP BY ALL
)
SELECT benchmark, condition, model, k, n, with_calls, coalesce(needless, 0) AS needless, coalesce(worse, 0) AS worse,
       100 * coalesce(needless, 0) / nullif(with_calls, 0) AS share,
       interval_end(coalesce(needless, 0), nullif(with_calls, 0), -1.959963984540054) AS low,
       interval_end(coalesce(needless, 0), nullif(with_calls, 0), 1.959963984540054) AS high
FROM called LEFT JOIN found USING (benchmark, condition)
ORDER BY benchmark, condition_order(condition), condition;
COMMENT ON VIEW needless_shares IS 'The share of needless_calls in the questions with a call, by benchmark and condition, in per cent with 95 % intervals.';
COMMENT ON COLUMN needless_shares.n IS 'questions';
COMMENT ON COLUMN needless_shares.with_calls IS 'those with a call';
COMMENT ON COLUMN needless_shares.needless IS 'those of them whose answer was not better for it';
COMMENT ON COLUMN needless_shares.worse IS 'those of them that were right without tools only';
COMMENT ON COLUMN needless_shares.share IS 'needless / with_calls, per cent; null without a call';
COMMENT ON COLUMN needless_shares.low IS 'lower end of its 95 % interval, per cent';
COMMENT ON COLUMN needless_shares.high IS 'upper end of its 95 % interval, per cent';

-- Whether a call stays at a larger threshold follows from p of its ` [`. Where it goes, the text is the one without tools,
-- unless a call begins at a later place: then p of ` [` is large enough somewhere in the text without tools.
CREATE VIEW over_min_probability AS
WITH asked AS (
    SELECT *, len(calls) > 0 AS with_call FROM with_and_without WHERE p_start IS NOT NULL
), counted AS (
    SELECT benchmark, condition, model, k, step / 20 AS min_probability, count(*) AS n,
           count(*) FILTER (with_call AND p_start >= step / 20) AS with_calls,
           count(*) FILTER (CASE WHEN with_call AND p_start < step / 20 THEN correct_without ELSE correct END) AS correct,
           count(*) FILTER (with_call AND p_start < step / 20 AND p_start_without >= step / 20) AS later
    FROM asked, range(21) AS steps(step) GROUP BY ALL
), with_all AS (
    FROM counted
    UNION ALL BY NAME
    SELECT 'All' AS benchmark, condition, model, k, min_probability, sum(n)::BIGINT AS n, sum(with_calls)::BIGINT AS with_calls,
           sum(correct)::BIGINT AS correct, sum(later)::BIGINT AS later
    FROM counted GROUP BY ALL
)
SELECT benchmark, condition, model, k, min_probability, n, with_calls, 100 * with_calls / n AS calls, correct, 100 * correct / n AS accuracy,
       interval_end(correct, n, -1.959963984540054) AS low, interval_end(correct, n, 1.959963984540054) AS high, later
FROM with_all ORDER BY benchmark, condition_order(condition), condition, min_probability;
COMMENT ON VIEW over_min_probability IS 'Calls and right answers at every twentieth of decoding.min_probability, from the recorded p of ` [`: nothing is decoded again. All: every question.';
COMMENT ON COLUMN over_min_probability.benchmark IS 'name of the benchmark; All: every question';
COMMENT ON COLUMN over_min_probability.min_probability IS 'a call starts only where p of ` [` is at least this';
COMMENT ON COLUMN over_min_probability.n IS 'questions';
COMMENT ON COLUMN over_min_probability.with_calls IS 'questions whose first call stays';
COMMENT ON COLUMN over_min_probability.calls IS 'the same, per cent';
COMMENT ON COLUMN over_min_probability.correct IS 'right answers: with tools where the call stays, else without';
COMMENT ON COLUMN over_min_probability.accuracy IS 'right answers, per cent';
COMMENT ON COLUMN over_min_probability.low IS 'lower end of its 95 % interval (Wilson), per cent';
COMMENT ON COLUMN over_min_probability.high IS 'upper end of its 95 % interval (Wilson), per cent';
COMMENT ON COLUMN over_min_probability.later IS 'questions in which a call might begin at a later place instead, which the figures leave out';

CREATE VIEW questions_in_corpus AS
SELECT benchmark, condition, count(*) AS n, count(*) FILTER (in_corpus) AS n_in, count(*) FILTER (in_corpus IS NULL) AS too_short,
       100 * count(*) FILTER (in_corpus AND correct) / nullif(n_in, 0) AS accuracy_in,
       100 * count(*) FILTER (NOT in_corpus AND correct) / nullif(n - n_in - too_short, 0) AS accuracy_out
FROM outcomes JOIN question_overlap USING (benchmark, question)
GROUP BY benchmark, condition
ORDER BY benchmark, condition_order(condition), condition;
COMMENT ON VIEW questions_in_corpus IS 'How many questions of a benchmark occur in the texts that were trained on, and how those and the others are answered, in per cent. The texts themselves: question_overlap.';
COMMENT ON COLUMN questions_in_corpus.n IS 'questions';
COMMENT ON COLUMN questions_in_corpus.n_in IS 'those that occur in a training text of C*';
COMMENT ON COLUMN questions_in_corpus.too_short IS 'those with too few words to tell';
COMMENT ON COLUMN questions_in_corpus.accuracy_in IS 'right answers to those that occur there, per cent; null where none does';
COMMENT ON COLUMN questions_in_corpus.accuracy_out IS 'right answers to those that do not, per cent; null where all do';

CREATE VIEW cost_per_kept_call AS
SELECT lanes.tool, coalesce(tokens, 0)::BIGINT AS tokens, coalesce(calls, 0)::BIGINT AS calls, coalesce(seconds, 0) AS seconds,
       coalesce(kept, 0) AS kept, tokens / kept AS tokens_per_kept_call, seconds / kept AS seconds_per_kept_call,
       coalesce(control_tokens, 0)::BIGINT AS control_tokens,
       (tokens - coalesce(control_tokens, 0)) / kept AS tokens_per_kept_call_without_control
FROM lanes
LEFT JOIN (
    SELECT tool, sum(tokens) AS tokens, sum(calls) AS calls, sum(seconds) AS seconds,
           sum(tokens) FILTER (stage IN ($control_stages)) AS control_tokens
    FROM costs GROUP BY tool
) USING (tool)
LEFT JOIN (SELECT tool, count(*) AS kept FROM filtered_calls GROUP BY tool) USING (tool)
ORDER BY lanes.tool;
COMMENT ON VIEW cost_per_kept_call IS 'What the stages of each tool cost in all runs so far, the control (calls scored with results of other documents) among them and apart, over the calls that are kept now.';
COMMENT ON COLUMN cost_per_kept_call.tokens IS 'tokens that went through the model for this tool, those of the control among them, all runs together';
COMMENT ON COLUMN cost_per_kept_call.calls IS 'calls of the tool that were made, all runs together';
COMMENT ON COLUMN cost_per_kept_call.seconds IS 'wall-clock seconds of its steps, all runs together';
COMMENT ON COLUMN cost_per_kept_call.kept IS 'calls in filtered_calls';
COMMENT ON COLUMN cost_per_kept_call.tokens_per_kept_call IS 'tokens / kept, with the control; null where none is kept';
COMMENT ON COLUMN cost_per_kept_call.seconds_per_kept_call IS 'seconds / kept; null where none is kept';
COMMENT ON COLUMN cost_per_kept_call.control_tokens IS 'those of the tokens that scored calls with results of other documents (evaluation.swapped_texts)';
COMMENT ON COLUMN cost_per_kept_call.tokens_per_kept_call_without_control IS '(tokens - control_tokens) / kept: what a kept call costs where no control is measured; null where none is kept';
