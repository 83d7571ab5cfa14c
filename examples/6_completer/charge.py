# Charges at a payment provider and records the charge: the five steps of doc/leases.md, with psycopg 3 and without the
# client for Python. recipe.sql of this folder has several steps and a completer that runs by
# itself. The tables are in doc/leases.md, "A complete program", which also says what to mind.
#
# Yours are the program that calls pay(), and the provider. It has
#
#	charge(reference, amount)	executes a charge, and returns its id. Raises Refused for a definite no, such as
#								"402 card declined"
#	find(reference)				the id of the charge or, for 404, None
#	deduplicates				true if charge() passes the reference as idempotency key. The provider must then keep
#								its keys for longer than the ttl of the scope
#
# After any other error (ID410, LeaseEnded, no clear answer of the provider, a lost connection) answer 503 and do nothing
# else. The client's retry, or a completer, calls pay() again, and goes on once the lease has lapsed.
#
# The pay() of a successor blocks for LONGEST while it asks a provider that does not deduplicate, counted from the moment
# when it takes over: no holder sends anything after its lease.

import concurrent.futures, json, time
from psycopg.types.json import Jsonb

SCOPE = 'charges'
LEASE = 30      # seconds
LONGEST = 60    # seconds after a call was sent in which the provider may still execute it

threads = concurrent.futures.ThreadPoolExecutor()

class LeaseEnded(Exception):
    pass

class Refused(Exception):    # nothing was charged, and nothing will be
    pass

class Holder:
    def __init__(self, database, user, request, token, progress):
        self.database, self.key, self.progress = database, (user, request, token), progress
        self.renew()

    def renew(self, **more):    # raises ID410 if another holder has the request
        before = time.monotonic()
        self.progress.update(more)
        self.database.execute('SELECT idem_extend(%s, %s, %s, make_interval(secs => %s), %s, %s)',
                              (*self.key, LEASE, Jsonb(self.progress), SCOPE))
        self.ends = before + LEASE

    def call(self, function, *arguments):
        def send():
            if time.monotonic() > self.ends:    # we were paused, and may have been replaced
                raise LeaseEnded
            return function(*arguments)
        future = threads.submit(send)
        while not concurrent.futures.wait([future], LEASE / 3).done:
            self.renew()
        return future.result()

def ask(holder, provider, reference):
    enough = time.monotonic() + LONGEST
    while True:
        last = time.monotonic() > enough
        charge = holder.call(provider.find, reference)
        if charge or last:      # before that, None can mean: it is under way
            return charge
        time.sleep(LEASE / 10)
        holder.renew()

def pay(database, provider, user, request, amount):
    assert database.autocommit
    outcome, result, progress, token = database.execute("""
        SELECT outcome, result, progress, token
        FROM idem_lease(%s, %s, scope => %s, fingerprint => idem_fingerprint(%s), wait => '0',
                        lease => make_interval(secs => %s), progress => %s)""",
        (user, request, SCOPE, Jsonb({'amount': amount}), LEASE, Jsonb({'amount': amount}))).fetchone()
    if outcome != 'claimed':    # also mismatch: the same id with another amount
        return outcome, result
    holder = Holder(database, user, request, token, progress or {'amount': amount})
    reference = json.dumps([user, request])

    charge = holder.progress.get('charge')
    if not charge and 'begun' in holder.progress and not provider.deduplicates:
        charge = ask(holder, provider, reference)
    if not charge:
        holder.renew(begun=True)
        try:
            charge = holder.call(provider.charge, reference, holder.progress['amount'])
        except Refused as refusal:
            error = {'error': str(refusal)}
            with database.transaction():
                database.execute('SELECT idem_fence(%s, %s, %s, %s)', (*holder.key, SCOPE))
                database.execute('SELECT idem_fail(%s, %s, %s, %s, %s)', (user, request, Jsonb(error), token, SCOPE))
            return 'failed', error
    holder.renew(charge=charge)
    result = {'charge': charge}
    with database.transaction():
        database.execute('SELECT idem_fence(%s, %s, %s, %s)', (*holder.key, SCOPE))
        database.execute('INSERT INTO charges VALUES (%s, %s)', (reference, charge))
        database.execute('SELECT idem_complete(%s, %s, %s, %s, %s)', (user, request, Jsonb(result), token, SCOPE))
    return 'completed', result
