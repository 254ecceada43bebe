package pgproxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"sync"
)

// Codes that stand where a startup message has its protocol version.
const (
	cancelRequest  = 80877102
	tlsRequest     = 80877103
	gssencRequest  = 80877104
	startupMessage = 0 // any other
)

// A connection relays one client. Two goroutines share it: one reads the client, one reads the server.
type connection struct {
	proxy  *Proxy
	client net.Conn
	server net.Conn

	// For the goroutine that reads the client.
	statements map[string]string // SQL by the name of the prepared statement
	portals    map[string]string // SQL by the name of the portal
	batch      Batch             // what came since the last one ended
	pending    []message         // of that, what is not sent to the server yet
	held       chan struct{}     // closed when a COMMIT that is held is sent; nil if none ever was

	// Under proxy.mu.
	key      string      // what a cancel request for it says
	backend  uint32      // the server's process, as it told the client
	ready    bool        // the server has let the client in
	gone     bool        // nothing more comes from the server
	waiting  bool        // the client has sent something and was not answered in full
	flushed  bool        // it asked for answers before the batch ends
	sent     []*Injected // the faults of the batches that wait for an answer, nil for those without
	mute     bool        // nothing more goes to the client
	injected *Injected   // the fault that happens on this connection, if one does
}

// serve relays one client until either side is gone.
func (p *Proxy) serve(client net.Conn) {
	p.hold(client)
	defer p.let(client)
	input := bufio.NewReader(client)
	startup, code, err := readStartup(input, client)
	if err != nil {
		return
	}
	if code == cancelRequest && p.isFaulty(startup[8:]) {
		return
	}
	server, err := net.DialTimeout(p.network, p.address, waitTimeout)
	if err != nil {
		return // the client sees a server that is not there
	}
	p.hold(server)
	defer p.let(server)
	if _, err := server.Write(startup); err != nil {
		return
	}
	if code == cancelRequest {
		_, _ = io.Copy(io.Discard, server) // it answers by closing
		return
	}

	c := &connection{
		proxy: p, client: client, server: server,
		statements: make(map[string]string), portals: make(map[string]string),
	}
	p.mu.Lock()
	p.accepted++
	c.batch.Connection = p.accepted
	p.mu.Unlock()

	var relaying sync.WaitGroup
	relaying.Go(c.relayServer)
	c.relayClient(input)
	c.close()
	relaying.Wait()
	p.mu.Lock()
	if c.injected == nil { // else a late request to cancel it must still be known, and let go by
		delete(p.byKey, c.key)
	}
	p.mu.Unlock()
}

// isFaulty reports that a fault has hit the connection with a key.
func (p *Proxy) isFaulty(key []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.byKey[string(key)]
	return c != nil && c.injected != nil
}

// readStartup returns the message that opens a connection. TLS and GSSAPI encryption are refused; clients that may do
// without then go on in the clear.
func readStartup(input *bufio.Reader, client net.Conn) (startup []byte, code uint32, err error) {
	for {
		head := make([]byte, 8)
		if _, err := io.ReadFull(input, head); err != nil {
			return nil, 0, err
		}
		length := binary.BigEndian.Uint32(head)
		if length < 8 || length > 1<<16 {
			return nil, 0, io.ErrUnexpectedEOF
		}
		rest := make([]byte, length-8)
		if _, err := io.ReadFull(input, rest); err != nil {
			return nil, 0, err
		}
		switch code := binary.BigEndian.Uint32(head[4:]); code {
		case tlsRequest, gssencRequest:
			if _, err := client.Write([]byte{'N'}); err != nil {
				return nil, 0, err
			}
		case cancelRequest:
			return append(head, rest...), code, nil
		default:
			return append(head, rest...), startupMessage, nil
		}
	}
}

func (c *connection) close() {
	c.client.Close()
	c.server.Close()
}

// A message is one as it travels: its type, its length, its body.
type message []byte

func (m message) kind() byte   { return m[0] }
func (m message) body() []byte { return m[5:] }

// words returns the first n zero-terminated strings of the body.
func (m message) words(n int) []string {
	words := make([]string, n)
	rest := m.body()
	for i := range words {
		word, after, _ := bytes.Cut(rest, []byte{0})
		words[i], rest = string(word), after
	}
	return words
}

