// The workload of the reader's test, with JDBC.
import java.io.StringReader;
import java.io.StringWriter;
import java.sql.*;
import org.postgresql.PGConnection;

public class JdbcDriver {
	static Connection db;

	static int number(String query) throws SQLException {
		try (ResultSet rows = db.createStatement().executeQuery(query)) {
			rows.next();
			return rows.getInt(1);
		}
	}

	static void insert(String text, int... values) throws SQLException {
		try (PreparedStatement statement = db.prepareStatement(text)) {
			for (int value : values) {
				statement.setInt(1, value);
				statement.addBatch();
			}
			statement.executeBatch();
		}
	}

	public static void main(String[] arguments) throws Exception {
		db = DriverManager.getConnection(arguments[0]);
		number("SELECT 1");
		db.setAutoCommit(false);
		for (int n = 0; n < 8; n++) insert("INSERT INTO reader (n) VALUES (?)", n);
		Savepoint savepoint = db.setSavepoint();
		try {
			number("SELECT 1 / (SELECT 0)");
		} catch (SQLException error) {
			System.out.println(error.getSQLState());
			db.rollback(savepoint);
		}
		db.commit();
		var copy = ((PGConnection) db).getCopyAPI();
		copy.copyIn("COPY reader (n, t) FROM STDIN", new StringReader("1\tcopied\n".repeat(100)));
		var out = new StringWriter();
		copy.copyOut("COPY reader TO STDOUT", out);
		insert("INSERT INTO reader (n) VALUES (?)", 1, 2, 3);
		db.commit();
		Statement series = db.createStatement();
		series.setFetchSize(100);
		int length = 0;
		for (ResultSet rows = series.executeQuery("SELECT generate_series(1, 1000)"); rows.next();) length++;
		System.out.println(out.toString().lines().count() + " " + number("SELECT count(*) FROM reader") + " " + length);
		db.commit();
		for (String table : new String[] {"conflict_a", "conflict_b"}) {
			try {
				insert("INSERT INTO " + table + " (n) VALUES (?)", 1);
				number("SELECT count(*) FROM " + table);
				db.commit();
			} catch (SQLException error) {
				System.out.println(error.getSQLState());
				db.rollback();
			}
			System.out.println(number("SELECT count(*) FROM " + table));
			db.commit();
		}
		db.close();
	}
}
