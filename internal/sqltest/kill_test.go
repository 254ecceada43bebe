//go:build unix

package sqltest

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/sqlstore"
)

const (
	// writerVariable makes the test binary one of the processes of TestSQLiteProcessesAreKilled: driver and file.
	writerVariable = "HOLDSEND_SQLTEST_WRITER"

	// hangVariable makes it hang in a create instead.
	hangVariable = "HOLDSEND_SQLTEST_HANG"

	writers     = 8   // in each of the two processes
	items       = 120 // each sent by both processes
	kills       = 16
	writerRetry = 5 * time.Millisecond
)

func TestMain(m *testing.M) {
	if driver, file, ok := strings.Cut(os.Getenv(writerVariable), ":"); ok {
		do := writeItems
		if os.Getenv(hangVariable) != "" {
			do = hang
		}
		if err := do(driver, file); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// writeItems sends each item that it reads from its standard input until it is answered, and prints the answers.
func writeItems(driver, file string) error {
	db, err := sql.Open(driver, sqliteDSN(file))
	if err != nil {
		return err
	}
	defer db.Close()
	store, err := sqlstore.NewSQLite(db, &sqlstore.Options{TakeOverAfter: 50 * time.Millisecond})
	if err != nil {
		return err
	}
	todo := make(chan string)
	var all sync.WaitGroup
	for range writers {
		all.Go(func() {
			for item := range todo {
				req := request(item)
				req.Wait = 2 * time.Second
				for {
					a, err := holdsend.HandleIdempotent(context.Background(), store, req, insertItem(item))
					if err == nil && (a.Outcome == holdsend.OutcomeCreated || a.Outcome == holdsend.OutcomeReplayed) && string(a.Body) == item {
						fmt.Printf("%s %s\n", item, a.Outcome)
						break
					}
					if err != nil && holdsend.ErrorAnswer(err).Status != 503 {
						fmt.Fprintf(os.Stderr, "%s: %v\n", item, err)
					}
					time.Sleep(writerRetry)
				}
			}
		})
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		todo <- lines.Text()
	}
	close(todo)
	all.Wait()
	return nil
}

// insertItem writes to two tables, of which a killed process must leave both or neither.
func insertItem(item string) createFunc {
	return func(ctx context.Context, tx *sql.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
		for _, table := range []string{"writes", "parts"} {
			if _, err := tx.ExecContext(ctx, "INSERT INTO "+table+" VALUES (?)", item); err != nil {
				return holdsend.Response{}, err
			}
		}
		return holdsend.Response{Status: 201, Body: []byte(item)}, nil
	}
}

// Two processes write the same items to one file, eight writers each, and are killed again and again. Every item is sent
// until it is answered, by both: each is there once.
func TestSQLiteProcessesAreKilled(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		file := filepath.Join(t.TempDir(), "shared.db")
		db := openSQLite(t, driver, file)
		execute(t, db, sqlstore.SQLiteSchema(nil)+"CREATE TABLE writes (name TEXT NOT NULL); CREATE TABLE parts (name TEXT NOT NULL)")

		var mu sync.Mutex
		outcomes := map[string]int{}
		killed := 0
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() {
				unanswered := map[string]bool{}
				for i := range items {
					unanswered[fmt.Sprintf("item-%06d", i)] = true
				}
				for runs := 0; len(unanswered) > 0; runs++ {
					until := 0 // not killed any more
					if runs < kills/2 {
						until = 1 + rand.N(2*items/kills)
					}
					answers, err := runWriter(driver, file, unanswered, until)
					mu.Lock()
					for item, outcome := range answers {
						delete(unanswered, item)
						outcomes[outcome]++
					}
					if until > 0 && len(unanswered) > 0 {
						killed++
					}
					mu.Unlock()
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		both.Wait()

		count := func(query string) (n int) {
			require.NoError(t, db.QueryRow(query).Scan(&n))
			return n
		}
		written, distinct, parts := count("SELECT count(*) FROM writes"), count("SELECT count(DISTINCT name) FROM writes"), count("SELECT count(*) FROM parts")
		records := count("SELECT count(*) FROM holdsend_records WHERE state = 'completed'")
		t.Logf("%d items, 2 processes of %d writers, %d kills: %d rows, %d of them distinct, %d completed records; answers seen: %v",
			items, writers, killed, written, distinct, records, outcomes)
		require.Equal(t, items, written)
		require.Equal(t, items, distinct)
		require.Equal(t, items, parts)
		require.Equal(t, items, records)
		require.Equal(t, items, count("SELECT count(*) FROM holdsend_records"))
		require.Equal(t, 2*items, outcomes["created"]+outcomes["replayed"])
		require.NotZero(t, killed)
	})
}

// runWriter runs a process on the items, kills it after so many answers (0: never), and returns all answers it gave.
func runWriter(driver, file string, todo map[string]bool, until int) (map[string]string, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, program)
	command.Env = append(os.Environ(), writerVariable+"="+driver+":"+file)
	command.Stderr = os.Stderr
	var input strings.Builder
	for item := range todo { // in any order
		fmt.Fprintln(&input, item)
	}
	command.Stdin = strings.NewReader(input.String())
	output, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, err
	}
	answers := map[string]string{}
	for lines := bufio.NewScanner(output); lines.Scan(); {
		item, outcome, ok := strings.Cut(lines.Text(), " ")
		if !ok || !todo[item] {
			continue
		}
		answers[item] = outcome
		if len(answers) == until {
			_ = command.Process.Kill() // what it printed by then is still read
		}
	}
	if err := command.Wait(); err != nil && until == 0 {
		return answers, fmt.Errorf("a process that was not killed: %w", err)
	}
	return answers, nil
}

