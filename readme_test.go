//go:build unix

package holdsend_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/format"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// documents are run and checked by this file's tests. The first is the one that a newcomer types from.
var documents = []string{"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}

// documentPatience is how long a test waits for what must happen. It is long, for slow machines: nothing measures with it.
const documentPatience = 8 * time.Minute

// shown is what the documents tell a reader to run, in their order.
type shown struct {
	services []*shownService
	packages map[string][]string // the files of each package that is not a program
	grants   []string
	commands []string // of which a test only checks that they are the right ones
}

// A shownService is a command or a program that serves, and the requests that are sent to it.
type shownService struct {
	command string // for sh; empty: a program
	program string
	curls   []*shownCurl
}

type shownCurl struct {
	command string
	answers []string // to the first time that it is sent, the second, ...
}

// readDocuments fails on a block that no test would run or compare.
func readDocuments(t *testing.T) shown {
	s := shown{packages: map[string][]string{}}
	for _, document := range documents {
		text := readText(t, document)
		blocks := regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$").FindAllStringSubmatch(text, -1)
		fences := regexp.MustCompile("(?m)^[ \t>]*(```|~~~)").FindAllString(text, -1)
		require.Len(t, fences, 2*len(blocks), "%s has a fence that this test does not see", document)
		var service *shownService
		var curl *shownCurl
		for _, block := range blocks {
			language, content := block[1], block[2]
			switch {
			case language == "http" && curl != nil:
				curl.answers = append(curl.answers, content)
				continue // the next block may be an answer too
			case language == "sh" && strings.HasPrefix(content, "curl -i ") && strings.Count(content, "curl ") == 1 && service != nil:
				curl = &shownCurl{command: content}
				service.curls = append(service.curls, curl)
				continue
			case language == "sh" && content == "go -C examples run ./notes\n":
				service = &shownService{command: strings.TrimSpace(content)}
				s.services = append(s.services, service)
			case language == "go":
				formatted, err := format.Source([]byte(content))
				require.NoError(t, err, content)
				require.Equal(t, string(formatted), content, "%s has code that is not as gofmt has it", document)
				name := regexp.MustCompile(`(?m)^package (\w+)$`).FindStringSubmatch(content)
				require.NotNil(t, name, "%s has code that is not a whole file:\n%s", document, content)
				if name[1] == "main" {
					service = &shownService{program: content}
					s.services = append(s.services, service)
				} else {
					s.packages[name[1]] = append(s.packages[name[1]], content)
				}
			case language == "sql":
				s.grants = append(s.grants, content)
			case language == "sh" && strings.Count(content, "\n") == 1:
				s.commands = append(s.commands, strings.TrimSpace(content))
			default:
				t.Fatalf("%s has a block that this test cannot run:\n%s", document, content)
			}
			curl = nil
		}
	}
	return s
}

func readText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

// What the documents show is run as it stands: services are started and the requests sent to them, packages vetted and
// tested, grants granted.
func TestDocumentsBlocksRun(t *testing.T) {
	t.Parallel()
	s := readDocuments(t)
	require.Len(t, s.services, 2, "README.md must show the reference service and a smallest program")
	for i, service := range s.services {
		require.NotEmpty(t, service.curls, "README.md must show a request to each service")
		t.Run("service "+strconv.Itoa(i+1), func(t *testing.T) {
			t.Parallel()
			start := startShown(t, service)
			runCurls(t, service, start())
			if service.program == "" {
				// What it keeps outlives it: startShown kills what it started before.
				runCurls(t, afterwards(service), start())
			}
		})
	}
	require.Len(t, s.packages, 3, "README.md must show a package and its test, and how to open a database")
	t.Run("package notes", func(t *testing.T) {
		t.Parallel()
		testShownPackage(t, s.packages)
	})
	t.Run("package database", func(t *testing.T) {
		t.Parallel()
		testShownDatabase(t, s.packages["database"])
	})
	require.Len(t, s.grants, 1)
	t.Run("grants", func(t *testing.T) {
		t.Parallel()
		useGrants(t, s.grants[0])
	})
}

// The commands that a test cannot run, for it runs inside of them, are those that CI is and runs. The module cannot fetch
// itself either: its path is what can be wrong.
func TestDocumentsCommands(t *testing.T) {
	t.Parallel()
	module := regexp.MustCompile(`(?m)^module (\S+)$`).FindStringSubmatch(readText(t, "go.mod"))[1]
	commands := readDocuments(t).commands
	for _, command := range commands {
		require.Contains(t, []string{"./test.sh", "./test.sh -race", ".ci/run", "go get " + module}, command, "a command that no test knows")
	}
	require.Regexp(t, `(?m)^done < <\(\./test\.sh -race `, readText(t, ".ci/run"), "CI must run what README.md says, with -race")
	require.Subset(t, commands, []string{"./test.sh", ".ci/run", "go get " + module})
	for _, script := range []string{"test.sh", ".ci/run"} {
		info, err := os.Stat(script)
		require.NoError(t, err)
		require.NotZero(t, info.Mode()&0o100, "%s is not executable", script)
	}
	goVersion := regexp.MustCompile(`(?m)^go (\S+)$`).FindStringSubmatch(readText(t, "go.mod"))[1]
	require.Contains(t, readText(t, "README.md"), "Go "+goVersion+" or newer")
}

// Every link within the repository leads somewhere.
func TestDocumentsLinks(t *testing.T) {
	t.Parallel()
	for _, document := range documents {
		for _, link := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(readText(t, document), -1) {
			if strings.HasPrefix(link[1], "https://") {
				continue
			}
			path, anchor, _ := strings.Cut(link[1], "#")
			if path == "" {
				path = document
			}
			require.FileExists(t, path, "%s links to it", document)
			if anchor == "" {
				continue
			}
			var anchors []string
			for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(readText(t, path), -1) {
				kept := regexp.MustCompile(`[^a-z0-9 _-]`).ReplaceAllString(strings.ToLower(heading[1]), "")
				anchors = append(anchors, strings.ReplaceAll(kept, " ", "-"))
			}
			require.Contains(t, anchors, anchor, "%s links to it in %s", document, path)
		}
	}
}

// The table of codes has each code that the library answers, with its status, and no other.
func TestReadmeHasEveryCode(t *testing.T) {
	t.Parallel()
	want := map[string]string{}
	statuses := map[string]string{} // by the name of the constant
	for status := 100; status < 600; status++ {
		statuses[strings.NewReplacer(" ", "", "-", "").Replace(http.StatusText(status))] = strconv.Itoa(status)
	}
	source := readText(t, "answer.go") + readText(t, "holdsend.go") + readText(t, "handler.go")
	outcomes := map[string]string{}
	for _, outcome := range regexp.MustCompile(`(?m)^\t(Outcome\w+) +Outcome = "(\w+)"`).FindAllStringSubmatch(source, -1) {
		outcomes[outcome[1]] = outcome[2]
		want[outcome[2]] = "" // for create's own answers
	}
	for _, refusal := range regexp.MustCompile(`refusal\(http\.Status(\w+), (Outcome\w+)`).FindAllStringSubmatch(source, -1) {
		want[outcomes[refusal[2]]] = statuses[refusal[1]]
	}
	for _, problem := range regexp.MustCompile(`problem\(http\.Status(\w+), "(\w+)"`).FindAllStringSubmatch(source, -1) {
		want[problem[2]] = statuses[problem[1]]
	}
	for _, again := range regexp.MustCompile(`tryAgain\("(\w+)"`).FindAllStringSubmatch(source, -1) {
		want[again[1]] = "503"
	}
	require.Len(t, want, 18)

	got := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| ([^|]+) \\|").FindAllStringSubmatch(readText(t, "README.md"), -1) {
		got[row[1]] = row[2]
		if want[row[1]] == "" && !regexp.MustCompile(`^\d+$`).MatchString(row[2]) {
			got[row[1]] = ""
		}
	}
	require.Equal(t, want, got)
}

