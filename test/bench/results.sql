-- The values that were measured, and the comparison of idem with the alternatives

-- One line for each comparison. "ratio" says how: 'faster' is the value of the alternative
-- divided by that of idem, 'share' is the value of idem divided by that of the alternative, 'more'
-- is the difference, and 'alone' is the value of idem itself, with that of the alternative beside
-- it if there is one.
CREATE TABLE goals (
	figure int,
	what text,
	unit text NOT NULL,
	alternative text,			-- NULL: none, idem alone
	ratio text NOT NULL CHECK (ratio IN ('faster', 'share', 'more', 'alone')),
	at_least float8,			-- neither: shown only
	at_most float8,
	position int GENERATED ALWAYS AS IDENTITY,
	PRIMARY KEY (figure, what),
	CHECK (alternative IS NOT NULL OR ratio = 'alone'),
	CHECK (at_least IS NULL OR at_most IS NULL)
);

CREATE TABLE measured (
	figure int,
	what text,
	way text,
	value float8 NOT NULL,
	measured_on date NOT NULL DEFAULT current_date,
	server text NOT NULL,
	cores int NOT NULL,
	commit text NOT NULL,
	n int GENERATED ALWAYS AS IDENTITY,
	FOREIGN KEY (figure, what) REFERENCES goals
);

-- The values of one line of measured.csv, in the order in which they were measured
CREATE VIEW kept AS
	SELECT figure, what, way, measured_on, server, cores, commit,
		string_agg(value::text, ' ' ORDER BY n) AS "values"
	FROM measured GROUP BY figure, what, way, measured_on, server, cores, commit
	ORDER BY figure, what, way, measured_on;

-- What an earlier run measured, but for lines that goals.csv no longer has
CREATE TABLE earlier (LIKE kept);

CREATE FUNCTION take_earlier() RETURNS void LANGUAGE sql AS $$
	INSERT INTO measured (figure, what, way, value, measured_on, server, cores, commit)
	SELECT e.figure, e.what, e.way, v.value::float8, e.measured_on, e.server, e.cores, e.commit
	FROM earlier e JOIN goals g USING (figure, what),
		regexp_split_to_table(e."values", ' ') WITH ORDINALITY AS v (value, n)
	WHERE e.way IN ('idem', g.alternative)
	ORDER BY e.figure, e.what, e.way, v.n
$$;

CREATE TABLE remarks (figure int, text text, PRIMARY KEY (figure, text));

CREATE FUNCTION check_way() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF NEW.way <> 'idem' AND NEW.way IS DISTINCT FROM
		(SELECT alternative FROM goals WHERE figure = NEW.figure AND what = NEW.what)
	THEN
		RAISE 'goals.csv has no "%" for figure %, "%"', NEW.way, NEW.figure, NEW.what;
	END IF;
	RETURN NEW;
END $$;
CREATE TRIGGER check_way BEFORE INSERT ON measured FOR EACH ROW EXECUTE FUNCTION check_way();

-- Three significant digits
CREATE FUNCTION digits(value float8) RETURNS text LANGUAGE sql AS $$
	SELECT CASE WHEN value = 0 THEN '0'
		WHEN abs(value) >= 100 THEN to_char(value, 'FM999,999,999,999,990')
		ELSE round(value::numeric, greatest(0, 2 - floor(log(abs(value)))::int))::text END
$$;

CREATE FUNCTION with_spread(median float8, lowest float8, highest float8) RETURNS text LANGUAGE sql AS $$
	SELECT digits(median) || CASE WHEN lowest < highest THEN ' (' || digits(lowest) || ' – ' || digits(highest) || ')' ELSE '' END
$$;

CREATE VIEW medians AS
	SELECT figure, what, way, count(*) AS runs,
		percentile_cont(0.5) WITHIN GROUP (ORDER BY value) AS median, min(value) AS lowest, max(value) AS highest
	FROM measured GROUP BY figure, what, way;

CREATE VIEW results AS
	SELECT g.figure, g.what, unit, i.runs,
		i.median AS idem, i.lowest AS idem_min, i.highest AS idem_max,
		alternative, a.median AS other, a.lowest AS other_min, a.highest AS other_max,
		ratio, r.value AS reached, at_least, at_most,
		coalesce(r.value >= at_least, r.value <= at_most) AS is_reached
	FROM goals g
	JOIN medians i ON i.figure = g.figure AND i.what = g.what AND i.way = 'idem'
	LEFT JOIN medians a ON a.figure = g.figure AND a.what = g.what AND a.way = g.alternative,
		LATERAL (SELECT CASE ratio
			WHEN 'faster' THEN a.median / nullif(i.median, 0)
			WHEN 'share' THEN i.median / nullif(a.median, 0)
			WHEN 'more' THEN i.median - a.median
			WHEN 'alone' THEN i.median END AS value) r
	ORDER BY g.figure, position;

CREATE VIEW markdown (line) AS
	SELECT line FROM (
		SELECT 0, 0, '# Results'
		UNION ALL
		SELECT 1, 0, E'\nMedians, and in brackets minimum and maximum, of runs in turns. The ratio is, for times, how many times faster'
			|| ' idem is; for sizes, rates and the like, idem''s value over the other (dead tuples: the difference); without an alternative, or in times, idem''s value.'
		UNION ALL
		SELECT 2, min(figure), format(E'\nFigures %s: %s, %s cores, commit %s, %s.',
			string_agg(figure::text, ', ' ORDER BY figure), server, cores, commit, measured_on)
		FROM (SELECT DISTINCT figure, server, cores, commit, measured_on FROM measured) AS m
		GROUP BY server, cores, commit, measured_on
		UNION ALL
		SELECT 3, 0, E'\n| | what | unit | runs | idem | alternative | | ratio | to reach | |\n|---|---|---|---|---|---|---|---|---|---|'
		UNION ALL
		SELECT 4, row_number() OVER (), format('| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |',
			figure, what, unit, runs, with_spread(idem, idem_min, idem_max),
			alternative, with_spread(other, other_min, other_max),
			digits(reached),
			coalesce('at least ' || at_least, 'at most ' || at_most),
			CASE WHEN is_reached THEN 'yes' WHEN NOT is_reached THEN '**no**' END)
		FROM results
		UNION ALL
		SELECT 5, 0, '' WHERE EXISTS (SELECT FROM remarks)
		UNION ALL
		SELECT 6, row_number() OVER (ORDER BY figure, text), format('- Figure %s: %s', figure, text) FROM remarks
	) AS t (part, position, line)
	ORDER BY part, position;
