//go:build unix

package shown

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Patience is how long a test waits for what must happen. It is long, for slow machines: no test measures with it.
const Patience = time.Minute

// Build builds the program in directory, with the race detector if the test runs with it. It leaves it at path.
func Build(directory, path string) error {
	arguments := []string{"build", "-o", path}
	if info, ok := debug.ReadBuildInfo(); ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		arguments = append(arguments, "-race")
	}
	command := exec.Command("go", append(arguments, ".")...)
	command.Dir = directory
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, output)
	}
	return nil
}

// Environment is the test's own without DATABASE_URL, which belongs to whoever runs the tests, and with more.
func Environment(more ...string) []string {
	own := slices.DeleteFunc(os.Environ(), func(variable string) bool { return strings.HasPrefix(variable, "DATABASE_URL=") })
	return append(own, more...)
}

// A Process is a running service.
type Process struct {
	URL     string        // http://127.0.0.1:port
	Exited  chan struct{} // closed once it has ended, with its log complete
	command *exec.Cmd
	log     lines
}

// Start starts a service and waits until it logs that it listens, and where. It has a process group of its own, because go
// run and sh stand between it and the test; whatever is left of the group when t ends is killed.
func Start(t *testing.T, command *exec.Cmd) *Process {
	t.Helper()
	stderr, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	command.Stderr, command.Stdout = w, w
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = command.Start()
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	p := &Process{command: command, Exited: make(chan struct{})}
	listening := make(chan string, 1)
	go func() {
		defer close(p.Exited)
		defer command.Wait() // after the log has ended; the test asks for its state
		defer stderr.Close()
		says := regexp.MustCompile(`[ =]listening url=(\S+)`)
		for scanner := bufio.NewScanner(stderr); scanner.Scan(); {
			p.log.add(scanner.Text())
			if found := says.FindStringSubmatch(scanner.Text()); found != nil {
				listening <- found[1]
			}
		}
	}()
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("the service's log:\n%s", p.Log())
		}
	})
	select {
	case p.URL = <-listening:
	case <-p.Exited:
		t.Fatalf("the service ended before it listened: %v", command.ProcessState)
	case <-time.After(Patience):
		t.Fatal("the service does not listen")
	}
	return p
}

// Log returns what the service has printed so far.
func (p *Process) Log() string { return p.log.String() }

// Signal sends it a signal.
func (p *Process) Signal(signal syscall.Signal) { _ = syscall.Kill(-p.command.Process.Pid, signal) }

// Kill ends it as a crash would.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.Exited
}

// WantExit waits for its end.
func (p *Process) WantExit(t *testing.T, code int) {
	t.Helper()
	select {
	case <-p.Exited:
		if got := p.command.ProcessState.ExitCode(); got != code {
			t.Errorf("the service ended with code %d, want %d", got, code)
		}
	case <-time.After(Patience):
		t.Fatal("the service does not end")
	}
}

// lines are those that a process has printed.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintln(&l.text, line)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