// startShown returns what starts a service, on a free port, since the one that it is shown with may be taken, and returns
// its address. Started again, it kills the one before. A command runs in a clean copy of the repository, without a C
// compiler; a program gets a database.
func startShown(t *testing.T, service *shownService) (start func() string) {
	t.Helper()
	var command func(address string) *exec.Cmd
	if service.program == "" {
		clone := cleanClone(t)
		command = func(address string) *exec.Cmd {
			command := exec.Command("sh", "-c", service.command+" -addr "+address)
			command.Dir = clone
			command.Env = environmentWith("CGO_ENABLED=0")
			return command
		}
	} else {
		databaseURL := pgtest.URL(t)
		command = func(address string) *exec.Cmd {
			require.Equal(t, 1, strings.Count(service.program, shownAddress))
			program := strings.Replace(service.program, shownAddress, address, 1)
			directory := shownModule(t, ".", map[string]string{"main.go": program})
			goInModule(t, directory, "", "build", "-o", "program", ".")
			command := exec.Command(filepath.Join(directory, "program"))
			command.Env = environmentWith("DATABASE_URL=" + databaseURL)
			return command
		}
	}
	kill := func() {}
	return func() string {
		t.Helper()
		kill()
		for range 3 { // somebody may be faster to the port
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			address := listener.Addr().String()
			require.NoError(t, listener.Close())
			if kill = startOn(t, command(address), address); kill != nil {
				return address
			}
		}
		t.Fatal("a service of README.md does not start")
		return ""
	}
}

