package holdsend

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/holdsend/holdsend-go/internal/bounds"
)

const (
	defaultMaxBodyBytes     = 1 << 20
	defaultMaxResponseBytes = 1 << 20

	// firstRead is the most that is set aside for a body because of its declared length alone. A client that declares
	// more and sends nothing gets no more of the server's memory.
	firstRead = 64 << 10

	// headerBodyOmitted says, on a replay, that the original answer had a body that was too large to keep.
	headerBodyOmitted = "Idempotent-Body-Omitted"
)

// An OwnerFunc returns who sends the request: the authenticated person or tenant, 1 to 255 bytes, from the session or
// the credentials and never from the body. An error or an empty owner is answered 401 with code unauthenticated, and
// the error is shown to nobody: log it here if it matters. A longer or ill-formed owner is the service's fault, and goes
// to MiddlewareOptions.OnError.
type OwnerFunc func(*http.Request) (string, error)

// MiddlewareOptions configures [Middleware] and [Handler]. The zero value is ready for use.
type MiddlewareOptions struct {
	// Operation names the create, such as "post.create": 1 to 255 bytes. The default is the method and the pattern of
	// the route, such as "POST /notes/{id}/comments", or the method and the path where no pattern matched (over 255
	// bytes: 414 with code uri_too_long).
	//
	// Records belong to their operation. With the default, a renamed route is a new operation, and a retry that arrives
	// after the renaming creates again: set Operation where records outlive a release, and where
	// Store.TombstoneResource needs to name it. The default sees a pattern only inside the http.ServeMux that matched
	// it: put Middleware around the handler of a route rather than around the mux, or set Operation.
	Operation func(*http.Request) string

	// Content returns what makes two requests the same, as Request.Content describes. The default takes in the method,
	// the path, the raw query and the body:
	//
	//   - application/json and +json as JSON, so that order and spacing do not matter;
	//   - multipart/form-data part by part, in order (name, file name, media type and SHA-256), so that the boundary
	//     does not matter;
	//   - anything else, and every body with a Content-Encoding, by media type and SHA-256.
	//
	// An empty body counts as none, and parameters of a media type do not count. A request with a key whose JSON or form
	// is malformed is refused: 400 with code content_invalid. To match the fingerprints of a server that knows only the
	// body, return json.RawMessage(body), nil.
	//
	// It is called for requests with a key, after the body was read: body is all of it, must not be changed, and can be
	// read from r once more. An error that wraps ErrNotPlainJSON is answered 400 content_invalid; any other goes to
	// OnError.
	Content func(r *http.Request, body []byte) (any, error)

	RequireKey   bool          // refuse a request without a key; default false: it runs unprotected
	Wait         time.Duration // how long a duplicate waits for a running attempt; default 2 s; negative: not at all
	CompletedTTL time.Duration // how long a completed record is kept; default 0: until erased

	// MaxBodyBytes is how large a body may be, in bytes, with or without a key: 413 with code body_too_large over it.
	// Bodies are held in memory. Default 1 MiB.
	MaxBodyBytes int64
	// MaxResponseBytes is how large a body may be to be kept in a record, in bytes. The first caller gets a larger one
	// whole; its record keeps status and headers alone, and a replay says so with "Idempotent-Body-Omitted: true".
	// Default 1 MiB.
	MaxResponseBytes int64

	// OnError answers a request for which HandleIdempotent returned an error: one of create's, of the store's, of
	// Content's, or the end of the request's context (the client has left by then, and writing is harmless). Nothing
	// was written to w before. The default answers with ErrorAnswer and logs nothing: log here. The body of the request
	// has been read.
	OnError func(http.ResponseWriter, *http.Request, error)

	// Observe is called once for each request that was neither refused for its owner, address or body nor failed by
	// Content, with its outcome; default nil. It must not block.
	Observe func(context.Context, Event)
}

// Handler returns an http.Handler that runs create at most once for the owner, operation and key of a request, whatever
// its method, as [HandleIdempotent] describes. Prefer it to [Middleware]: create gets the transaction as an argument and
// returns its response as a value.
//
// The request that create gets has its whole body, readable from the start, and the context that create must work on; it
// ends when the client leaves. A nil o is the zero MiddlewareOptions. Handler panics if store, owner or create is nil,
// or a limit in o is negative: a service that is put together wrongly should not start.
//
// Besides the refusals of HandleIdempotent it answers 401 unauthenticated, 414 uri_too_long, 413 body_too_large and 400
// body_unreadable, each as a problem (RFC 9457) with a top-level code.
func Handler[Tx any](store Store[Tx], owner OwnerFunc, create func(r *http.Request, tx Tx, in Incoming) (Response, error), o *MiddlewareOptions) http.Handler {
	l := newLayer("Handler", store, owner, o)
	if create == nil {
		panic("holdsend: Handler needs a create function")
	}
	l.create = func(ctx context.Context, r *http.Request, body []byte, tx Tx, in Incoming) (Response, error) {
		q := requestWithBody(ctx, r, body)
		defer removeFiles(q)
		return create(q, tx, in)
	}
	return http.HandlerFunc(l.serve)
}