func readMessage(input *bufio.Reader) (message, error) {
	head, err := input.Peek(5)
	if err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(head[1:])
	if length < 4 || length > 1<<30 {
		return nil, io.ErrUnexpectedEOF
	}
	m := make(message, 1+length)
	_, err = io.ReadFull(input, m)
	return m, err
}

// relayClient sends the client's messages to the server, a batch at a time.
func (c *connection) relayClient(input *bufio.Reader) {
	for {
		m, err := readMessage(input)
		if isOver := err != nil || m.kind() == 'X'; isOver && c.isFaulty() {
			// The server goes on with what it has when a client is gone. The client need not wait for that: pgx
			// would, for its goodbye to be answered.
			c.client.Close()
			c.waitForFault()
			return
		}
		if err != nil {
			return
		}
		if c.isMute() {
			continue // a fault has it that nothing passes any more
		}
		if c.held != nil {
			<-c.held // keep the order
		}
		c.proxy.waitPaused()
		c.noteSent(m)
		switch m.kind() {
		case 'Q', 'S', 'F': // Query, Sync, FunctionCall: the batch ends
			if !c.sendBatch() {
				return
			}
		case 'P', 'B', 'D', 'E', 'C': // wait for the rest
		default: // Flush, Terminate, copied rows, passwords
			if !c.write(c.pending) {
				return
			}
			c.pending = nil
		}
	}
}

// noteSent keeps a message of the client's and learns from it.
func (c *connection) noteSent(m message) {
	c.pending = append(c.pending, m)
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	if !c.ready || m.kind() == 'X' { // signing in, or leaving
		return
	}
	if !c.waiting {
		c.waiting = true
		c.proxy.roundTrips++
	}
	c.batch.Messages += string(m.kind())
	switch m.kind() {
	case 'Q':
		c.batch.SQL = append(c.batch.SQL, m.words(1)[0])
	case 'P':
		words := m.words(2)
		c.statements[words[0]] = words[1]
	case 'B':
		words := m.words(2)
		c.portals[words[0]] = c.statements[words[1]]
	case 'E':
		c.batch.SQL = append(c.batch.SQL, c.portals[m.words(1)[0]])
	case 'H':
		c.flushed = true
	}
}

// sendBatch sends what completes a batch, or does what a fault says. It returns false once the connection is over.
func (c *connection) sendBatch() bool {
	p := c.proxy
	batch, pending := c.batch, c.pending
	c.batch, c.pending = Batch{Connection: batch.Connection}, nil
	p.mu.Lock()
	if c.gone { // a fault would never come to an end here
		p.mu.Unlock()
		return false
	}
	batch.Backend = c.backend
	p.batches = append(p.batches, batch)
	injected := p.take(batch)
	c.sent = append(c.sent, injected)
	if injected == nil {
		p.mu.Unlock()
		return c.write(pending)
	}
	c.injected = injected
	do, silent := injected.fault.Do, injected.fault.Silent
	c.mute = do < HoldCommit || do == HoldCommit && !silent
	p.mu.Unlock()

	switch do {
	case LoseCommitAnswer, LoseAnswers:
		return c.write(pending) // relayServer does the rest
	case HoldCommit:
		c.holdCommit(injected, pending)
		return true
	case CutBeforeCommit:
		beforeCommit, _ := splitAtCommit(c.statements, pending)
		c.write(beforeCommit)
	}
	close(injected.happened) // before the client can see it, and before relayServer ends it
	c.server.Close()
	if !silent {
		c.client.Close()
	}
	return silent // relayClient goes on until the client gives up
}

// holdCommit sends a batch in two parts, the second when the test says so.
func (c *connection) holdCommit(injected *Injected, pending []message) {
	beforeCommit, rest := splitAtCommit(c.statements, pending)
	c.write(beforeCommit)
	held := make(chan struct{})
	c.held = held
	c.proxy.running.Go(func() {
		defer close(held)
		select {
		case <-injected.released:
			c.write(rest)
		case <-injected.executed: // the server is gone
		case <-c.proxy.closing:
		}
	})
	close(injected.happened) // before the client can see it
	if !injected.fault.Silent {
		c.client.Close()
	}
}