// afterwards is the service with the last answer to each request: what a retry gets.
func afterwards(service *shownService) *shownService {
	retried := *service
	retried.curls = nil
	for _, curl := range service.curls {
		retried.curls = append(retried.curls, &shownCurl{command: curl.command, answers: curl.answers[len(curl.answers)-1:]})
	}
	return &retried
}

// cleanClone copies what a clone has: not what was built, kept or tried out here.
func cleanClone(t *testing.T) string {
	t.Helper()
	directory := t.TempDir()
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		switch name := entry.Name(); {
		case err != nil:
			return err
		case entry.IsDir() && strings.HasPrefix(name, ".") && name != ".":
			return fs.SkipDir
		case entry.IsDir():
			return os.MkdirAll(filepath.Join(directory, path), 0o755)
		case !slices.Contains([]string{".go", ".mod", ".sum", ".sql"}, filepath.Ext(name)) || strings.HasPrefix(name, "go.work"):
			return nil
		}
		return os.WriteFile(filepath.Join(directory, path), []byte(readText(t, path)), 0o644)
	})
	require.NoError(t, err)
	return directory
}

const shownAddress = "127.0.0.1:8080"

// environmentWith is the test's own environment without a DATABASE_URL, which belongs to whoever runs the tests, and with
// more. A Go workspace is one's own too.
func environmentWith(more ...string) []string {
	own := slices.DeleteFunc(os.Environ(), func(variable string) bool { return strings.HasPrefix(variable, "DATABASE_URL=") })
	return append(own, append(more, "GOWORK=off")...)
}

// startOn starts a service, waits until something listens at address, and returns what kills it; nil if the service ended
// before. The service has a process group of its own, because sh and go run stand between it and the test.
func startOn(t *testing.T, command *exec.Cmd, address string) (kill func()) {
	t.Helper()
	var log bytes.Buffer
	command.Stdout, command.Stderr = &log, &log
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, command.Start())
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = command.Wait()
	}()
	kill = func() {
		_ = syscall.Kill(-command.Process.Pid, syscall.SIGKILL)
		<-exited
	}
	t.Cleanup(func() {
		kill()
		if t.Failed() {
			t.Logf("the service's log:\n%s", log.String())
		}
	})
	for deadline := time.Now().Add(documentPatience); time.Now().Before(deadline); {
		connection, err := net.Dial("tcp", address)
		if err == nil {
			require.NoError(t, connection.Close())
			return kill
		}
		select {
		case <-exited:
			return nil
		case <-time.After(20 * time.Millisecond):
		}
	}
	t.Fatal("a service of README.md does not listen")
	return nil
}