// Middleware returns middleware that protects handlers which write to an http.ResponseWriter, as [Handler] does for a
// create. GET, HEAD, OPTIONS and TRACE pass through untouched. For any other method the wrapped handler writes in the
// transaction that [TxFromContext] returns, and its answer is held back until that has committed.
//
// The ResponseWriter that it gets cannot flush, hijack or be unwrapped, starts with an empty header, and sends neither
// informational (1xx) responses nor trailers: nothing reaches the client before the commit. No status written is 200. A
// handler that writes nothing because its request was cancelled stores nothing; one that has begun an answer it cannot
// finish must panic with http.ErrAbortHandler, or half an answer is stored. Panics go on up, rolled back.
//
// Put it around the handler of a route, inside the http.ServeMux and inside what reads sessions, but outside of
// anything that reads the body. A nil o is the zero MiddlewareOptions. Middleware panics if store or owner is nil or a
// limit in o is negative, and what it returns panics if the handler is nil.
func Middleware[Tx any](store Store[Tx], owner OwnerFunc, o *MiddlewareOptions) func(http.Handler) http.Handler {
	shared := newLayer("Middleware", store, owner, o)
	return func(next http.Handler) http.Handler {
		if next == nil {
			panic("holdsend: Middleware needs a handler to wrap")
		}
		l := *shared
		l.create = func(ctx context.Context, r *http.Request, body []byte, tx Tx, in Incoming) (Response, error) {
			a := newAttemptContext(ctx, tx, in)
			q := a.request.fill(a, r, body)
			defer removeFiles(q)
			next.ServeHTTP(&a.held, q)
			if err := ctx.Err(); err != nil && !a.held.wrote {
				return Response{}, err
			}
			response := a.held.response()
			response.ResourceRef = a.resourceRef
			return response, nil
		}
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.Method {
			case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
				next.ServeHTTP(w, r)
				return
			}
			l.serve(w, r)
		})
	}
}

// A layer is what Handler and Middleware share: everything around create.
type layer[Tx any] struct {
	store   Store[Tx]
	owner   OwnerFunc
	options MiddlewareOptions // with its defaults filled in, but for Operation and Content

	// create is CreateFunc, told the request and the body that was read.
	create func(ctx context.Context, r *http.Request, body []byte, tx Tx, in Incoming) (Response, error)
}

func newLayer[Tx any](name string, store Store[Tx], owner OwnerFunc, o *MiddlewareOptions) *layer[Tx] {
	l := &layer[Tx]{store: store, owner: owner}
	if o != nil {
		l.options = *o
	}
	switch {
	case store == nil:
		panic("holdsend: " + name + " needs a store")
	case owner == nil:
		panic("holdsend: " + name + " needs an owner function: without one, a caller could be replayed another's answer")
	case l.options.MaxBodyBytes < 0, l.options.MaxResponseBytes < 0, l.options.CompletedTTL < 0:
		panic("holdsend: " + name + " cannot use a negative MaxBodyBytes, MaxResponseBytes or CompletedTTL: 0 is the default")
	}
	if l.options.MaxBodyBytes == 0 {
		l.options.MaxBodyBytes = defaultMaxBodyBytes
	}
	if l.options.MaxResponseBytes == 0 {
		l.options.MaxResponseBytes = defaultMaxResponseBytes
	}
	if l.options.OnError == nil {
		l.options.OnError = func(w http.ResponseWriter, r *http.Request, err error) { ErrorAnswer(err).ServeHTTP(w, r) }
	}
	return l
}

// serve answers one request. The owner is asked first: for a caller that nobody knows, nothing is read or looked up.
func (l *layer[Tx]) serve(w http.ResponseWriter, r *http.Request) {
	owner, err := l.owner(r)
	if err != nil || owner == "" {
		problem(http.StatusUnauthorized, "unauthenticated", "The request must say who sends it, with credentials that are valid.").ServeHTTP(w, r)
		return
	}
	var operation string
	if l.options.Operation != nil {
		operation = l.options.Operation(r)
	} else if operation = defaultOperation(r); len(operation) > bounds.MaxBytes {
		problem(http.StatusRequestURITooLong, "uri_too_long", "The method and the path of the request are too long.").ServeHTTP(w, r)
		return
	}
	body, err := readBody(w, r, l.options.MaxBodyBytes)
	if err != nil {
		l.refuseBody(w, r, err)
		return
	}
	answer, err := l.handle(r, owner, operation, body)
	if err != nil {
		l.options.OnError(w, r, err)
		return
	}
	answer.ServeHTTP(w, r)
}

