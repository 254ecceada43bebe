// Command mutation proves the tests: it plants one bug after the other in the library's source and shows which test
// catches it. It changes no file: go test reads the changed ones from a temporary directory (-overlay).
//
//	go run ./internal/mutation [-run regexp]
//
// It prints a Markdown table, and ends with status 1 if a bug is not caught. A test counts only if it passes without the
// bug. A bug whose text is no longer there, or that no longer compiles, is not caught.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// timeout bounds one run of tests: some bugs show in that something never happens.
const timeout = 90 * time.Second

func main() {
	pattern := flag.String("run", "", "only bugs whose name matches this regular `expression`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := prove(ctx, *pattern); err != nil {
		fmt.Fprintln(os.Stderr, "mutation:", err)
		os.Exit(1)
	}
}

func prove(ctx context.Context, pattern string) error {
	selected, err := regexp.Compile(pattern)
	if err != nil {
		return err
	}
	module, err := moduleDirectory(ctx)
	if err != nil {
		return err
	}
	flawed, err := flawedStores(module)
	if err != nil {
		return err
	}
	fmt.Printf("Bugs planted in the source. (The %d flawed stores of contracttest are beside them: "+
		"`go test -run TestEveryMutantIsCaught -v ./contracttest` prints those.)\n\n", flawed)
	fmt.Print("| bug | rule | caught by | time |\n|---|---|---|---|\n")
	planted, missed := 0, 0
	for _, m := range mutants {
		if !selected.MatchString(m.bug) {
			continue
		}
		planted++
		started := time.Now()
		caughtBy, err := m.prove(ctx, module)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			missed++
			caughtBy = "**NOT CAUGHT**: " + err.Error()
		}
		fmt.Printf("| %s | %s | %s | %.1f s |\n", m.bug, m.rule, caughtBy, time.Since(started).Seconds())
	}
	fmt.Printf("\n%d bugs, %d caught.\n", planted, planted-missed)
	if missed > 0 {
		return fmt.Errorf("%d bugs are not caught", missed)
	}
	return nil
}

func moduleDirectory(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	return filepath.Dir(strings.TrimSpace(string(out))), err
}

// flawedStores counts those that the suite for stores is proved with.
func flawedStores(module string) (int, error) {
	source, err := os.ReadFile(filepath.Join(module, "contracttest", "mutants_test.go"))
	return strings.Count(string(source), "\n\t{\""), err
}

// prove returns the name of the first test that fails for m.
func (m mutant) prove(ctx context.Context, module string) (string, error) {
	directory, err := os.MkdirTemp("", "mutation")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(directory)
	overlay, err := m.overlay(module, directory)
	if err != nil {
		return "", err
	}
	if failed, output, err := m.tests.execute(ctx, module); err != nil || failed != "" {
		return "", fmt.Errorf("the tests fail without it: %s %w%s", failed, err, lastLine(output))
	}
	failed, output, err := m.tests.execute(ctx, module, "-count=1", "-overlay="+overlay)
	switch {
	case err != nil:
		return "", fmt.Errorf("%w%s", err, lastLine(output))
	case failed == "":
		return "", errors.New("the tests pass")
	}
	return "`" + failed + "`", nil
}

// overlay writes the changed files to directory, and what go's flag -overlay wants.
func (m mutant) overlay(module, directory string) (string, error) {
	changed, err := m.apply(module)
	if err != nil {
		return "", err
	}
	replace := map[string]string{}
	for file, source := range changed {
		path := filepath.Join(directory, filepath.Base(file))
		if err := os.WriteFile(path, []byte(source), 0o600); err != nil {
			return "", err
		}
		replace[filepath.Join(module, filepath.FromSlash(file))] = path
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(directory, "overlay.json")
	return path, os.WriteFile(path, text, 0o600)
}

// apply returns the changed files.
func (m mutant) apply(module string) (map[string]string, error) {
	changed := map[string]string{}
	for _, e := range m.edits {
		source, ok := changed[e.file]
		if !ok {
			text, err := os.ReadFile(filepath.Join(module, filepath.FromSlash(e.file)))
			if err != nil {
				return nil, err
			}
			source = string(text)
		}
		if n := strings.Count(source, e.old); n != 1 {
			return nil, fmt.Errorf("its text occurs %d times in %s: update it", n, e.file)
		}
		changed[e.file] = strings.Replace(source, e.old, e.new, 1)
	}
	return changed, nil
}

var failedTest = regexp.MustCompile(`(?m)^ *--- FAIL: (\S+)`)

// execute runs the tests and returns the first that failed: "" if they passed. The error is that something else went
// wrong, such as that they do not compile.
func (s tests) execute(ctx context.Context, module string, flags ...string) (failed, output string, err error) {
	arguments := append([]string{"test", "-vet=off", "-parallel=16", "-timeout=" + timeout.String(), "-run=" + s.run}, flags...)
	command := exec.CommandContext(ctx, "go", append(arguments, ".")...)
	command.Dir = filepath.Join(module, filepath.FromSlash(s.directory))
	command.WaitDelay = time.Second // a child of a test that was killed may keep the output open
	var out bytes.Buffer
	command.Stdout, command.Stderr = &out, &out
	runErr := command.Run()
	output = out.String()
	if runErr == nil {
		if strings.Contains(output, "no tests to run") {
			return "", "", errors.New("no test has that name: " + s.run)
		}
		return "", output, nil
	}
	for _, match := range failedTest.FindAllStringSubmatch(output, -1) {
		if failed != "" && !strings.HasPrefix(match[1], failed+"/") {
			break
		}
		failed = match[1] // a subtest stands below its test
	}
	switch {
	case failed != "":
	case strings.Contains(output, "[build failed]"), strings.Contains(output, "[setup failed]"):
		return "", output, errors.New("it does not compile")
	case strings.Contains(output, "panic: test timed out"):
		failed = "a test that never ends (" + s.run + ")"
	default:
		return "", output, runErr
	}
	return failed, output, nil
}

// lastLine returns what went wrong, for a cell of the table.
func lastLine(output string) string {
	lines := strings.Split(strings.TrimSpace(output), "\n")
	return " " + strings.ReplaceAll(lines[max(0, len(lines)-2)], "|", "\\|")
}
