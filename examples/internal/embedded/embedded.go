// Package embedded is what the small examples have in common, so that each shows only what differs: a database in one
// SQLite file, a sign-in, and a server.
package embedded

import (
	"database/sql"
	"errors"
	"flag"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/holdsend/holdsend-go/sqlstore"
	_ "modernc.org/sqlite" // SQLite in Go: no C compiler, no server
)

// Serve opens the database and serves what newRouter makes of it.
func Serve(file string, newRouter func(db *sql.DB, store *sqlstore.SQLiteStore) http.Handler) {
	addr := flag.String("addr", "127.0.0.1:8080", "address to listen on")
	path := flag.String("db", file, "SQLite file to keep everything in")
	flag.Parse()
	db, store, err := open(*path)
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		log.Fatal(err)
	}
	slog.Info("listening", "url", "http://"+listener.Addr().String())
	server := http.Server{Handler: newRouter(db, store), ReadHeaderTimeout: 5 * time.Second}
	log.Fatal(server.Serve(listener))
}

func open(path string) (*sql.DB, *sqlstore.SQLiteStore, error) {
	// WAL: readers do not wait for the writer. FULL: what was answered outlives a power cut.
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+
		"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	if err != nil {
		return nil, nil, err
	}
	_, err = db.Exec(sqlstore.SQLiteSchema(nil) + `
		CREATE TABLE IF NOT EXISTS notes (id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL) STRICT`)
	if err != nil {
		return nil, nil, err
	}
	store, err := sqlstore.NewSQLite(db, nil)
	return db, store, err
}

// SignedIn is a toy that anyone can forge: put your own sign-in in its place.
func SignedIn(r *http.Request) (string, error) {
	user := r.Header.Get("X-Demo-User")
	if user == "" {
		return "", errors.New("not signed in")
	}
	return user, nil
}
