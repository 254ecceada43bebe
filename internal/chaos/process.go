package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
)

// startTimeout bounds the start of a service, on a machine that is busy.
const startTimeout = time.Minute

// A process is one life of a service.
type process struct {
	slot    int
	command *exec.Cmd
	address string
	in      *json.Decoder
	out     *json.Encoder
	stderr  bytes.Buffer // complete once died is closed
	died    chan struct{}
	stopped atomic.Bool // by SIGSTOP

	mu     sync.Mutex // of out
	killed atomic.Bool
}

// startProcess starts program as a service and returns once it listens.
func startProcess(slot int, program string, config service.Config, clockWrongBy time.Duration) (*process, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	config.Control = listener.Addr().String()
	text, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	p := &process{slot: slot, command: exec.Command(program), died: make(chan struct{})}
	p.command.Env = append(os.Environ(), service.Variable+"="+string(text),
		fmt.Sprintf("%s=%d", clockVariable, int64(clockWrongBy.Seconds())))
	p.command.Stderr = &p.stderr
	if err := p.command.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.command.Wait() // it is killed, as a rule
		close(p.died)
		listener.Close()
	}()
	if err := listener.(*net.TCPListener).SetDeadline(time.Now().Add(startTimeout)); err != nil {
		return nil, err
	}
	conn, err := listener.Accept()
	if err == nil {
		err = conn.SetReadDeadline(time.Now().Add(startTimeout))
	}
	if err != nil {
		_ = p.kill()
		<-p.died
		return nil, fmt.Errorf("the service did not start: %w\n%s", err, p.stderr.String())
	}
	p.in, p.out = json.NewDecoder(conn), json.NewEncoder(conn)
	var hello service.Message
	if err = p.in.Decode(&hello); err == nil {
		err = errors.Join(checkClock(hello.Clock, clockWrongBy), conn.SetReadDeadline(time.Time{}))
	}
	if err != nil {
		_ = p.kill()
		<-p.died
		return nil, fmt.Errorf("the service did not start as it should: %w\n%s", err, p.stderr.String())
	}
	p.address = hello.Address
	return p, nil
}

func (p *process) send(m service.Message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.out.Encode(m) // it may be dead
}

var errDead = errors.New("the service was dead before")

// signal sends a signal unless the process has died.
func (p *process) signal(signal syscall.Signal) error {
	select {
	case <-p.died:
		return errDead
	default:
		return p.command.Process.Signal(signal)
	}
}

func (p *process) kill() error {
	if p.killed.Swap(true) {
		return errDead
	}
	return p.signal(syscall.SIGKILL)
}

// complaint returns what a process that has died says of itself: an end that nobody asked for, a data race, a panic.
func (p *process) complaint() string {
	text := p.stderr.String()
	if p.killed.Load() && !strings.Contains(text, "DATA RACE") && !strings.Contains(text, "panic") && !strings.Contains(text, "fatal error") {
		return ""
	}
	return fmt.Sprintf("service %d ended with %v:\n%s", p.slot, p.command.ProcessState, text)
}

// slots keeps services running until ctx ends: who dies is started again.
type slots struct {
	ctx       context.Context
	start     func(slot int) (*process, error)
	reached   func(*process, service.Message)
	complain  func(string)
	running   sync.WaitGroup
	mu        sync.Mutex
	processes []*process // nil: being started
}

func (s *slots) open(n int) {
	s.processes = make([]*process, n)
	var started sync.WaitGroup
	for slot := range n {
		started.Add(1)
		s.running.Go(func() { s.keep(slot, sync.OnceFunc(started.Done)) })
	}
	started.Wait()
}

// keep runs one slot.
func (s *slots) keep(slot int, started func()) {
	for {
		p, err := s.start(slot)
		if err != nil {
			s.complain(err.Error())
			started()
			return
		}
		s.mu.Lock()
		s.processes[slot] = p
		s.mu.Unlock()
		started()
		s.running.Go(func() { s.listen(p) })
		select {
		case <-p.died:
		case <-s.ctx.Done():
			_ = p.kill()
			<-p.died
		}
		if complaint := p.complaint(); complaint != "" {
			s.complain(complaint)
		}
		s.mu.Lock()
		s.processes[slot] = nil
		s.mu.Unlock()
		if s.ctx.Err() != nil {
			return
		}
	}
}

// listen hands on what a process reports, until it dies.
func (s *slots) listen(p *process) {
	for {
		var m service.Message
		if err := p.in.Decode(&m); err != nil {
			return
		}
		s.reached(p, m)
	}
}

// pick returns a running process for a client to send to, of those that are not the given one if there is another. Most
// of the time it passes over one that is stopped, as a load balancer would.
func (s *slots) pick(dice *dice, not *process) *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := dice.below(len(s.processes))
	for _, avoid := range []bool{true, false} {
		for n := range s.processes {
			p := s.processes[(first+n)%len(s.processes)]
			if p != nil && p != not && (!avoid || !p.stopped.Load() || dice.oneIn(10)) {
				return p
			}
		}
	}
	return nil
}
