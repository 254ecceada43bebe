// Command chaosservice is the service of package chaos on SQLite: in this module, because the root module requires no
// driver. With -dump and a file it prints what creates wrote, as JSON.
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
	"github.com/holdsend/holdsend-go/sqlstore"
	_ "modernc.org/sqlite"
)

const (
	// fillFor is how long fill holds the write lock, and fillDisk the disk.
	fillFor = 300 * time.Millisecond

	// openTimeout bounds the wait for the file's lock at the start. The harness waits a minute.
	openTimeout = 20 * time.Second
)

func main() {
	var err error
	if len(os.Args) == 3 && os.Args[1] == "-dump" {
		err = dump(os.Args[2])
	} else {
		err = serve()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func open(file string) (*sql.DB, error) {
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: file}).EscapedPath()+
		"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)")
	if err != nil {
		return nil, err
	}
	// SQLite does not wait for its lock wherever that could be a deadlock, such as when two services switch a fresh file to
	// write-ahead logging at once.
	for deadline := time.Now().Add(openTimeout); ; time.Sleep(20 * time.Millisecond) {
		_, err = db.Exec(sqlstore.SQLiteSchema(nil) + strings.ReplaceAll(service.Tables, "{id}", "id INTEGER PRIMARY KEY AUTOINCREMENT"))
		if err == nil || !isLocked(err) || time.Now().After(deadline) {
			return db, err
		}
	}
}

func isLocked(err error) bool { return strings.Contains(err.Error(), "database is locked") }

func serve() error {
	config, isService, err := service.FromEnvironment()
	if err != nil {
		return err
	}
	if !isService {
		return errors.New("this program is started by package chaos: run that")
	}
	db, err := open(config.Database)
	if err != nil {
		return err
	}
	db.SetMaxOpenConns(config.PoolSize)
	store, err := sqlstore.NewSQLite(db, &sqlstore.Options{
		TakeOverAfter: config.TakeOverAfter, StaleClaim: config.StaleClaim, BusyTimeout: time.Second,
	})
	if err != nil {
		return err
	}
	return service.Run(config, service.Database[*sql.Tx]{
		Store: store,
		Insert: func(ctx context.Context, tx *sql.Tx, row service.Row) (int64, error) {
			result, err := tx.ExecContext(ctx, `INSERT INTO resources (owner, operation, item, text) VALUES (?, ?, ?, ?)`,
				row.Owner, row.Operation, row.Item, row.Text)
			if err != nil {
				return 0, err
			}
			return result.LastInsertId()
		},
		Delete: func(ctx context.Context, tx *sql.Tx, id int64) error {
			_, err := tx.ExecContext(ctx, `DELETE FROM resources WHERE id = ?`, id)
			return err
		},
		Backends: func(context.Context, *sql.Tx) (told, server uint32) { return 0, 0 },
		SQLState: func(err error) string {
			if errors.Is(err, sqlstore.ErrBusy) || isLocked(err) {
				return "busy"
			}
			if strings.Contains(err.Error(), "disk") { // is full, or I/O error
				return "disk"
			}
			return ""
		},
		Fill:     func() { fill(db) },
		FillDisk: fillDisk,
	})
}

// fill holds the write lock, as another writer might.
func fill(db *sql.DB) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*fillFor)
	defer cancel()
	conn, err := db.Conn(ctx)
	if err != nil {
		return
	}
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		return
	}
	time.Sleep(fillFor)
	_, _ = conn.ExecContext(context.Background(), "ROLLBACK")
}

// fillDisk makes every write to a file fail in the system's call, by a limit on the size of what this process writes.
func fillDisk() {
	signal.Ignore(syscall.SIGXFSZ) // which would end the process
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		panic(err)
	}
	full := limit
	full.Cur = 1
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &full); err != nil {
		panic(err)
	}
	time.Sleep(fillFor)
	limit.Cur = limit.Max // another fillDisk may have begun meanwhile
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		panic(err)
	}
}

func dump(file string) error {
	db, err := open(file)
	if err != nil {
		return err
	}
	defer db.Close()
	found, err := db.Query("SELECT id, owner, operation, item, text FROM resources")
	if err != nil {
		return err
	}
	defer found.Close()
	rows := []service.Row{}
	for found.Next() {
		var row service.Row
		if err := found.Scan(&row.ID, &row.Owner, &row.Operation, &row.Item, &row.Text); err != nil {
			return err
		}
		rows = append(rows, row)
	}
	return errors.Join(found.Err(), json.NewEncoder(os.Stdout).Encode(rows))
}
