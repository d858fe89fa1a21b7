import io.debezium.embedded.Connect;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import java.lang.management.ManagementFactory;
import java.net.URI;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.connect.source.SourceRecord;

/**
 * Debezium's engine with its outbox event router: rows of an outbox table, read from a replication
 * slot, to a receiver that accepts at once.
 *
 * <p>Order is that of the log. Rows stay in the table: their removal is left to the application, and
 * is not measured.
 */
public final class Main {
  private static final int PAYLOAD_BYTES = 500;
  private static final int KEYS = 1000;

  public static void main(String[] arguments) throws Exception {
    Map<String, String> options = new HashMap<>();
    for (int at = 1; at + 1 < arguments.length; at += 2) {
      options.put(arguments[at].substring(2), arguments[at + 1]);
    }
    URI database = URI.create(options.get("database"));
    long messages = Long.parseLong(options.get("messages"));
    switch (arguments[0]) {
      case "prepare" -> prepare(database, messages);
      case "drain" -> drain(database, messages);
      default -> throw new IllegalArgumentException("unknown verb " + arguments[0]);
    }
    System.exit(0); // the engine leaves threads behind
  }

  /** Creates the table, then the slot, then the messages: all of them are in the log to be read. */
  private static void prepare(URI database, long messages) throws SQLException {
    try (Connection connection = connect(database);
        Statement statement = connection.createStatement()) {
      statement.execute(
          "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text NOT NULL,"
              + " aggregateid text NOT NULL, type text NOT NULL, payload text NOT NULL)");
      statement.execute("CREATE PUBLICATION bench FOR TABLE outbox");
      statement.execute(
          "SELECT pg_create_logical_replication_slot('" + slot(database) + "', 'pgoutput')");
      statement.execute(
          "INSERT INTO outbox SELECT gen_random_uuid(), 'bench', 'k' || n % " + KEYS
              + ", 'bench.v1', rpad('{\"n\":' || n || ',\"t\":\"', " + (PAYLOAD_BYTES - 2)
              + ", 'x') || '\"}' FROM generate_series(0, " + (messages - 1) + ") AS n");
    }
    System.out.println("{}");
  }

  private static void drain(URI database, long messages) throws Exception {
    Properties settings = new Properties();
    settings.setProperty("name", "bench");
    settings.setProperty("connector.class", "io.debezium.connector.postgresql.PostgresConnector");
    settings.setProperty("offset.storage", "org.apache.kafka.connect.storage.MemoryOffsetBackingStore");
    settings.setProperty("database.hostname", database.getHost());
    settings.setProperty("database.port", String.valueOf(database.getPort()));
    settings.setProperty("database.user", user(database));
    settings.setProperty("database.password", "");
    settings.setProperty("database.dbname", database.getPath().substring(1));
    settings.setProperty("topic.prefix", "bench");
    settings.setProperty("table.include.list", "public.outbox");
    settings.setProperty("plugin.name", "pgoutput");
    settings.setProperty("publication.name", "bench");
    settings.setProperty("publication.autocreate.mode", "disabled");
    settings.setProperty("slot.name", slot(database));
    settings.setProperty("snapshot.mode", "no_data");
    settings.setProperty("max.batch.size", "8192");
    settings.setProperty("max.queue.size", "32768");
    settings.setProperty("poll.interval.ms", "5");
    settings.setProperty("transforms", "outbox");
    settings.setProperty("transforms.outbox.type", "io.debezium.transforms.outbox.EventRouter");

    AtomicLong left = new AtomicLong(messages);
    CountDownLatch done = new CountDownLatch(1);
    // From the first batch on: the start of the virtual machine and of the connector is not counted.
    long[] begun = new long[2];
    try (DebeziumEngine<ChangeEvent<SourceRecord, SourceRecord>> engine =
        DebeziumEngine.create(Connect.class)
            .using(settings)
            .notifying(
                (records, committer) -> {
                  if (begun[0] == 0) {
                    begun[0] = System.nanoTime();
                    begun[1] = cpuNanos();
                  }
                  for (ChangeEvent<SourceRecord, SourceRecord> record : records) {
                    committer.markProcessed(record);
                  }
                  committer.markBatchFinished();
                  if (left.addAndGet(-records.size()) <= 0) {
                    done.countDown();
                  }
                })
            .using(
                (success, message, error) -> {
                  if (!success) {
                    System.err.println(message + " " + error);
                    System.exit(1);
                  }
                })
            .build()) {
      Executors.newSingleThreadExecutor().execute(engine);
      done.await();
      System.out.printf(
          "{\"messages\": %d, \"seconds\": %.4f, \"cpu_seconds\": %.4f}%n",
          messages - left.get(), (System.nanoTime() - begun[0]) / 1e9, (cpuNanos() - begun[1]) / 1e9);
      System.out.flush();
    }
    try (Connection connection = connect(database);
        Statement statement = connection.createStatement()) {
      statement.execute("SELECT pg_drop_replication_slot('" + slot(database) + "')");
    }
  }

  private static Connection connect(URI database) throws SQLException {
    String place = database.getHost() + ":" + database.getPort() + database.getPath();
    return DriverManager.getConnection("jdbc:postgresql://" + place, user(database), "");
  }

  private static String user(URI database) {
    return database.getUserInfo() == null ? "postgres" : database.getUserInfo().split(":")[0];
  }

  private static String slot(URI database) {
    return "slot_" + database.getPath().substring(1);
  }

  private static long cpuNanos() {
    return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
        .getProcessCpuTime();
  }
}
