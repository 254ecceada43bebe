package holdsend

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/holdsend/holdsend-go/internal/bounds"
)

// attemptKey is the context key of the attemptState that Middleware puts there.
type attemptKey struct{}

// An attemptState is what a handler wrapped by Middleware may ask about its request, and tell.
type attemptState struct {
	tx          any
	txType      reflect.Type // Tx of the store, which for an interface is not the type of what tx holds
	in          Incoming
	resourceRef string
}

func withAttempt[Tx any](ctx context.Context, tx Tx, in Incoming) (context.Context, *attemptState) {
	state := &attemptState{tx: tx, txType: reflect.TypeFor[Tx](), in: in}
	return context.WithValue(ctx, attemptKey{}, state), state
}

func attemptFrom(ctx context.Context) *attemptState {
	state, _ := ctx.Value(attemptKey{}).(*attemptState)
	return state
}

// TxFromContext returns the transaction that a handler wrapped by [Middleware] writes in. Tx is that of the store, such
// as pgx.Tx. Do not commit or roll it back, keep it, or use it from another goroutine.
//
// The error says what to do: ctx is not that of a request that Middleware protects (GET, HEAD, OPTIONS and TRACE pass it
// by), or the store has another kind of transaction.
func TxFromContext[Tx any](ctx context.Context) (Tx, error) {
	var none Tx
	state := attemptFrom(ctx)
	if state == nil {
		return none, errors.New("holdsend: no transaction in this context: use the context of a request that Middleware protects, which GET, HEAD, OPTIONS and TRACE are not")
	}
	tx, ok := state.tx.(Tx)
	if !ok {
		return none, fmt.Errorf("holdsend: the transaction in this context is a %s, not a %s: ask for that of the store that Middleware was given", state.txType, reflect.TypeFor[Tx]())
	}
	return tx, nil
}

// IncomingFromContext returns what a create is told about its request, inside a handler wrapped by [Middleware]. Its Key
// is empty if the request had none. It returns false if ctx is not that of a request that Middleware protects.
func IncomingFromContext(ctx context.Context) (Incoming, bool) {
	state := attemptFrom(ctx)
	if state == nil {
		return Incoming{}, false
	}
	return state.in, true
}

// SetResourceRef names what a handler wrapped by [Middleware] wrote, as Response.ResourceRef does for a create: at most
// 255 bytes. Call it before the handler returns, from its goroutine; the last call counts. For a request without a key
// it does nothing, for there is no record.
//
// It is an error if ref is ill-formed, or if ctx is not that of a request that Middleware protects.
func SetResourceRef(ctx context.Context, ref string) error {
	state := attemptFrom(ctx)
	if state == nil {
		return errors.New("holdsend: no record to name the resource of in this context: use the context of a request that Middleware protects, which GET, HEAD, OPTIONS and TRACE are not")
	}
	if err := bounds.Optional("the resource ref", ref); err != nil {
		return err
	}
	state.resourceRef = ref
	return nil
}
