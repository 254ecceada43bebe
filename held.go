package holdsend

import (
	"bytes"
	"context"
	"net/http"
	"strings"
)

// A heldAnswer is the http.ResponseWriter of a handler whose answer waits for the commit. It does what net/http's does,
// but for what would send something: it has no Flush, Hijack, ReadFrom or Unwrap, and must never get one.
type heldAnswer struct {
	header http.Header // the handler's own, until it writes a status
	sent   http.Header // header as it was then: later changes come too late, as with net/http
	wrote  bool        // a status was written
	status int         // any number that a handler may write by mistake, 0 too
	body   []byte
}

func (h *heldAnswer) Header() http.Header { return h.header }

func (h *heldAnswer) WriteHeader(status int) {
	// Only the first status counts, and an informational one is none. 101 is no answer without a Hijack, and is
	// refused later.
	if h.wrote || 100 <= status && status <= 199 && status != http.StatusSwitchingProtocols {
		return
	}
	h.wrote, h.status = true, status
	h.sent = h.header.Clone()
}

func (h *heldAnswer) Write(p []byte) (int, error) {
	if err := h.beginBody(); err != nil {
		return 0, err
	}
	h.body = append(h.body, p...)
	return len(p), nil
}

// WriteString keeps io.WriteString from copying twice.
func (h *heldAnswer) WriteString(s string) (int, error) {
	if err := h.beginBody(); err != nil {
		return 0, err
	}
	h.body = append(h.body, s...)
	return len(s), nil
}

func (h *heldAnswer) beginBody() error {
	if !h.wrote {
		h.WriteHeader(http.StatusOK)
	}
	if h.status == http.StatusNoContent || h.status == http.StatusNotModified {
		return http.ErrBodyNotAllowed
	}
	return nil
}

// response returns what the handler answered, once it has returned.
func (h *heldAnswer) response() Response {
	if !h.wrote {
		h.WriteHeader(http.StatusOK)
	}
	// net/http would sniff the type of each answer by itself. Done here, a replay by a later release says the same.
	_, hasType := h.sent["Content-Type"]
	if !hasType && h.sent.Get("Content-Encoding") == "" && len(h.body) > 0 {
		h.sent.Set("Content-Type", http.DetectContentType(h.body))
	}
	for name := range h.sent {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			delete(h.sent, name) // an answer with a Content-Length has no trailers
		}
	}
	return Response{Status: h.status, Header: h.sent, Body: h.body}
}

// A readRequest is a request whose body was read before.
type readRequest struct {
	http.Request
	body bodyReader
}

// fill makes q a copy of r on ctx, whose body is body from the start.
func (q *readRequest) fill(ctx context.Context, r *http.Request, body []byte) *http.Request {
	q.Request = *r.WithContext(ctx)
	q.ContentLength, q.TransferEncoding = int64(len(body)), nil
	q.Request.Body = http.NoBody
	if len(body) > 0 {
		q.body.Reset(body)
		q.Request.Body = &q.body
	}
	return &q.Request
}

// A bodyReader is a request's body that was read before.
type bodyReader struct{ bytes.Reader }

func (*bodyReader) Close() error { return nil }
