package contracttest

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestBareHarness runs the suite with what a harness must have, and nothing more.
func TestBareHarness(t *testing.T) {
	t.Parallel()
	Run(t, func(*testing.T) Harness[*flawedTx] {
		h := newFlawedHarness("")
		return Harness[*flawedTx]{Store: h.Store, Write: h.Write, Count: h.Count}
	})
}

// TestSingleWriter runs the suite as for a database with one writer.
func TestSingleWriter(t *testing.T) {
	t.Parallel()
	Run(t, func(*testing.T) Harness[*flawedTx] {
		h := newFlawedHarness("")
		h.SingleWriter = true
		return h
	})
}

// TestNotRunIsLogged reads the log of TestBareHarness: each case that was not run says so, with the reason, and all are
// counted.
func TestNotRunIsLogged(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), program, "-test.run=^TestBareHarness$", "-test.v", "-test.count=1", "-test.parallel=100").CombinedOutput()
	if err != nil {
		t.Fatalf("a harness with nothing optional failed: %v\n%s", err, out)
	}
	notRun := 0
	for _, c := range allCases[*flawedTx]() {
		reason := c.missing(Harness[*flawedTx]{})
		if reason == "" {
			continue
		}
		notRun++
		if line := "not run: " + c.rule + " (" + reason + ")"; !strings.Contains(string(out), line) {
			t.Errorf("the log does not say %q", line)
		}
	}
	if notRun == 0 {
		t.Error("no case needs anything optional")
	}
	if got := strings.Count(string(out), "not run: "); got != notRun {
		t.Errorf("%d cases are logged as not run, want %d", got, notRun)
	}
	if !strings.Contains(string(out), "cases of the store's contract were not run") {
		t.Error("the cases that were not run are not counted")
	}
}
