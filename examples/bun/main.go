// Bun is a create route that happens once, in a service on bun.
//
//	go -C examples run ./bun
package main

import (
	"database/sql"
	"encoding/json"
	"net/http"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/examples/internal/embedded"
	"github.com/holdsend/holdsend-go/sqlstore"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/sqlitedialect"
)

func main() { embedded.Serve("bun.db", newRouter) }

type note struct {
	bun.BaseModel `bun:"table:notes" json:"-"`

	ID   int64  `bun:",pk,autoincrement" json:"id,string"`
	Text string `json:"text"`
}

func newRouter(db *sql.DB, store *sqlstore.SQLiteStore) http.Handler {
	orm := bun.NewDB(db, sqlitedialect.New())
	createNote := holdsend.Handler(store, embedded.SignedIn,
		func(r *http.Request, tx *sql.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			var entry note
			if err := json.NewDecoder(r.Body).Decode(&entry); err != nil || entry.Text == "" {
				return holdsend.JSON(http.StatusBadRequest, map[string]string{"code": "invalid"})
			}
			_, err := orm.NewInsert().Model(&entry).Conn(tx).Exec(r.Context())
			if err != nil {
				return holdsend.Response{}, err
			}
			return holdsend.JSON(http.StatusCreated, entry)
		},
		&holdsend.MiddlewareOptions{Operation: func(*http.Request) string { return "note.create" }})

	mux := http.NewServeMux()
	mux.Handle("POST /notes", createNote)
	return mux
}