// runCurls sends each request as often as it has answers. One without is a create, sent twice.
func runCurls(t *testing.T, service *shownService, address string) {
	_, err := exec.LookPath("curl")
	require.NoError(t, err, "this test runs the curl commands of README.md: install curl (Debian and Ubuntu: apt-get install curl)")
	for _, curl := range service.curls {
		require.Equal(t, 1, strings.Count(curl.command, shownAddress))
		answers := curl.answers
		if answers == nil {
			answers = []string{"HTTP/1.1 201 Created\n", "HTTP/1.1 201 Created\nIdempotent-Replayed: true\n"}
		}
		bodies := map[string]bool{}
		for _, want := range answers {
			command := exec.CommandContext(t.Context(), "sh", "-c", strings.Replace(curl.command, shownAddress, address, 1))
			command.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()} // neither a proxy nor a .curlrc
			var stderr bytes.Buffer
			command.Stderr = &stderr
			output, err := command.Output()
			require.NoError(t, err, stderr.String())
			bodies[compareAnswers(t, string(output), want)] = true
		}
		require.Len(t, bodies, 1, "each answer must have the same body, byte for byte")
	}
}

// compareAnswers compares the status line, the headers that are shown, Idempotent-Replayed, and the body if one is shown.
// Times differ, so each counts as any time. It returns the body that was got.
func compareAnswers(t *testing.T, got, want string) string {
	t.Helper()
	gotHead, gotBody, _ := strings.Cut(strings.ReplaceAll(got, "\r\n", "\n"), "\n\n")
	wantHead, wantBody, _ := strings.Cut(want, "\n\n")
	gotLines := strings.Split(gotHead, "\n")
	require.Subset(t, gotLines, strings.Split(strings.TrimSpace(wantHead), "\n"), got)
	require.Equal(t, strings.Contains(wantHead, "Idempotent-Replayed: "), strings.Contains(gotHead, "Idempotent-Replayed: "), got)
	if wantBody != "" {
		times := regexp.MustCompile(`"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"`)
		require.Equal(t, times.ReplaceAllString(strings.TrimSpace(wantBody), "TIME"), times.ReplaceAllString(strings.TrimSpace(gotBody), "TIME"))
	}
	return gotBody
}

// shownModule writes files into a module of their own that requires what the module in this directory does, and the library
// from here.
func shownModule(t *testing.T, from string, files map[string]string) string {
	t.Helper()
	root, err := os.Getwd()
	require.NoError(t, err)
	const path = "github.com/holdsend/holdsend-go"
	module := regexp.MustCompile(`(?m)^module .*$`).ReplaceAllString(readText(t, filepath.Join(from, "go.mod")), "module example.com/service")
	module = regexp.MustCompile(`(?m)^(replace |\s*)`+path+` .*$`).ReplaceAllString(module, "")
	module += fmt.Sprintf("\nrequire %s v0.0.0\n\nreplace %s => %s\n", path, path, strconv.Quote(root))
	directory := t.TempDir()
	files["go.mod"], files["go.sum"] = module, readText(t, filepath.Join(from, "go.sum"))
	for name, text := range files {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(directory, name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(directory, name), []byte(text), 0o644))
	}
	return directory
}

// goInModule runs a go command, without C, as .ci/run builds what the command needs. It adds what go.mod lacks by itself,
// and finds it in the module cache.
func goInModule(t *testing.T, directory, databaseURL string, arguments ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), documentPatience)
	defer cancel()
	command := exec.CommandContext(ctx, "go", arguments...)
	command.Dir = directory
	command.Env = environmentWith("GOFLAGS=-mod=mod", "CGO_ENABLED=0", "TEST_DATABASE_URL="+databaseURL)
	output, err := command.CombinedOutput()
	require.NoError(t, err, "go %s:\n%s", strings.Join(arguments, " "), output)
}

// testShownPackage vets the package and runs its test on a database of its own.
func testShownPackage(t *testing.T, packages map[string][]string) {
	files := map[string]string{}
	for name, texts := range packages {
		if name == "database" { // needs a driver, and has a test of its own
			continue
		}
		require.Contains(t, []string{"notes", "notes_test"}, name)
		for i, text := range texts {
			file := fmt.Sprintf("notes/file%d.go", i+1)
			if strings.HasSuffix(name, "_test") {
				file = fmt.Sprintf("notes/file%d_test.go", i+1)
			}
			files[file] = text
		}
	}
	directory := shownModule(t, ".", files)
	goInModule(t, directory, "", "vet", "./...")
	// The test makes a schema of its own name, so the database must be its own.
	goInModule(t, directory, pgtest.StartCluster(t, nil).URL(), "test", "-count=1", "./...")
}