// handle does what HandleIdempotent does, but keeps a large body out of the record.
func (l *layer[Tx]) handle(r *http.Request, owner, operation string, read roomyBody) (Answer, error) {
	content, err := l.content(r, read)
	if err != nil {
		return Answer{}, err
	}
	body := read.bytes()
	call := call[Tx]{
		store: l.store,
		req: Request{
			Owner: owner, Operation: operation, Header: r.Header, Content: content,
			RequireKey: l.options.RequireKey, Wait: l.options.Wait, CompletedTTL: l.options.CompletedTTL,
			Observe: l.options.Observe,
		},
		create: func(ctx context.Context, tx Tx, in Incoming) (Response, error) {
			return l.create(ctx, r, body, tx, in)
		},
		maxStored: l.options.MaxResponseBytes,
	}
	return call.answer(r.Context())
}

// content returns what makes this request the same as another.
func (l *layer[Tx]) content(r *http.Request, body roomyBody) (any, error) {
	if key, ok := parseKey(r.Header); !ok || key == "" {
		return json.RawMessage("null"), nil // no record is compared with it
	}
	var content any
	var err error
	if l.options.Content != nil {
		q := requestWithBody(r.Context(), r, body.bytes())
		defer removeFiles(q)
		content, err = l.options.Content(q, body.bytes())
	} else {
		content, err = defaultContent(r, body)
	}
	if errors.Is(err, ErrNotPlainJSON) {
		return json.RawMessage(""), nil // not plain JSON either: HandleIdempotent refuses it, and Observe is told
	}
	return content, err
}

// errBodyTaken is the service's fault: it would make all requests the same.
var errBodyTaken = errors.New("holdsend: the body of the request was read before it got here: put what reads it inside Handler or Middleware, not around it")

// refuseBody answers a request whose body readBody did not get.
func (l *layer[Tx]) refuseBody(w http.ResponseWriter, r *http.Request, err error) {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.Is(err, errBodyTaken):
		l.options.OnError(w, r, err)
	case errors.As(err, &tooLarge):
		problem(http.StatusRequestEntityTooLarge, "body_too_large", "The body of the request is too large.").ServeHTTP(w, r)
	default: // cut short, too slow, or not the chunks it says it is
		problem(http.StatusBadRequest, "body_unreadable", "The body of the request could not be read to its end.").ServeHTTP(w, r)
	}
}

// readBody reads the whole body, of limit bytes at most. A body that says it is larger is not read at all.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) (roomyBody, error) {
	if r.Body == nil || r.Body == http.NoBody {
		if r.ContentLength > 0 || isParsed(r) {
			return roomyBody{}, errBodyTaken
		}
		return roomyBody{}, nil
	}
	if r.ContentLength > limit {
		return roomyBody{}, &http.MaxBytesError{Limit: limit}
	}
	room := len(r.URL.Path) + len(r.URL.RawQuery) + roomForNames
	reader, declared := io.Reader(r.Body), r.ContentLength
	first := int64(512) // as io.ReadAll starts
	if declared < 0 {
		reader = http.MaxBytesReader(w, r.Body, limit)
	} else {
		first = min(declared, firstRead) + 1 // one more than there is, to see the end without growing
	}
	text := make([]byte, len(contentOpening), len(contentOpening)+int(first)+room)
	for {
		n, err := reader.Read(text[len(text) : cap(text)-room])
		text = text[:len(text)+n]
		switch size := int64(len(text) - len(contentOpening)); {
		case size > limit: // of a request that net/http's server did not make
			return roomyBody{}, &http.MaxBytesError{Limit: limit}
		case err == io.EOF && size == 0 && (declared > 0 || isParsed(r)):
			return roomyBody{}, errBodyTaken // a client that sends less than it declared is an error below
		case err == io.EOF:
			return roomyBody{text}, nil
		case err != nil:
			return roomyBody{}, err
		case len(text) == cap(text)-room:
			// Twice as much, or what is left if that is less: a client gets memory for what it sent, not for what it says.
			more := size
			if declared >= size {
				more = min(size, declared-size+1)
			}
			text = append(make([]byte, 0, cap(text)+int(more)), text...)
		}
	}
}

// isParsed reports whether a form was read from the body of r, whose length may be unknown.
func isParsed(r *http.Request) bool { return len(r.PostForm) > 0 || r.MultipartForm != nil }

// requestWithBody returns a copy of r on ctx, whose body is body from the start.
func requestWithBody(ctx context.Context, r *http.Request, body []byte) *http.Request {
	return new(readRequest).fill(ctx, r, body)
}

// removeFiles removes what a form of q was spilled to: net/http does it for its own request alone, of which q is a copy.
func removeFiles(q *http.Request) {
	if q.MultipartForm != nil {
		_ = q.MultipartForm.RemoveAll()
	}
}
