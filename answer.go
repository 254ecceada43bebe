package holdsend

import (
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"strconv"
	"strings"
)

// Outcome says what became of a request.
type Outcome string

// The outcomes. The first three carry create's answer; the others are refusals that the library wrote.
const (
	OutcomeCreated        Outcome = "created"         // create ran, and its answer is committed with its write
	OutcomeReplayed       Outcome = "replayed"        // the original answer, from the record
	OutcomeNotStored      Outcome = "not_stored"      // create ran and did not answer 2xx: rolled back, key freed
	OutcomeUnkeyed        Outcome = "unkeyed"         // no key: create ran once, with no record
	OutcomeKeyConflict    Outcome = "key_conflict"    // 409: the key stands for other content
	OutcomeInProgress     Outcome = "in_progress"     // 409: the first attempt still runs; retry with the same key
	OutcomeGone           Outcome = "gone"            // 410: created once, deleted since
	OutcomeKeyRequired    Outcome = "key_required"    // 400: no Idempotency-Key
	OutcomeKeyInvalid     Outcome = "key_invalid"     // 400: a malformed or doubled Idempotency-Key
	OutcomeContentInvalid Outcome = "content_invalid" // 400: the content is not plain JSON
)

// Response is what create answers.
type Response struct {
	Status int         // 100 to 599; only 2xx is stored and committed
	Header http.Header // nil is allowed
	Body   []byte
	// ResourceRef names what create wrote (such as its id), so that Store.TombstoneResource finds the record when it
	// is deleted. At most 255 bytes; may be empty.
	ResourceRef string
}

// JSON returns a Response with v as its JSON body. The error is json.Marshal's.
func JSON(status int, v any) (Response, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return Response{}, err
	}
	return Response{Status: status, Header: http.Header{"Content-Type": {"application/json"}}, Body: body}, nil
}

// Answer is what the client gets. It is an http.Handler that writes itself.
type Answer struct {
	Outcome Outcome // empty in an Answer made by ErrorAnswer
	Status  int
	Header  http.Header
	Body    []byte
}

// ServeHTTP writes the answer. Its headers replace those that w has, but for Vary and Set-Cookie, which are added to what
// others (CORS, sessions) have set. Content-Length is that of Body, whatever Header says.
func (a Answer) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if a.Status < 200 || a.Status > 599 {
		a = internalError()
	}
	header := w.Header()
	for name, values := range a.Header {
		switch http.CanonicalHeaderKey(name) {
		case "Content-Length", "Transfer-Encoding", "Trailer": // the server's own to say
		case "Vary", "Set-Cookie":
			header[name] = append(header[name], values...)
		default:
			header[name] = values[:len(values):len(values)] // whoever adds one makes a copy
		}
	}
	if a.Status != http.StatusNoContent && a.Status != http.StatusNotModified {
		header.Set("Content-Length", strconv.Itoa(len(a.Body)))
	}
	w.WriteHeader(a.Status)
	if len(a.Body) > 0 {
		_, _ = w.Write(a.Body) // a client that left is not ours to report: the record is committed, a retry replays it
	}
}

// ErrorAnswer is what a service answers when HandleIdempotent returned err. Lost claims (code claim_lost), unknown
// outcomes (outcome_unknown), serialization failures and deadlocks (SQLSTATE 40001 and 40P01: transaction_conflict) are
// 503 with Retry-After, for they end well when the client retries with the same key; anything else is 500 (internal).
// The body is a problem (RFC 9457) with a top-level code, and shows nothing of err.
func ErrorAnswer(err error) Answer {
	var sqlError interface{ SQLState() string }
	switch {
	case errors.Is(err, ErrClaimLost):
		return tryAgain("claim_lost", "The request was interrupted and nothing was stored. Send it again with the same Idempotency-Key.")
	case errors.Is(err, ErrOutcomeUnknown):
		return tryAgain("outcome_unknown", "The request may have been stored. If it carried an Idempotency-Key, send it again with the same one to find out.")
	case errors.As(err, &sqlError) && (sqlError.SQLState() == "40001" || sqlError.SQLState() == "40P01"):
		return tryAgain("transaction_conflict", "The request met another one and nothing was stored. Send it again with the same Idempotency-Key.")
	}
	return internalError()
}

func tryAgain(code, detail string) Answer {
	a := problem(http.StatusServiceUnavailable, code, detail)
	a.Header.Set("Retry-After", "1")
	return a
}

func internalError() Answer {
	return problem(http.StatusInternalServerError, "internal", "The server failed to handle the request.")
}

// problem returns an RFC 9457 problem with a top-level code. The detail is constant text: it never quotes the request.
func problem(status int, code, detail string) Answer {
	body, err := json.Marshal(struct {
		Type   string `json:"type"`
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail"`
		Code   string `json:"code"`
	}{"about:blank", http.StatusText(status), status, detail, code})
	if err != nil {
		panic(err) // strings and a number always marshal
	}
	return Answer{Status: status, Header: http.Header{"Content-Type": {"application/problem+json"}}, Body: body}
}

// refusal is a problem whose code is its outcome.
func refusal(status int, outcome Outcome, detail string) Answer {
	a := problem(status, string(outcome), detail)
	a.Outcome = outcome
	if outcome == OutcomeInProgress {
		a.Header.Set("Retry-After", "1")
	}
	return a
}

// replay returns the answer that r keeps. r is a copy, as the store has handed it out, and is used up.
func replay(r *Record) Answer {
	header := r.Response.Header
	if header == nil {
		header = http.Header{}
	}
	header.Set(HeaderReplayed, "true")
	return Answer{Outcome: OutcomeReplayed, Status: r.Response.Status, Header: header, Body: r.Response.Body}
}

// storedHeader returns h without what belongs to one connection or one caller: a replay must carry nobody else's cookie or
// credentials, and no date or length of another message. The first caller still gets all of h, which is not changed.
func storedHeader(h http.Header) http.Header {
	var connection []string // headers that Connection declares hop-by-hop
	for name, values := range h {
		if http.CanonicalHeaderKey(name) == "Connection" {
			connection = append(connection, values...)
		}
	}
	stored := h // a store makes its own copy
	for name := range h {
		if isStored(http.CanonicalHeaderKey(name), connection) {
			continue
		}
		if len(stored) == len(h) {
			stored = maps.Clone(h)
		}
		delete(stored, name)
	}
	return stored
}

func isStored(name string, connection []string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Te", "Transfer-Encoding", "Upgrade", // hop-by-hop
		"Set-Cookie", "Set-Cookie2", "Authorization", "Www-Authenticate", // one caller's
		"Date", "Content-Length", "Trailer", // one message's
		HeaderReplayed: // only a replay says so
		return false
	}
	if strings.HasPrefix(name, "Proxy-") {
		return false
	}
	for _, list := range connection {
		for option := range strings.SplitSeq(list, ",") {
			if strings.EqualFold(strings.TrimSpace(option), name) {
				return false
			}
		}
	}
	return true
}
