package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// clockVariable names the environment variable with the seconds by which the clock of a service is wrong. Only a service
// that buildWithClock built reads it.
const clockVariable = "HOLDSEND_CHAOS_CLOCK"

const clockSource = `package time

import "syscall"

var chaosClock = func() (seconds int64) {
	text, _ := syscall.Getenv("` + clockVariable + `")
	sign := int64(1)
	for _, c := range text {
		if c == '-' {
			sign = -1
			continue
		}
		seconds = 10*seconds + int64(c-'0')
	}
	return sign * seconds
}()
`

// buildWithClock builds this program with a time.Now that can be wrong. A library that fakes the clock of C programs does
// not reach Go, which asks the kernel itself; so the standard library is changed, for this build alone.
func buildWithClock(ctx context.Context, t testing.TB, directory string) string {
	t.Helper()
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(string(bytes.TrimSpace(root)), "src", "time", "time.go")
	text, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	const asked = "sec, nsec, mono := runtimeNow()\n"
	if strings.Count(string(text), asked) != 1 {
		t.Fatal("this version of Go asks for the time in another way: see buildWithClock")
	}
	changed := strings.Replace(string(text), asked, asked+"\tsec += chaosClock\n", 1)
	files := map[string]string{}
	for name, text := range map[string]string{"time.go": changed, "chaos_clock.go": clockSource} {
		file := filepath.Join(directory, name)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		files[filepath.Join(filepath.Dir(source), name)] = file
	}
	overlay, err := json.Marshal(map[string]any{"Replace": files})
	if err != nil {
		t.Fatal(err)
	}
	overlayFile, program := filepath.Join(directory, "overlay.json"), filepath.Join(directory, "chaos")
	if err := os.WriteFile(overlayFile, overlay, 0o644); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(ctx, "go", "build", "-overlay", overlayFile, "-o", program, "github.com/holdsend/holdsend-go/internal/chaos")
	if output, err := runBuild(build); err != nil {
		t.Fatalf("build the service with a clock of its own, within %v: %v\n%s", buildTimeout, err, output)
	}
	return program
}

// checkClock holds the clock of a service, as it told it, to what it should be.
func checkClock(told time.Time, wrongBy time.Duration) error {
	if off := time.Until(told) - wrongBy; off.Abs() > time.Minute {
		return fmt.Errorf("the clock of a service was to be wrong by %v and is off that by %v", wrongBy, off)
	}
	return nil
}
