// Package pgproxy stands between a test's client and its Postgres, counts what passes, and cuts the connection where the
// test says. Only tests import it.
//
// It understands enough of Postgres's protocol to know which SQL a client runs, in whatever mode: prepared statements by
// their names, several statements in one text, several statements in one round trip. It relays the bytes unchanged.
// TLS is refused to the client and not spoken to the server. A request to cancel what a connection is doing passes too,
// but not if a fault has hit that connection: pgx sends one whenever a connection breaks, and it would race with what the
// fault lets the server do.
package pgproxy

import (
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// waitTimeout bounds each wait for something that should happen at once.
const waitTimeout = 30 * time.Second

// A Proxy relays connections to one Postgres.
type Proxy struct {
	url      string
	network  string // of the server
	address  string
	listener net.Listener
	running  sync.WaitGroup
	closing  chan struct{}

	mu         sync.Mutex
	refusing   bool
	closed     bool
	paused     time.Time              // nothing is relayed until then
	open       map[net.Conn]struct{}  // to clients and to the server
	byKey      map[string]*connection // by what a cancel request for it says
	accepted   int
	roundTrips int
	batches    []Batch
	faults     []*Injected // not happened yet
}

// Start starts a proxy before the database at connectionURL, on a free port of 127.0.0.1. It is closed, with all its
// connections, when t ends.
func Start(t testing.TB, connectionURL string) *Proxy {
	t.Helper()
	config, err := pgconn.ParseConfig(connectionURL)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(connectionURL)
	if err != nil {
		t.Fatal("the connection URL is malformed")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: listener, closing: make(chan struct{}), open: make(map[net.Conn]struct{}), byKey: make(map[string]*connection)}
	p.network, p.address = pgconn.NetworkAddress(config.Host, config.Port)

	u.Host = listener.Addr().String()
	// pgx reads a plus sign as one and not as a space, so the parameters are taken out of the text as they are.
	u.RawQuery = strings.Join(append(slices.DeleteFunc(strings.Split(u.RawQuery, "&"), func(pair string) bool {
		name, _, _ := strings.Cut(pair, "=")
		return slices.Contains([]string{"", "host", "port", "sslmode"}, name)
	}), "sslmode=disable"), "&")
	p.url = u.String()

	p.running.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// URL returns the connection URL through the proxy.
func (p *Proxy) URL() string { return p.url }

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.mu.Lock()
		refusing := p.refusing
		p.mu.Unlock()
		if refusing {
			client.Close()
			continue
		}
		p.running.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	close(p.closing)
	p.listener.Close()
	p.Cut()
	p.running.Wait()
}

// hold keeps conn for Cut to close, until let. If the proxy is closed, it closes conn at once.
func (p *Proxy) hold(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		conn.Close()
	}
	p.open[conn] = struct{}{}
}

func (p *Proxy) let(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	conn.Close()
	delete(p.open, conn)
}

// Cut closes every connection, on both sides. What a COMMIT that is held waits for never comes.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for conn := range p.open {
		conn.Close()
	}
}

// CutBackend closes the connection, on both sides, whose server process has told its client that it is pid. It reports
// whether there is one.
func (p *Proxy) CutBackend(pid uint32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.byKey {
		if c.backend == pid && c.injected == nil {
			c.close()
			return true
		}
	}
	return false
}

// Pause makes the proxy relay nothing for a while, in either direction: a slow network, or one that seems dead. Nothing is
// lost by it. Another pause does not add to one that lasts.
func (p *Proxy) Pause(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused = time.Now().Add(d)
}

// waitPaused returns when the proxy relays again, or is closed.
func (p *Proxy) waitPaused() {
	for {
		p.mu.Lock()
		left := time.Until(p.paused)
		p.mu.Unlock()
		if left <= 0 {
			return
		}
		select {
		case <-time.After(left):
		case <-p.closing:
			return
		}
	}
}

// Refuse makes the proxy close new connections at once, or, with false, relay them again. Open ones stay.
func (p *Proxy) Refuse(refuse bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusing = refuse
}

// Connections returns how many connections were relayed so far, cancel requests not counted.
func (p *Proxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// RoundTrips returns how often a client has sent something and then waited for its answer, over all connections. Several
// batches that are sent without waiting in between are one round trip. Connecting does not count.
func (p *Proxy) RoundTrips() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.roundTrips
}

// Batches returns what clients sent so far, over all connections, in the order in which batches ended.
func (p *Proxy) Batches() []Batch {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.batches)
}

// Reset forgets what was counted and recorded.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.roundTrips, p.batches, p.accepted = 0, nil, 0
}

// A Batch is what a client sends before the server must answer: the messages up to a Sync, or one simple Query.
type Batch struct {
	Connection int      // 1 for the first connection that was relayed
	Backend    uint32   // the process id that the server told the client
	Messages   string   // the type of each message as the protocol has it, such as "PBDES"
	SQL        []string // what it executes, in order. A simple Query is one text, with however many statements
}

// Contains reports that the batch executes SQL that contains text, in any case.
func (b Batch) Contains(text string) bool {
	return slices.ContainsFunc(b.SQL, func(sql string) bool {
		return strings.Contains(strings.ToLower(sql), strings.ToLower(text))
	})
}

