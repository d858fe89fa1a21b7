// River, configured as its own benchmark command configures it: jobs to a worker that returns at once.
//
// River has no order for a key, and keeps completed jobs for a day.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

const (
	payloadBytes = 500
	fillJobs     = 5000
)

// Message is a job with 500 bytes of JSON.
type Message struct {
	N int    `json:"n"`
	T string `json:"t"`
}

// Kind names the job.
func (Message) Kind() string { return "bench.v1" }

type receiver struct {
	river.WorkerDefaults[Message]
	left *atomic.Int64
	done chan struct{}
}

// Work accepts a message at once.
func (r *receiver) Work(context.Context, *river.Job[Message]) error {
	if r.left.Add(-1) == 0 {
		close(r.done)
	}
	return nil
}

func main() {
	verb := os.Args[1]
	flags := flag.NewFlagSet(verb, flag.ExitOnError)
	database := flags.String("database", "", "URL of the database")
	messages := flags.Int("messages", 1000, "how many")
	_ = flags.Parse(os.Args[2:])
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, *database)
	must(err)
	defer pool.Close()
	found := map[string]any{}
	switch verb {
	case "prepare":
		prepare(ctx, pool, *messages)
	case "drain":
		found = drain(ctx, pool, *messages)
	default:
		must(fmt.Errorf("unknown verb %q", verb))
	}
	line, err := json.Marshal(found)
	must(err)
	fmt.Println(string(line))
}

func prepare(ctx context.Context, pool *pgxpool.Pool, messages int) {
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	must(err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	must(err)
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{})
	must(err)
	for start := 0; start < messages; start += fillJobs {
		jobs := make([]river.InsertManyParams, 0, fillJobs)
		for n := start; n < min(start+fillJobs, messages); n++ {
			head := fmt.Sprintf(`{"n":%d,"t":""}`, n)
			fill := strings.Repeat("x", payloadBytes-len(head))
			jobs = append(jobs, river.InsertManyParams{Args: Message{N: n, T: fill}})
		}
		_, err := client.InsertManyFast(ctx, jobs)
		must(err)
	}
	_, err = pool.Exec(ctx, "VACUUM ANALYZE river_job")
	must(err)
}

func drain(ctx context.Context, pool *pgxpool.Pool, messages int) map[string]any {
	begun, cpu := time.Now(), cpuSeconds()
	work := &receiver{left: &atomic.Int64{}, done: make(chan struct{})}
	work.left.Store(int64(messages))
	workers := river.NewWorkers()
	river.AddWorker(workers, work)
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		FetchCooldown:     2 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Logger:            slog.New(slog.DiscardHandler),
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2000}},
		Workers:           workers,
	})
	must(err)
	must(client.Start(ctx))
	<-work.done
	must(client.Stop(ctx)) // writes what it has completed
	return map[string]any{
		"messages":    messages - int(work.left.Load()),
		"seconds":     time.Since(begun).Seconds(),
		"cpu_seconds": cpuSeconds() - cpu,
	}
}

func cpuSeconds() float64 {
	var used syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
