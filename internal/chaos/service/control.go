package service

import (
	"encoding/json"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// A Message is a line of JSON on the connection between a service and the harness.
type Message struct {
	Kind    string    // one of the kinds below
	Fault   int       `json:",omitempty"` // the fault that the request carries
	Step    Step      `json:",omitempty"`
	Backend uint32    `json:",omitempty"` // the process of the database that the attempt's connection was told of
	Server  uint32    `json:",omitempty"` // the one that it really talks to, where a pooler stands in between
	Address string    `json:",omitempty"` // where the service listens
	Text    string    `json:",omitempty"`
	Clock   time.Time // in Hello: what the service takes for the time
}

// The kinds of messages.
const (
	Hello   = "hello"   // to the harness: the service listens
	Reached = "reached" // to the harness: a request stands at the step that its fault is for, and waits for Go
	Made    = "made"    // to the harness: create has made the fault that the request asked for; Text says what came of it
	Failed  = "failed"  // to the harness: a request ended with an error; Text is its SQLSTATE or its kind
	Go      = "go"      // to the service: the fault has struck

	// To the service: be full for a moment.
	Fill     = "fill"      // every connection of the pool is taken, and the write lock where there is one
	FillDisk = "fill disk" // the disk takes no more of what the service writes
)

// control is the service's end of the connection.
type control struct {
	mu      sync.Mutex
	out     *json.Encoder
	waiting map[int]chan struct{} // by fault; closed at Go
}

// connect dials the harness. When the harness is gone, so is this process.
func connect(address string, fill map[string]func()) (*control, error) {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	c := &control{out: json.NewEncoder(conn), waiting: map[int]chan struct{}{}}
	go c.listen(conn, fill)
	return c, nil
}

func (c *control) listen(in io.Reader, fill map[string]func()) {
	for decoder := json.NewDecoder(in); ; {
		var m Message
		if err := decoder.Decode(&m); err != nil {
			os.Exit(0)
		}
		switch m.Kind {
		case Go:
			c.mu.Lock()
			if waiting := c.waiting[m.Fault]; waiting != nil {
				close(waiting)
				delete(c.waiting, m.Fault)
			}
			c.mu.Unlock()
		case Fill, FillDisk:
			go fill[m.Kind]()
		}
	}
}

func (c *control) send(m Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.out.Encode(m) // a harness that is gone ends this process in listen
}

// stop reports that a request has reached its step, and waits until the harness has struck.
func (c *control) stop(m Message) {
	struck := make(chan struct{})
	c.mu.Lock()
	c.waiting[m.Fault] = struck
	c.mu.Unlock()
	m.Kind = Reached
	c.send(m)
	<-struck
}
