"""A lease of 300 ms without a fence: a holder that was paused longer than that, and replaced, still writes its payment."""
from skeleton import insert, one, pool, serve


def pay(id, amount):
    with pool.connection() as connection:
        if not one(connection, """INSERT INTO claims (id, lease) VALUES (%s, clock_timestamp() + '300 ms')
                ON CONFLICT (id) DO UPDATE SET lease = excluded.lease WHERE claims.state IS NULL AND claims.lease < clock_timestamp() RETURNING id""", id):
            done = one(connection, "SELECT 1 AS done FROM claims WHERE id = %s AND state = 'done'", id)
            return (201, {'paid': amount}) if done else (409, {})
        with connection.transaction():
            insert(connection, id, amount)
            connection.execute("UPDATE claims SET state = 'done' WHERE id = %s", (id,))
    return 201, {'paid': amount}


serve(pay)
