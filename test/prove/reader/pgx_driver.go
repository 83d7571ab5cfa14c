// The workload of the reader's test, with pgx.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/jackc/pgconn"
	"github.com/jackc/pgx/v4"
)

var ctx = context.Background()
var db *pgx.Conn

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func number(q interface {
	QueryRow(context.Context, string, ...interface{}) pgx.Row
}, sql string, values ...interface{}) (n int, err error) {
	err = q.QueryRow(ctx, sql, values...).Scan(&n)
	return
}

func code(err error) string {
	var failure *pgconn.PgError
	if errors.As(err, &failure) {
		return failure.Code
	}
	return fmt.Sprint(err)
}

func main() {
	var err error
	db, err = pgx.Connect(ctx, "")
	must(err)
	_, err = db.Exec(ctx, "SELECT 1")
	must(err)
	must(db.BeginFunc(ctx, func(tx pgx.Tx) error {
		for n := 0; n < 8; n++ {
			_, err := tx.Exec(ctx, "INSERT INTO reader (n) VALUES ($1)", n)
			must(err)
		}
		inner, err := tx.Begin(ctx)
		must(err)
		_, err = number(inner, "SELECT 1 / $1::int", 0)
		fmt.Println(code(err))
		return inner.Rollback(ctx)
	}))
	rows := make([][]interface{}, 100)
	for n := range rows {
		rows[n] = []interface{}{int32(n), "copied"}
	}
	_, err = db.CopyFrom(ctx, pgx.Identifier{"reader"}, []string{"n", "t"}, pgx.CopyFromRows(rows))
	must(err)
	var out bytes.Buffer
	_, err = db.PgConn().CopyTo(ctx, &out, "COPY reader TO STDOUT")
	must(err)
	batch := &pgx.Batch{}
	for n := 0; n < 3; n++ {
		batch.Queue("INSERT INTO reader (n) VALUES ($1)", n)
	}
	must(db.SendBatch(ctx, batch).Close())
	total, err := number(db, "SELECT count(*) FROM reader")
	must(err)
	length := 0
	series, err := db.Query(ctx, "SELECT generate_series(1, $1::int)", 1000)
	must(err)
	for series.Next() {
		length++
	}
	fmt.Println(bytes.Count(out.Bytes(), []byte("\n")), total, length)
	for _, table := range []string{"conflict_a", "conflict_b"} {
		err := db.BeginFunc(ctx, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO "+table+" (n) VALUES ($1)", 1); err != nil {
				return err
			}
			_, err := number(tx, "SELECT count(*) FROM "+table)
			return err
		})
		if err != nil {
			fmt.Println(code(err))
		}
		count, err := number(db, "SELECT count(*) FROM "+table)
		must(err)
		fmt.Println(count)
	}
	must(db.Close(ctx))
}
