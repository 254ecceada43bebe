// Package sqlstore has the stores for services that hold a *sql.DB: [NewPostgres] for Postgres through any driver of
// database/sql, and [NewSQLite] for SQLite, embedded and durable. It imports no driver: bring your own.
//
// The transaction that create gets is a *sql.Tx, of which frameworks such as bun and gorm make their own. Commit and
// Rollback of it belong to the store. A create that calls them all the same, or sends COMMIT or ROLLBACK as SQL, is found
// out: what it committed completes the record (with [holdsend.ErrTxEnded] in Event.Err), or keeps the key for good and is
// a loud error where there is no 2xx to store; what it rolled back is an error and frees the key. But until such a create
// returns, nothing holds the key on Postgres: a retry that comes more than TakeOverAfter after its COMMIT creates again.
package sqlstore

import (
	"context"
	"crypto/rand"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/bounds"
	"github.com/holdsend/holdsend-go/internal/headertext"
)

const (
	defaultTable         = "holdsend_records"
	defaultTakeOverAfter = time.Second
	defaultStaleClaim    = 24 * time.Hour
	defaultMaxIdle       = time.Minute
	defaultBusyTimeout   = 5 * time.Second

	// endTimeout bounds what must happen although the client is gone, such as freeing a key.
	endTimeout = 5 * time.Second
)

// Options configures the stores and the schemas. Nil means all defaults.
type Options struct {
	// Schema is the table's schema; default "": found by the connection's search_path. Postgres alone.
	Schema string

	Table string // default "holdsend_records"; at most 63 bytes

	// TakeOverAfter is how old a claim that no attempt holds must be before a retry may take it over; default 1 s. A
	// slow create is never robbed, however short this is: it only has to cover the moment between a claim's commit and
	// its lock.
	TakeOverAfter time.Duration

	// StaleClaim is how old a claim that no attempt holds must be before PurgeExpired frees its key; default 24 h.
	StaleClaim time.Duration

	// MaxIdle is how long an attempt may sit idle in its transaction before the database ends it; default 60 s, at
	// least 1 ms. It also ends a create that works for longer than this without a query. A stricter
	// idle_in_transaction_session_timeout of the role or the database stands. Postgres alone.
	MaxIdle time.Duration

	// TxOptions are those of the attempt's transaction; default: the database's. Read-only access is refused. Postgres
	// alone: SQLite has one level, serializable.
	TxOptions sql.TxOptions

	// BusyTimeout is how long a create waits for the write lock of the database, which one transaction of all processes
	// holds at a time; default 5 s. After that the error is ErrBusy. SQLite alone.
	BusyTimeout time.Duration
}

var errAttemptEnded = errors.New("holdsend: this attempt has ended: Complete may be called once, and not after Abort")

// withDefaults returns a copy of o with its defaults, or an error if a value is out of bounds.
func withDefaults(o *Options) (Options, error) {
	var filled Options
	if o != nil {
		filled = *o
	}
	for name, value := range map[string]string{"Schema": filled.Schema, "Table": filled.Table} {
		// Postgres would cut a longer name, silently.
		if len(value) > 63 || !utf8.ValidString(value) || strings.IndexByte(value, 0) >= 0 {
			return Options{}, fmt.Errorf("holdsend: Options.%s must be at most 63 bytes of UTF-8 without a NUL", name)
		}
	}
	if filled.Table == "" {
		filled.Table = defaultTable
	}
	for _, field := range []struct {
		name      string
		value     *time.Duration
		byDefault time.Duration
	}{
		{"TakeOverAfter", &filled.TakeOverAfter, defaultTakeOverAfter},
		{"StaleClaim", &filled.StaleClaim, defaultStaleClaim},
		{"MaxIdle", &filled.MaxIdle, defaultMaxIdle},
		{"BusyTimeout", &filled.BusyTimeout, defaultBusyTimeout},
	} {
		switch {
		case *field.value < 0:
			return Options{}, fmt.Errorf("holdsend: Options.%s is negative: use 0 for the default", field.name)
		case *field.value == 0:
			*field.value = field.byDefault
		case *field.value < time.Millisecond:
			return Options{}, fmt.Errorf("holdsend: Options.%s is under 1 ms, the database's unit", field.name)
		}
	}
	return filled, nil
}

