//go:build unix

// Package shown runs what the README of an example shows: the command that starts the service, and the requests sent to
// it, whose answers it compares.
package shown

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A Readme is what README.md tells a newcomer to type, and what it says they will see.
type Readme struct {
	Starts []string // the commands that start the service
	Steps  []Step
}

// A Step is a curl command and its answer.
type Step struct{ Command, Answer string }

// Read reads the README.md of the example that is tested. It fails on a block that no test would run or compare: each sh
// block is a start or a curl, each curl is followed by an http block, and a go block stands in main.go.
func Read(t *testing.T) Readme {
	t.Helper()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Fatal("this test runs the curl commands of README.md: install curl (Debian and Ubuntu: apt-get install curl)")
	}
	text, program, directory := readFile(t, "README.md"), readFile(t, "main.go"), workingDirectory(t)
	start := "go -C examples run ./" + filepath.Base(directory) + "\n"
	var r Readme
	waiting := false // for the answer to the last command
	for _, block := range regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$").FindAllStringSubmatch(text, -1) {
		language, content := block[1], block[2]
		isCurl := strings.HasPrefix(content, "curl -i ")
		switch {
		case waiting != (language == "http"):
			t.Fatalf("README.md: a curl must be followed by its answer, and nothing else by one; at:\n%s", content)
		case language == "http":
			r.Steps[len(r.Steps)-1].Answer = content
			waiting = false
		case language == "sh" && isCurl && strings.Count(content, "curl ") == 1:
			r.Steps = append(r.Steps, Step{Command: content})
			waiting = true
		case language == "sh" && strings.HasSuffix(content, start):
			r.Starts = append(r.Starts, strings.TrimSpace(content))
		case language == "go" && strings.Contains(unindented(program), unindented(content)):
		default:
			t.Fatalf("README.md has a block that this test cannot run, or code that main.go does not have:\n%s", content)
		}
	}
	if waiting || len(r.Starts) == 0 || len(r.Steps) == 0 {
		t.Fatalf("README.md has %d commands that start the service and %d curls, want some of both, each curl with its answer", len(r.Starts), len(r.Steps))
	}
	return r
}

// Run runs the curl commands as they stand, on a service.
func Run(t *testing.T, steps []Step, service *Process) {
	t.Helper()
	// curl reads its configuration from here: it leads the README's address to the service's.
	home := t.TempDir()
	connectTo := fmt.Sprintf("connect-to = \"127.0.0.1:8080:%s\"\n", strings.TrimPrefix(service.URL, "http://"))
	if err := os.WriteFile(filepath.Join(home, ".curlrc"), []byte(connectTo), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, step := range steps {
		command := exec.CommandContext(t.Context(), "sh", "-c", step.Command)
		command.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "CURL_HOME=" + home} // no proxy
		var stderr bytes.Buffer
		command.Stderr = &stderr
		output, err := command.Output()
		if err != nil {
			t.Fatalf("%v\n%s\n%s", err, step.Command, stderr.String())
		}
		compare(t, step, string(output))
	}
}

// SmallExample tests an example that shows a create, its retry, and a request with other content. The service is killed
// after them, and a second one on its file still answers the retry.
func SmallExample(t *testing.T) {
	r := Read(t)
	if len(r.Starts) != 1 || r.Starts[0] != "go -C examples run ./"+filepath.Base(workingDirectory(t)) || len(r.Steps) != 3 {
		t.Fatalf("README.md has %q and %d curls, want a command that starts this example, and 3", r.Starts, len(r.Steps))
	}
	program := filepath.Join(t.TempDir(), "service")
	if err := Build(".", program); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "my notes?#%.db") // any name
	start := func() *Process {
		command := exec.Command(program, "-addr", "127.0.0.1:0", "-db", file)
		command.Env = Environment()
		return Start(t, command)
	}
	service := start()
	Run(t, r.Steps, service)
	service.Kill()
	Run(t, r.Steps[1:], start())
}

// compare compares the status line, the body, and the headers that README.md shows. Idempotent-Replayed must be shown
// if it is there. Times differ, so each counts as any time; null is not a time.
func compare(t *testing.T, step Step, output string) {
	t.Helper()
	want, got := parseAnswer(t, step.Answer), parseAnswer(t, output)
	if got.status != want.status {
		t.Errorf("got %q, README.md has %q, for:\n%s", got.status, want.status, step.Command)
	}
	want.header.Add("Idempotent-Replayed", "")
	for name := range want.header {
		if got.header.Get(name) != want.header.Get(name) {
			t.Errorf("got %s %q, README.md has %q, for:\n%s", name, got.header.Get(name), want.header.Get(name), step.Command)
		}
	}
	times := regexp.MustCompile(`"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"`)
	if times.ReplaceAllString(got.body, "TIME") != times.ReplaceAllString(want.body, "TIME") {
		t.Errorf("got\n%s\nREADME.md has\n%s\nfor:\n%s", got.body, want.body, step.Command)
	}
}

type answer struct {
	status string // the whole line
	header http.Header
	body   string
}

func parseAnswer(t *testing.T, text string) answer {
	t.Helper()
	// A README has no carriage returns, and no empty line after the headers where there is no body.
	head, body, _ := strings.Cut(strings.ReplaceAll(text, "\r\n", "\n"), "\n\n")
	reader := bufio.NewReader(strings.NewReader(strings.TrimRight(head, "\n") + "\n\n"))
	status, err := reader.ReadString('\n')
	if err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	rest, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	header := http.Header{}
	for line := range strings.Lines(string(rest)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			header.Add(name, value)
		}
	}
	return answer{strings.TrimSpace(status), header, strings.TrimSpace(body)}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func workingDirectory(t *testing.T) string {
	t.Helper()
	directory, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return directory
}

// unindented lets code match wherever it stands.
func unindented(code string) string { return regexp.MustCompile(`(?m)^\t+`).ReplaceAllString(code, "") }