// hang runs a create that has written, says so, and never returns.
func hang(driver, file string) error {
	db, err := sql.Open(driver, sqliteDSN(file))
	if err != nil {
		return err
	}
	store, err := sqlstore.NewSQLite(db, nil)
	if err != nil {
		return err
	}
	_, err = holdsend.HandleIdempotent(context.Background(), store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		if _, err := insertNote(ctx, tx, in); err != nil {
			return created, err
		}
		fmt.Println("written")
		_, err := os.Stdin.Read(make([]byte, 1))
		return created, err
	})
	return err
}

// A process that hangs in its create holds the key: a duplicate in another one is told so, and nobody else can write. Once it
// is killed, its key is taken over, and what it wrote is not there.
func TestSQLiteProcessIsKilledInItsCreate(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		file := filepath.Join(t.TempDir(), "shared.db")
		db := openSQLite(t, driver, file)
		execute(t, db, sqlstore.SQLiteSchema(nil)+"CREATE TABLE writes (name TEXT NOT NULL)")
		store, err := sqlstore.NewSQLite(db, &sqlstore.Options{TakeOverAfter: time.Millisecond, BusyTimeout: 200 * time.Millisecond})
		require.NoError(t, err)

		program, err := os.Executable()
		require.NoError(t, err)
		command := exec.Command(program)
		command.Env = append(os.Environ(), writerVariable+"="+driver+":"+file, hangVariable+"=1")
		command.Stderr = os.Stderr
		input, err := command.StdinPipe()
		require.NoError(t, err)
		output, err := command.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, command.Start())
		defer input.Close()
		line, err := bufio.NewReader(output).ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "written\n", line)

		answer, err := holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeInProgress, answer.Outcome)
		_, err = holdsend.HandleIdempotent(t.Context(), store, request("key-another"), insertNote)
		require.ErrorIs(t, err, sqlstore.ErrBusy)

		require.NoError(t, command.Process.Kill())
		_ = command.Wait()
		var event holdsend.Event
		req := request(key)
		req.Wait = time.Minute
		req.Observe = func(_ context.Context, e holdsend.Event) { event = e }
		answer, err = holdsend.HandleIdempotent(t.Context(), store, req, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		require.True(t, event.TookOver)
		requireNotes(t, db, 1)
	})
}