// quoted returns name as an SQL identifier.
func quoted(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

func checkScope(s holdsend.Scope) error {
	if err := bounds.Required("Scope.Owner", s.Owner); err != nil {
		return err
	}
	if err := bounds.Required("Scope.Operation", s.Operation); err != nil {
		return err
	}
	return bounds.Required("Scope.Key", s.Key)
}

func checkResource(r holdsend.Resource) error {
	if err := bounds.Required("Resource.Owner", r.Owner); err != nil {
		return err
	}
	if err := bounds.Required("Resource.Operation", r.Operation); err != nil {
		return err
	}
	return bounds.Required("Resource.Ref", r.Ref)
}

// newClaimID returns a random UUID (version 4).
func newClaimID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program if the system has no randomness
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// detached returns a context that keeps ctx's values but not its end, and has a bound of its own.
func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
}

// discard closes conn instead of returning it to the pool: what it has open ends with it, and nobody else gets it.
func discard(conn *sql.Conn) {
	_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	_ = conn.Close()
}

// An answerText is an answer as the columns keep it.
type answerText struct {
	status int64
	header string
	body   []byte
	ref    *string // nil: none
	ttl    time.Duration
}

func textOf(c holdsend.Completion) (answerText, error) {
	header, err := headertext.Encode(c.Response.Header)
	if err != nil {
		return answerText{}, err
	}
	t := answerText{status: int64(c.Response.Status), header: header, body: c.Response.Body, ttl: c.TTL}
	if t.body == nil {
		t.body = []byte{}
	}
	if c.Response.ResourceRef != "" {
		t.ref = &c.Response.ResourceRef
	}
	return t, nil
}

// A recordRow is the columns of a record as both databases return them. Time is how the database keeps a time.
type recordRow[Time any] struct {
	state, fingerprint, claimID, header, ref *string
	claimedAt, completedAt, expiresAt        *Time
	status                                   *int64
	body                                     sql.Null[[]byte] // some drivers give nil for an empty one, but not NULL
	expired, abandoned                       *bool
}

func (r *recordRow[Time]) targets() []any {
	return []any{&r.state, &r.fingerprint, &r.claimID, &r.claimedAt, &r.completedAt, &r.expiresAt,
		&r.status, &r.header, &r.body, &r.ref, &r.expired, &r.abandoned}
}

// record returns nil if all columns are NULL.
func (r *recordRow[Time]) record(scope holdsend.Scope, toTime func(Time) time.Time) (*holdsend.Record, error) {
	if r.state == nil {
		return nil, nil
	}
	timeOf := func(t *Time) *time.Time {
		if t == nil {
			return nil
		}
		utc := toTime(*t).UTC()
		return &utc
	}
	record := &holdsend.Record{
		Scope: scope, State: holdsend.State(*r.state), Fingerprint: *r.fingerprint, ClaimID: *r.claimID,
		ClaimedAt: *timeOf(r.claimedAt), CompletedAt: timeOf(r.completedAt), ExpiresAt: timeOf(r.expiresAt),
		Expired: *r.expired, Abandoned: *r.abandoned,
	}
	if record.State != holdsend.StateCompleted {
		return record, nil
	}
	if r.status == nil || r.header == nil || !r.body.Valid {
		return nil, errors.New("holdsend: a completed record has no answer stored: it needs repair by hand")
	}
	header, err := headertext.Decode(*r.header)
	if err != nil {
		return nil, err
	}
	record.Response = holdsend.Response{Status: int(*r.status), Header: header, Body: r.body.V}
	if r.ref != nil {
		record.Response.ResourceRef = *r.ref
	}
	return record, nil
}
