// Echo is a create route that happens once, in a service on echo.
//
//	go -C examples run ./echo
package main

import (
	"database/sql"
	"encoding/json"
	"net/http"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/examples/internal/embedded"
	"github.com/holdsend/holdsend-go/sqlstore"
	"github.com/labstack/echo/v4"
)

func main() { embedded.Serve("echo.db", newRouter) }

type note struct {
	ID   int64  `json:"id,string"`
	Text string `json:"text"`
}

func newRouter(_ *sql.DB, store *sqlstore.SQLiteStore) http.Handler {
	createNote := holdsend.Handler(store, embedded.SignedIn,
		func(r *http.Request, tx *sql.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			var entry note
			if err := json.NewDecoder(r.Body).Decode(&entry); err != nil || entry.Text == "" {
				return holdsend.JSON(http.StatusBadRequest, map[string]string{"code": "invalid"})
			}
			err := tx.QueryRowContext(r.Context(), "INSERT INTO notes (text) VALUES (?) RETURNING id", entry.Text).Scan(&entry.ID)
			if err != nil {
				return holdsend.Response{}, err
			}
			return holdsend.JSON(http.StatusCreated, entry)
		},
		&holdsend.MiddlewareOptions{Operation: func(*http.Request) string { return "note.create" }})

	router := echo.New()
	router.POST("/notes", echo.WrapHandler(createNote))
	return router
}
