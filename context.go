package holdsend

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"

	"github.com/holdsend/holdsend-go/internal/bounds"
)

// attemptKey is the key under which an attemptContext has itself as a value.
type attemptKey struct{}

// An attemptContext is the context of a handler wrapped by Middleware: with what the handler may ask about its request,
// and what it tells.
type attemptContext struct {
	context.Context
	tx          any
	txType      reflect.Type // Tx of the store, which for an interface is not the type of what tx holds
	in          Incoming
	resourceRef string
	request     readRequest
	held        heldAnswer
}

func newAttemptContext[Tx any](ctx context.Context, tx Tx, in Incoming) *attemptContext {
	return &attemptContext{
		Context: ctx, tx: tx, txType: reflect.TypeFor[Tx](), in: in,
		held: heldAnswer{header: http.Header{}},
	}
}

func (a *attemptContext) Value(key any) any {
	if key == (attemptKey{}) {
		return a
	}
	return a.Context.Value(key)
}

func attemptFrom(ctx context.Context) *attemptContext {
	attempt, _ := ctx.Value(attemptKey{}).(*attemptContext)
	return attempt
}

// TxFromContext returns the transaction that a handler wrapped by [Middleware] writes in. Tx is that of the store, such
// as pgx.Tx. Do not commit or roll it back, keep it, or use it from another goroutine.
//
// The error says what to do: ctx is not that of a request that Middleware protects (GET, HEAD, OPTIONS and TRACE pass it
// by), or the store has another kind of transaction.
func TxFromContext[Tx any](ctx context.Context) (Tx, error) {
	var none Tx
	attempt := attemptFrom(ctx)
	if attempt == nil {
		return none, errors.New("holdsend: no transaction in this context: use the context of a request that Middleware protects, which GET, HEAD, OPTIONS and TRACE are not")
	}
	tx, ok := attempt.tx.(Tx)
	if !ok {
		return none, fmt.Errorf("holdsend: the transaction in this context is a %s, not a %s: ask for that of the store that Middleware was given", attempt.txType, reflect.TypeFor[Tx]())
	}
	return tx, nil
}

// IncomingFromContext returns what a create is told about its request, inside a handler wrapped by [Middleware]. Its Key
// is empty if the request had none. It returns false if ctx is not that of a request that Middleware protects.
func IncomingFromContext(ctx context.Context) (Incoming, bool) {
	attempt := attemptFrom(ctx)
	if attempt == nil {
		return Incoming{}, false
	}
	return attempt.in, true
}

// SetResourceRef names what a handler wrapped by [Middleware] wrote, as Response.ResourceRef does for a create: at most
// 255 bytes. Call it before the handler returns, from its goroutine; the last call counts. For a request without a key
// it does nothing, for there is no record.
//
// It is an error if ref is ill-formed, or if ctx is not that of a request that Middleware protects.
func SetResourceRef(ctx context.Context, ref string) error {
	attempt := attemptFrom(ctx)
	if attempt == nil {
		return errors.New("holdsend: no record to name the resource of in this context: use the context of a request that Middleware protects, which GET, HEAD, OPTIONS and TRACE are not")
	}
	if err := bounds.Optional("the resource ref", ref); err != nil {
		return err
	}
	attempt.resourceRef = ref
	return nil
}
