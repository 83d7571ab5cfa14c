// What doc/drivers.md says of JDBC. Called by test/drivers/try.

import java.sql.*;
import java.util.*;
import javax.sql.DataSource;
import java.lang.reflect.Proxy;
import org.postgresql.ds.PGSimpleDataSource;
import org.postgresql.util.PSQLException;

public class TryJdbc {
    static final UUID REQUEST = UUID.fromString("0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01");

    static void line(Object... cells) {
        StringJoiner line = new StringJoiner("\t");
        for (Object cell : cells) line.add(String.valueOf(cell));
        System.out.println(line);
    }

    static void is(String name, Object got, Object expected) {
        line("is", name, got, expected);
    }

    static Connection connect() throws SQLException {
        return DriverManager.getConnection(System.getenv("JDBC_URL") +
            (System.getenv("IDEM_POOLED") != null ? "&prepareThreshold=0" : ""));
    }

    /** The connection, but close() does nothing. */
    static Connection open(Connection one) {
        return (Connection) Proxy.newProxyInstance(TryJdbc.class.getClassLoader(), new Class[] {Connection.class},
            (proxy, method, arguments) -> method.getName().equals("close") ? null : method.invoke(one, arguments));
    }

    static void casts(Connection connection) throws SQLException {
        is("setString needs no cast for the ids", PayJdbc.value(connection, "SELECT idem_claim(?, ?)", "7", REQUEST.toString()), true);
        for (Object user : List.of("7", 7, 7L)) {
            for (Object request : List.of(REQUEST, REQUEST.toString())) {
                is("ids of other types", PayJdbc.value(connection, "SELECT idem_claim(?, ?)", user, request), false);
            }
        }
        is("casts of a batch, and one spelling of a uuid", PayJdbc.value(connection,
            "SELECT outcome FROM idem_claim_many(?::int[]::text[], ?::uuid[]::text[], wait => ?::text::interval)",
            connection.createArrayOf("int", new Object[] {7}),
            connection.createArrayOf("text", new Object[] {REQUEST.toString().toUpperCase()}), "0"), "completed");
        connection.rollback();
    }

    static void codes(Connection connection) throws SQLException {
        try {
            PayJdbc.value(connection, "SELECT idem_claim('', 'x')");
        } catch (SQLException error) {
            is("class and code of ID400", error.getClass() + error.getSQLState(), PSQLException.class + "ID400");
        }
        connection.rollback();
    }

    static Object status(String request) throws SQLException {
        try (Connection other = connect()) {
            return PayJdbc.value(other, "SELECT idem_status('2', ?)", request);
        }
    }

    static void autocommit() throws SQLException {
        try (Connection fresh = connect()) {
            is("autocommit is on", fresh.getAutoCommit(), true);
            PayJdbc.value(fresh, "SELECT idem_claim('2', 'alone')");
            is("a claim alone commits", status("alone"), "completed");
            fresh.setAutoCommit(false);
            PayJdbc.value(fresh, "SELECT idem_claim('2', 'not alone')");
            is("without autocommit it does not", status("not alone"), null);
        }
    }

    static long balance(Connection connection) throws SQLException {
        return (Long) PayJdbc.value(connection, "SELECT balance FROM accounts WHERE id = 2");
    }

    static void batches(Connection connection) throws SQLException {
        long before = balance(connection);
        for (int i = 0; i < 2; i++) {
            try (Statement batch = connection.createStatement()) {
                batch.addBatch("SELECT idem_claim('2', 'batch')");
                batch.addBatch("UPDATE accounts SET balance = balance - 1 WHERE id = 2");
                is("a claim in a batch returns 0", Arrays.toString(batch.executeBatch()), "[0, 1]");
            }
            connection.commit();
        }
        is("a batch with a marker pays twice", before - balance(connection), 2L);
        before = balance(connection);
        try (PreparedStatement batch = connection.prepareStatement(
                "SELECT idem_call(?::int::text, ?::uuid::text, 'withdraw(int, bigint)', ?::jsonb, scope => 'pay', wait => '0')")) {
            for (int i = 0; i < 2; i++) {
                batch.setInt(1, 2);
                batch.setObject(2, REQUEST);
                batch.setString(3, "{\"account\": 2, \"amount\": 1}");
                batch.addBatch();
            }
            batch.executeBatch();
        }
        connection.commit();
        is("a batch of requests pays each once", before - balance(connection), 1L);
    }

    static void commits(Connection connection) throws SQLException {
        String committed = "no statement failed";
        try {
            PayJdbc.value(connection, "SELECT 1 / 0");
        } catch (SQLException error) {
            connection.commit();
            committed = "without an error";
        }
        is("COMMIT after an error", committed, "without an error");
    }

    // The role of the program may terminate its own sessions. A pool gives the one out that was lost, at first.
    static void idle(Connection connection) throws Exception {
        Connection lost = connect();
        PayJdbc.value(connection, "SELECT pg_terminate_backend(?, 60000)", PayJdbc.value(lost, "SELECT pg_backend_pid()"));
        Iterator<Connection> first = List.of(lost).iterator();
        PGSimpleDataSource pool = new PGSimpleDataSource() {
            public Connection getConnection() throws SQLException {
                return first.hasNext() ? first.next() : connect();
            }
        };
        is("a connection that was lost before", PayJdbc.pay(pool, 2, UUID.randomUUID(), 1), "{\"paid\": 1}");
    }

    static String answer(PGSimpleDataSource pool, int account, UUID request, long amount) throws Exception {
        try {
            return "200 " + PayJdbc.pay(pool, account, request, amount);
        } catch (SQLException error) {
            String code = "" + error.getSQLState();
            if (code.startsWith("ID")) return code.substring(2) + " " + error.getMessage();
            if (code.equals("40001")) return "503 " + error.getMessage();
            throw error;
        }
    }

    public static void main(String[] arguments) throws Exception {
        PGSimpleDataSource pool = new PGSimpleDataSource() {
            public Connection getConnection() throws SQLException {
                return connect();
            }
        };
        if (arguments[0].equals("pay")) {
            System.out.println(answer(pool, Integer.parseInt(arguments[1]), UUID.fromString(arguments[2]), Long.parseLong(arguments[3])));
            return;
        }
        if (arguments[0].equals("repeat")) {
            try (Connection one = connect()) {
                // A pool of one, whose connection is not closed
                DataSource kept = (DataSource) Proxy.newProxyInstance(TryJdbc.class.getClassLoader(), new Class[] {DataSource.class}, (a, b, c) -> open(one));
                for (int i = 0; i < 12; i++) System.out.println("200 " + PayJdbc.pay(kept, 2, UUID.randomUUID(), 1));
            }
            return;
        }
        try (Connection connection = connect()) {
            connection.setAutoCommit(false);
            casts(connection);
            codes(connection);
            autocommit();
            batches(connection);
            commits(connection);
            idle(connection);
        }
    }
}
