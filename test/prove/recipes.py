"""Services made of the recipes in examples/: recipes.py NAME. Each answers POST /pay {"id"}; the same id is the same request."""
import sys

import psycopg

sys.path.insert(0, __file__.replace('recipes.py', 'faulty'))
from skeleton import one, pool, serve


def use_item(connection, id):    # 1_redis_cache; what the cache would answer is left out
    version, = one(connection, 'SELECT version FROM items WHERE id = 1')
    one(connection, "SELECT use_item('ann', %s, 1, %s)", id, version)
    return 200, {'used': id}


def create_group(connection, id):    # 2_leader_and_followers
    outcome, token, ids, _ = one(connection, "SELECT * FROM begin_group('ann', %s, '0', '400 ms')", id)
    if outcome == 'in_progress':
        members = ['ann', 'bob'] if ids else []
        return (201, ids) if ids and one(connection, "SELECT heal_group('ann', %s, %s, %s)", id, psycopg.types.json.Jsonb(ids), members)[0] else (409, {})
    if outcome == 'claimed':
        ids = psycopg.types.json.Jsonb(ids)
        for step, *more in ('add_group', 'friends'), ('add_members', ['ann', 'bob']), ('add_conversation',), ('complete_group',):
            one(connection, f"SELECT {step}('ann', %s, %s, %s{', %s' * len(more)})", id, token, ids, *more)
        ids = ids.obj
    return 201, ids


def order(connection, id):    # 3_outbox
    wanted = psycopg.types.json.Jsonb({'item': 'tea', 'quantity': 1})
    outcome, result, token = one(connection, "SELECT * FROM begin_order('ann', %s, %s)", id, wanted)
    if outcome == 'claimed':
        result, = one(connection, "SELECT complete_order('ann', %s, %s, %s)", id, token, wanted)
    return (201, result) if result else (409, {})


def run_of(connection, id):    # 4_claim_or_await
    return 200, {'run': str(one(connection, "SELECT run_of('tenant', %s)", id)[0])}


def sink(connection, id):    # 7_sink
    connection.execute("INSERT INTO payments VALUES ('ann', %s, 1)", (id,))
    return 200, {}


def pay(id, amount):
    try:
        with pool.connection() as connection:
            return globals()[sys.argv[1]](connection, id)
    except psycopg.Error as error:
        return (409 if error.sqlstate in ('ID409', 'ID410') else 503), {'error': str(error)}


serve(pay)
