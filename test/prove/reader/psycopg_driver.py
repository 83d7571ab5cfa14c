"""The workload of the reader's test, with psycopg: prints what went wrong at each point where something has to."""
import sys

import psycopg

with psycopg.connect('', autocommit=True) as db:
    db.execute('SELECT 1')
    with db.transaction():
        for n in range(8):
            db.execute('INSERT INTO reader (n, t) VALUES (%s, %s)', (n, 'x' * n))
        try:
            with db.transaction():
                db.execute('SELECT 1 / %s', (0,))
        except psycopg.errors.DivisionByZero as error:
            print(error.sqlstate)
    with db.cursor().copy('COPY reader (n, t) FROM STDIN') as copy:
        for n in range(100):
            copy.write_row((n, 'copied'))
    with db.cursor().copy('COPY reader TO STDOUT') as copy:
        rows = sum(1 for _ in copy.rows())
    with db.pipeline():
        for n in range(3):
            db.execute('INSERT INTO reader (n) VALUES (%s)', (n,))
        total = db.execute('SELECT count(*) FROM reader')
        series = db.execute('SELECT generate_series(1, %s)', (1000,))
    print(rows, total.fetchone()[0], len(series.fetchall()))
    for table in 'conflict_a', 'conflict_b':
        try:
            with db.transaction():
                db.execute(f'INSERT INTO {table} (n) VALUES (%s)', (1,))
                db.execute(f'SELECT count(*) FROM {table}')
        except psycopg.Error as error:
            print(error.sqlstate)
        print(db.execute(f'SELECT count(*) FROM {table}').fetchone()[0])
    sys.stdout.flush()