// EndsInCommit reports that the last statement of the batch is COMMIT: that of an attempt, or of any transaction that is
// committed. A batch that commits and goes on (such as begin, claim, commit, begin, lock) does not.
func (b Batch) EndsInCommit() bool {
	return len(b.SQL) > 0 && endsInCommit(b.SQL[len(b.SQL)-1])
}

func endsInCommit(sql string) bool {
	sql = strings.TrimRight(sql, "; \t\r\n")
	return strings.EqualFold(sql[strings.LastIndexAny(sql, "; \t\r\n")+1:], "commit")
}

// An Action is what a fault does to a batch.
type Action int

const (
	// CutBeforeBatch lets nothing of the batch reach the server, and cuts the connection.
	CutBeforeBatch Action = iota + 1
	// CutBeforeCommit lets what precedes the final COMMIT reach the server, and cuts the connection: the server rolls
	// back. In simple protocol COMMIT is in the same message as what precedes it, so nothing of it is sent.
	CutBeforeCommit
	// HoldCommit lets what precedes the final COMMIT reach the server (in simple protocol: nothing), cuts the client,
	// and delivers the rest after Injected.Release, as a slow network might. If it is Silent, the client is not cut: it
	// waits, and gets the answer after Release.
	HoldCommit
	// LoseCommitAnswer lets the server execute the batch, passes its answers on up to that of the final COMMIT, and
	// then cuts the connection. If the batch failed, the error is what is lost.
	LoseCommitAnswer
	// LoseAnswers lets the server execute the batch, passes none of its answers on, and then cuts the connection.
	LoseAnswers
)

// A Fault says what goes wrong, and where.
type Fault struct {
	When func(Batch) bool // the first batch for which it is true; nil: one that EndsInCommit. Called under a lock
	Do   Action
	// Silent leaves the client's connection open where Do would cut it: the client gets no answer until it gives up by
	// itself. The server's side is as Do has it.
	Silent bool
}

// Injected is a fault that was asked for. It happens once.
type Injected struct {
	fault    Fault
	happened chan struct{} // closed when the batch's fate is sealed: cut, held, or executed and its answer lost
	released chan struct{}
	release  sync.Once
	executed chan struct{} // closed when the server has answered the batch, or its connection is gone
	answered bool          // written before executed is closed
}

// Inject asks for a fault. Of several, each batch meets the first that is for it.
func (p *Proxy) Inject(fault Fault) *Injected {
	if fault.When == nil {
		fault.When = Batch.EndsInCommit
	}
	injected := &Injected{
		fault:    fault,
		happened: make(chan struct{}),
		released: make(chan struct{}),
		executed: make(chan struct{}),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, injected)
	return injected
}

// Withdraw takes the fault back, and reports whether it was in time: if not, it has met its batch, and Done or Ended is
// closed before long.
func (i *Injected) Withdraw(p *Proxy) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := slices.Index(p.faults, i)
	if n < 0 {
		return false
	}
	p.faults = slices.Delete(p.faults, n, n+1)
	return true
}

// Nth makes a condition for Fault.When that is true for the nth batch for which when is, from 1.
func Nth(n int, when func(Batch) bool) func(Batch) bool {
	return func(b Batch) bool {
		if !when(b) {
			return false
		}
		n--
		return n == 0
	}
}

// Done is closed when the fault has happened. It never is if the connection ends before that: see Ended.
func (i *Injected) Done() <-chan struct{} { return i.happened }

// Ended is closed when nothing more comes of a fault that has met its batch: the server has answered, or its connection
// is gone. If the fault has not happened by then, it never will: there was no answer to lose.
func (i *Injected) Ended() <-chan struct{} { return i.executed }

// Happened reports whether the fault happened.
func (i *Injected) Happened() bool {
	select {
	case <-i.happened:
		return true
	default:
		return false
	}
}

// Wait returns when the fault has happened: the connection is cut, the COMMIT is held, or the server has executed the
// batch and its answer is lost. It fails t if that takes too long, or cannot come any more.
func (i *Injected) Wait(t testing.TB) {
	t.Helper()
	timeout := time.NewTimer(waitTimeout)
	defer timeout.Stop()
	select {
	case <-i.happened:
	case <-i.executed:
		if !i.Happened() {
			t.Fatal("the fault did not happen: its connection was gone before")
		}
	case <-timeout.C:
		t.Fatal("the fault did not happen: no batch came that it is for, or the server did not answer it")
	}
}

// Release delivers a COMMIT that is held, now or as soon as it is.
func (i *Injected) Release() { i.release.Do(func() { close(i.released) }) }

// WaitExecuted returns when the server has answered the batch that the fault hit, which says that it executed it. It
// fails t if the server did not, or if that takes too long.
func (i *Injected) WaitExecuted(t testing.TB) {
	t.Helper()
	timeout := time.NewTimer(waitTimeout)
	defer timeout.Stop()
	select {
	case <-i.executed:
	case <-timeout.C:
		t.Fatal("the server did not answer the batch")
	}
	if !i.answered {
		t.Fatal("the batch never reached the server, or the connection was gone before it answered")
	}
}

// take returns the fault that a batch meets, or nil. The caller holds p.mu.
func (p *Proxy) take(b Batch) *Injected {
	for n, injected := range p.faults {
		if injected.fault.When(b) {
			p.faults = slices.Delete(p.faults, n, n+1)
			return injected
		}
	}
	return nil
}
