package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Each part runs to its end and fills its tables. How fast things are is not looked at.
func TestEveryPartMeasures(t *testing.T) {
	t.Parallel()
	report := filepath.Join(t.TempDir(), "report.md")
	document := "before\n"
	for _, p := range parts() {
		document += "<!-- bench:" + p.name + " -->\nyesterday\n<!-- /bench:" + p.name + " -->\n"
	}
	require.NoError(t, os.WriteFile(report, []byte(document), 0o600))
	smallest := setting{
		rounds: 1, round: 5 * time.Millisecond, clients: []int{2}, delays: []time.Duration{time.Millisecond},
		records: 1e4, quick: true,
	}
	require.NoError(t, measure(t.Context(), smallest, parts(), report))

	written, err := os.ReadFile(report)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(written), "before\n"))
	require.NotContains(t, string(written), "yesterday")
	for _, p := range parts() {
		_, text, _ := strings.Cut(string(written), "<!-- bench:"+p.name+" -->\n")
		text, _, found := strings.Cut(text, "<!-- /bench:"+p.name+" -->")
		require.True(t, found, p.name)
		require.Regexp(t, regexp.MustCompile(`(?m)^\|---\|`), text, p.name)
		require.NotRegexp(t, `NaN|Inf|\| \|$`, text, p.name)
	}
}

func TestRefusesWhatItDoesNotKnow(t *testing.T) {
	for _, arguments := range [][]string{
		{"-only", "creates"}, {"-clients", "0"}, {"-clients", "a"}, {"-delays", "fast"}, {"-rounds", "0"}, {"create"},
	} {
		require.Error(t, run(context.Background(), arguments), "%q", arguments)
	}
	require.Error(t, writeReport(filepath.Join(t.TempDir(), "none.md"), "create", ""))
}

// What is sent in one go is delayed once, whatever its length, and in order.
func TestDelayIsPaidOnce(t *testing.T) {
	t.Parallel()
	require.NoError(t, outsideTests(t.Context(), func(b *bench) {
		const delay = 100 * time.Millisecond
		pool := b.pool(b.delayed(b.server().TCPURL(), delay), 1)
		_, err := pool.Exec(b.ctx, "SELECT 1") // connected
		b.check(err)
		start := time.Now()
		var length int
		text := strings.Repeat("x", 1<<20)
		b.check(pool.QueryRow(b.ctx, "SELECT length($1::text)", text).Scan(&length))
		took := time.Since(start)
		if length != len(text) || took < delay {
			b.Fatalf("%d characters in %s", length, took)
		}
		if took > 40*delay { // there are 64 pieces of it
			b.Fatalf("the pieces waited for each other: %s", took)
		}
	}))
}

func TestSpread(t *testing.T) {
	require.Equal(t, spread{2, 3, 4}, spreadOf([]float64{5, 1, 4, 2, 3}))
	require.Equal(t, spread{1.25, 1.5, 1.75}, spreadOf([]float64{2, 1}))
	require.Equal(t, "0.50 (0.50–0.50)", ratios([]float64{1, 2}, []float64{2, 4}).String())
}

// What is set up is cleaned up, in the order of a test's, whatever ended the measurement.
func TestOutsideTestsCleansUp(t *testing.T) {
	var order []string
	err := outsideTests(t.Context(), func(b *bench) {
		b.Cleanup(func() { order = append(order, "first") })
		b.Cleanup(func() { order = append(order, "second") })
		b.Fatal("broken")
	})
	require.EqualError(t, err, "broken")
	require.Equal(t, []string{"second", "first"}, order)
}
