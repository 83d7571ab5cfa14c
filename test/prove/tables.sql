CREATE TABLE payments (id bigserial PRIMARY KEY, reference text, user_id text, amount int);
CREATE TABLE provider_calls (id bigserial PRIMARY KEY, reference text);
CREATE TABLE claims (id text PRIMARY KEY, state text, response text, lease timestamptz);
CREATE FUNCTION pay(reference text, amount int) RETURNS jsonb LANGUAGE sql AS $$
	INSERT INTO payments (reference, amount) VALUES ($1, $2);
	SELECT jsonb_build_object('paid', $2);
$$;
CREATE TABLE reader (n int, t text);
CREATE TABLE conflict_a (n int);
CREATE TABLE conflict_b (n int);
GRANT ALL ON ALL TABLES IN SCHEMA public TO shop;
GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO shop;
