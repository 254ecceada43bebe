package holdsend_test

import (
	"context"
	"database/sql"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
)

func TestContextOutsideOfMiddleware(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	tx, err := holdsend.TxFromContext[*holdsend.MemoryTx](ctx)
	assert.Nil(t, tx)
	assert.ErrorContains(t, err, "holdsend: no transaction in this context: use the context of a request that Middleware protects")
	in, ok := holdsend.IncomingFromContext(ctx)
	assert.False(t, ok)
	assert.Zero(t, in)
	assert.ErrorContains(t, holdsend.SetResourceRef(ctx, "note-1"), "use the context of a request that Middleware protects")
}

func TestTxFromContextNamesBothTypes(t *testing.T) {
	t.Parallel()
	handler := holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, err := holdsend.TxFromContext[*sql.Tx](r.Context())
		assert.Nil(t, tx)
		assert.ErrorContains(t, err, "is a *holdsend.MemoryTx, not a *sql.Tx")
		any, err := holdsend.TxFromContext[interface{ OnCommit(func()) }](r.Context())
		assert.NoError(t, err, "an interface of it will do")
		assert.NotNil(t, any)
		// A context made from the request's is as good.
		type key struct{}
		derived, err := holdsend.TxFromContext[*holdsend.MemoryTx](context.WithValue(r.Context(), key{}, 1))
		assert.NoError(t, err)
		assert.NotNil(t, derived)
	}))
	for _, header := range []http.Header{keyed("abc-12345"), nil} {
		assert.Equal(t, http.StatusOK, serve(handler, newRequest(http.MethodPost, "/notes", "{}", header)).StatusCode)
	}
}

// A store's Tx may be an interface: the error then names it, and not what happens to be behind it.
func TestTxFromContextOfAnInterface(t *testing.T) {
	t.Parallel()
	store := &fakeStore[committer]{
		inTx: func(ctx context.Context, fn func(context.Context, committer) error) error {
			return fn(ctx, &holdsend.MemoryTx{})
		},
	}
	handler := holdsend.Middleware[committer](store, ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, err := holdsend.TxFromContext[committer](r.Context())
		assert.NoError(t, err)
		assert.NotNil(t, tx)
		_, err = holdsend.TxFromContext[*sql.Tx](r.Context())
		assert.ErrorContains(t, err, "is a holdsend_test.committer, not a *sql.Tx")
	}))
	assert.Equal(t, http.StatusOK, serve(handler, newRequest(http.MethodPost, "/notes", "{}", nil)).StatusCode)
}

type committer interface{ OnCommit(func()) }

func TestSetResourceRef(t *testing.T) {
	t.Parallel()
	store := holdsend.NewMemoryStore(nil)
	handler := holdsend.Middleware(store, ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := r.Context()
		for _, bad := range []string{strings.Repeat("a", 256), "\xff", "a\x00"} {
			assert.ErrorContains(t, holdsend.SetResourceRef(ctx, bad), "holdsend: the resource ref")
		}
		assert.NoError(t, holdsend.SetResourceRef(ctx, strings.Repeat("a", 255)))
		assert.NoError(t, holdsend.SetResourceRef(ctx, ""))
		assert.NoError(t, holdsend.SetResourceRef(ctx, "note-1"), "the last call counts")
		w.WriteHeader(http.StatusCreated)
	}))
	// Without a key there is nothing to name, and no reason to fail.
	assert.Equal(t, http.StatusCreated, serve(handler, newRequest(http.MethodPost, "/notes", "{}", nil)).StatusCode)
	assert.Equal(t, http.StatusCreated, serve(handler, newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345"))).StatusCode)

	require.NoError(t, store.InTx(t.Context(), func(ctx context.Context, tx *holdsend.MemoryTx) error {
		turned, err := store.TombstoneResource(ctx, tx, holdsend.Resource{Owner: "ada", Operation: "POST /notes", Ref: "note-1"})
		assert.EqualValues(t, 1, turned)
		return err
	}))
	requireProblem(t, serve(handler, newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345"))), http.StatusGone, "gone")
}