// testShownDatabase keeps a record in a file, and finds it there when the file is opened again.
func testShownDatabase(t *testing.T, texts []string) {
	require.Len(t, texts, 1)
	directory := shownModule(t, "examples", map[string]string{"database/database.go": texts[0], "main.go": `package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/http"

	"example.com/service/database"
	"github.com/holdsend/holdsend-go"
)

func main() {
	for range 2 {
		db, store, err := database.Open("notes.db")
		if err != nil {
			panic(err)
		}
		answer, err := holdsend.HandleIdempotent(context.Background(), store, holdsend.Request{
			Owner: "ada", Operation: "note.create", Content: "milk", Header: http.Header{"Idempotency-Key": {"note-0001"}},
		}, func(context.Context, *sql.Tx, holdsend.Incoming) (holdsend.Response, error) {
			return holdsend.Response{Status: http.StatusCreated}, nil
		})
		fmt.Print(answer.Outcome, " ", err, " ", db.Close(), "\n")
	}
}
`})
	goInModule(t, directory, "", "vet", "./...")
	goInModule(t, directory, "", "build", "-o", "program", ".")
	command := exec.Command(filepath.Join(directory, "program"))
	command.Dir = directory
	output, err := command.CombinedOutput()
	require.NoError(t, err, string(output))
	require.Equal(t, "created <nil> <nil>\nreplayed <nil> <nil>\n", string(output))
}

// useGrants grants what README.md shows to a role that has nothing else, and does all that a service does as that role.
func useGrants(t *testing.T, grants string) {
	ctx := context.Background()
	cluster := pgtest.StartCluster(t, nil)
	o := &holdsend.PostgresOptions{Schema: "app"}
	aside := pgtest.Pool(t, cluster.URL(), nil)
	pgtest.Exec(t, aside, "CREATE SCHEMA app; CREATE ROLE notes_service LOGIN")
	pgtest.Exec(t, aside, holdsend.PostgresSchema(o))
	pool := pgtest.Pool(t, cluster.URL(), func(c *pgxpool.Config) { c.ConnConfig.User = "notes_service" })
	store, err := holdsend.NewPostgresStore(pool, o)
	require.NoError(t, err)
	send := func() (holdsend.Answer, error) {
		request := holdsend.Request{
			Owner: "ada", Operation: "note.create", Content: "milk", Header: http.Header{"Idempotency-Key": {"note-0001"}},
		}
		return holdsend.HandleIdempotent(ctx, store, request, func(context.Context, pgx.Tx, holdsend.Incoming) (holdsend.Response, error) {
			return holdsend.Response{Status: http.StatusCreated, ResourceRef: "1"}, nil
		})
	}
	_, err = send()
	require.Error(t, err, "the role must have nothing but what is shown")

	pgtest.Exec(t, aside, grants)
	_, err = pool.Exec(ctx, holdsend.PostgresSchema(o))
	require.NoError(t, err, "a service runs it at every start")
	for _, want := range []holdsend.Outcome{holdsend.OutcomeCreated, holdsend.OutcomeReplayed} {
		answer, err := send()
		require.NoError(t, err)
		require.Equal(t, want, answer.Outcome)
	}
	err = store.InTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		n, err := store.TombstoneResource(ctx, tx, holdsend.Resource{Owner: "ada", Operation: "note.create", Ref: "1"})
		if err == nil && n != 1 {
			err = errors.New("no record became a tombstone")
		}
		return err
	})
	require.NoError(t, err)
	_, err = store.PurgeExpired(ctx)
	require.NoError(t, err)
	forgotten, err := store.ForgetOwner(ctx, "ada")
	require.NoError(t, err)
	require.EqualValues(t, 1, forgotten)
}