// splitAtCommit splits a batch's messages before the first that belongs to its last COMMIT.
func splitAtCommit(statements map[string]string, messages []message) (before, rest []message) {
	at := len(messages)
	for n, m := range messages {
		switch m.kind() {
		case 'Q':
			if endsInCommit(m.words(1)[0]) {
				return nil, messages
			}
		case 'P':
			if endsInCommit(m.words(2)[1]) {
				at = n
			}
		case 'B':
			isParsedHere := at < n && n == at+1 && messages[at].kind() == 'P'
			if endsInCommit(statements[m.words(2)[1]]) && !isParsedHere {
				at = n
			}
		}
	}
	return messages[:at], messages[at:]
}

func (c *connection) write(messages []message) bool {
	var all []byte
	for _, m := range messages {
		all = append(all, m...)
	}
	_, err := c.server.Write(all)
	return err == nil
}

func (c *connection) isFaulty() bool {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	return c.injected != nil
}

// waitForFault waits until the fault that hit a batch of this connection has run its course.
func (c *connection) waitForFault() {
	c.proxy.mu.Lock()
	injected := c.injected
	c.proxy.mu.Unlock()
	select {
	case <-injected.executed:
	case <-c.proxy.closing:
	}
}

// relayServer sends the server's messages to the client.
func (c *connection) relayServer() {
	defer c.serverGone()
	input := bufio.NewReader(c.server)
	output := bufio.NewWriter(c.client)
	var heldBack []message // the answer to a COMMIT that may be the last of its batch
	for {
		m, err := readMessage(input)
		if err != nil {
			return
		}
		fault := c.noteAnswer(m)
		loses := fault != nil && fault.fault.Do >= LoseCommitAnswer
		switch {
		case loses && (m.kind() == 'E' || fault.fault.Do == LoseAnswers):
			c.setMute()
		case loses && m.kind() == 'C' && isCommitTag(m):
			heldBack = append(heldBack, m)
			continue
		}
		if loses && m.kind() == 'Z' {
			c.setMute() // what was held back is what is lost
			_ = output.Flush()
			close(fault.happened) // before the client can see it, and before executed: who waits for that may cut the connection
			if !fault.fault.Silent {
				c.client.Close()
			}
		}
		if !c.isMute() {
			c.proxy.waitPaused()
			for _, m := range append(heldBack, m) {
				_, _ = output.Write(m)
			}
			if input.Buffered() == 0 {
				_ = output.Flush() // if the client is gone, relayClient notices
			}
		}
		heldBack = nil
		if fault != nil && m.kind() == 'Z' {
			fault.answered = true
			close(fault.executed)
			if !fault.fault.Silent {
				return
			}
		}
	}
}

// isCommitTag reports that a CommandComplete ends a transaction. The server answers COMMIT with ROLLBACK where the
// transaction had failed.
func isCommitTag(m message) bool {
	tag := m.words(1)[0]
	return strings.EqualFold(tag, "COMMIT") || strings.EqualFold(tag, "ROLLBACK")
}

// noteAnswer learns from a message of the server's, and returns the fault of the batch that it answers, if there is one.
func (c *connection) noteAnswer(m message) *Injected {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	var fault *Injected
	if len(c.sent) > 0 {
		fault = c.sent[0]
	}
	switch {
	case m.kind() == 'K': // BackendKeyData
		c.key, c.backend = string(m.body()), binary.BigEndian.Uint32(m.body())
		c.proxy.byKey[c.key] = c
	case m.kind() == 'Z' && !c.ready:
		c.ready = true
	case m.kind() == 'Z':
		c.sent = c.sent[min(1, len(c.sent)):]
		if len(c.sent) == 0 {
			c.waiting, c.flushed = false, false
		}
	case c.flushed && len(c.sent) == 0:
		c.waiting, c.flushed = false, false
	}
	return fault
}

func (c *connection) setMute() {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	c.mute = true
}

func (c *connection) isMute() bool {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	return c.mute
}

// serverGone ends the connection, and what a fault on it still waits for. Where the fault is a silence, the client stays.
func (c *connection) serverGone() {
	c.proxy.mu.Lock()
	c.gone = true
	injected, mute := c.injected, c.mute
	c.proxy.mu.Unlock()
	if injected != nil {
		select {
		case <-injected.executed:
		default:
			close(injected.executed)
		}
	}
	if !mute || !injected.fault.Silent {
		c.close()
	}
}
