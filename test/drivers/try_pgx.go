// What doc/drivers.md says of pgx. Called by test/drivers/try.

package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/jackc/pgconn"
	"github.com/jackc/pgx/v4"
	"github.com/jackc/pgx/v4/pgxpool"
)

const request = "0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01"

var ctx = context.Background()

func is(name string, got, expected interface{}) {
	fmt.Printf("is\t%s\t%v\t%v\n", name, got, expected)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// undone runs a query in a transaction that is rolled back.
func undone(pool *pgxpool.Pool, result interface{}, sql string, parameters ...interface{}) error {
	tx, err := pool.Begin(ctx)
	must(err)
	defer tx.Rollback(ctx)
	return tx.QueryRow(ctx, sql, parameters...).Scan(result)
}

func message(err error) string {
	var refused *pgconn.PgError
	if errors.As(err, &refused) {
		return refused.Message
	}
	return fmt.Sprint(err)
}

func casts(pool *pgxpool.Pool) {
	var ignored interface{}
	uuid := [16]byte{0x01, 0x93, 0xa1, 0xf2, 0x7d, 0x43, 0x7c, 0x5e, 0x9a, 0x10, 0x5f, 0x7c, 0x2e, 0x1b, 0x8a, 0x01}
	is("a number for $1::text", message(undone(pool, &ignored, "SELECT idem_claim($1::text, $2)", 7, "x")),
		"cannot convert 7 to Text")
	is("a parameter of any type", message(undone(pool, &ignored, "SELECT jsonb_build_object('amount', $1)", 30)),
		"could not determine data type of parameter $1")
	var claimed bool
	must(undone(pool, &claimed, "SELECT idem_claim($1::int::text, $2::uuid::text)", 7, uuid))
	is("cast to its type, then to text", claimed, true)
	var outcomes string
	must(undone(pool, &outcomes, `SELECT string_agg(outcome::text, ' ') FROM idem_claim_many($1::int[]::text[], $2::uuid[]::text[],
		wait => $3::text::interval)`, []int{7, 7}, []string{request, strings.ToUpper(request)}, "0"))
	is("casts of a batch, and one spelling of a uuid", outcomes, "claimed completed")
}

func codes(pool *pgxpool.Pool) {
	_, err := pool.Exec(ctx, "SELECT idem_claim('', 'x')")
	var refused *pgconn.PgError
	is("a PgError has the code", errors.As(err, &refused) && refused.Code == "ID400", true)
}

func autocommit(pool *pgxpool.Pool) {
	var ignored, status interface{}
	must(pool.QueryRow(ctx, "SELECT idem_claim('2', 'alone')").Scan(&ignored))
	must(undone(pool, &status, "SELECT idem_status('2', 'alone')::text"))
	is("a claim alone commits", status, "completed")
}

func balance(pool *pgxpool.Pool) (balance int) {
	must(pool.QueryRow(ctx, "SELECT balance FROM accounts WHERE id = 2").Scan(&balance))
	return
}

func batches(pool *pgxpool.Pool) {
	before := balance(pool)
	for i := 0; i < 2; i++ {
		batch := &pgx.Batch{}
		batch.Queue("SELECT idem_claim('2', 'batch')")
		batch.Queue("UPDATE accounts SET balance = balance - 1 WHERE id = 2")
		must(pool.SendBatch(ctx, batch).Close())
	}
	is("a batch with a marker pays twice", before-balance(pool), 2)

	before = balance(pool)
	batch := &pgx.Batch{}
	for i := 0; i < 2; i++ {
		batch.Queue("SELECT idem_call($1::int::text, $2::uuid::text, 'withdraw(int, bigint)', $3::jsonb, scope => 'pay', wait => '0')",
			2, request, map[string]int{"account": 2, "amount": 1})
	}
	must(pool.SendBatch(ctx, batch).Close())
	is("a batch of requests pays each once", before-balance(pool), 1)

	batch = &pgx.Batch{}
	batch.Queue("SELECT idem_claim('2', 'batch undone')")
	batch.Queue("SELECT 1 / 0")
	is("one request of a batch fails", message(pool.SendBatch(ctx, batch).Close()), "division by zero")
	var claimed bool
	must(undone(pool, &claimed, "SELECT idem_claim('2', 'batch undone')"))
	is("and the others are rolled back", claimed, true)
}

func commits(pool *pgxpool.Pool) {
	tx, err := pool.Begin(ctx)
	must(err)
	tx.Exec(ctx, "SELECT 1 / 0")
	is("COMMIT after an error is an error", tx.Commit(ctx) == pgx.ErrTxCommitRollback, true)
}

func idle(pool *pgxpool.Pool) {
	single, err := pgxpool.Connect(ctx, "pool_max_conns=1")
	must(err)
	defer single.Close()
	var pid int
	var ended bool
	must(single.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&pid))
	must(pool.QueryRow(ctx, "SELECT pg_terminate_backend($1, 60000)", pid).Scan(&ended))
	id := make([]byte, 16)
	rand.Read(id)
	result, err := pay(ctx, single, 2, hex.EncodeToString(id), 1)
	must(err)
	is("the connection of the pool was lost before", result, `{"paid": 1}`)
}

func main() {
	dsn := ""
	if os.Getenv("IDEM_POOLED") != "" {
		dsn = "statement_cache_mode=describe"
	}
	pool, err := pgxpool.Connect(ctx, dsn)
	must(err)
	defer pool.Close()
	if os.Args[1] == "repeat" {
		for i := 0; i < 12; i++ {
			id := make([]byte, 16)
			rand.Read(id)
			_, err := pay(ctx, pool, 2, hex.EncodeToString(id), 1)
			must(err)
			fmt.Println(200)
		}
		return
	}
	if os.Args[1] == "pay" {
		account, _ := strconv.Atoi(os.Args[2])
		amount, _ := strconv.ParseInt(os.Args[4], 10, 64)
		result, err := pay(ctx, pool, account, os.Args[3], amount)
		var refused *pgconn.PgError
		if err == nil {
			fmt.Println(200, result)
		} else if errors.As(err, &refused) && strings.HasPrefix(refused.Code, "ID") {
			fmt.Println(refused.Code[2:], refused.Message)
		} else if refused != nil && refused.Code == "40001" {
			fmt.Println(503, refused.Message)
		} else {
			must(err)
		}
		return
	}
	for _, part := range []func(*pgxpool.Pool){casts, codes, autocommit, batches, commits, idle} {
		part(pool)
	}
}
