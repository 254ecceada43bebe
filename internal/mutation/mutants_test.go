package main

import (
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The proof itself takes minutes: `go run ./internal/mutation`. This keeps its table from growing stale unseen.
func TestEveryMutantIsStillThere(t *testing.T) {
	t.Parallel()
	module, err := moduleDirectory(t.Context())
	require.NoError(t, err)
	bugs := map[string]bool{}
	for _, m := range mutants {
		require.False(t, bugs[m.bug], "two mutants are called %q", m.bug)
		bugs[m.bug] = true
		require.NotEmpty(t, m.rule, m.bug)
		changed, err := m.apply(module)
		require.NoError(t, err, m.bug)
		require.NotEmpty(t, changed, m.bug)
		for file, source := range changed {
			if strings.HasSuffix(file, ".go") {
				_, err := parser.ParseFile(token.NewFileSet(), file, source, parser.SkipObjectResolution)
				require.NoError(t, err, m.bug)
			}
		}
	}
}

// A bug whose text has gone from the source, or is there twice, is never taken for one that is planted.
func TestStaleMutantIsAnError(t *testing.T) {
	t.Parallel()
	module, err := moduleDirectory(t.Context())
	require.NoError(t, err)
	for _, e := range []edit{
		{protocol, "no such text", ""},
		{protocol, "return", ""},
		{"no_such_file.go", "return", ""},
	} {
		_, err := mutant{edits: []edit{e}}.apply(module)
		require.Error(t, err)
	}
}

// Which test is named, and that what does not compile counts as not caught.
func TestExecute(t *testing.T) {
	t.Parallel()
	module, err := moduleDirectory(t.Context())
	require.NoError(t, err)
	here := tests{"internal/headertext", "^TestEveryByteComesBack$"}

	failed, _, err := here.execute(t.Context(), module)
	require.NoError(t, err)
	require.Empty(t, failed)

	const file = "internal/headertext/headertext.go"
	caughtBy, err := mutant{edits: []edit{{file, "byte(c))", "byte(c)+1)"}}, tests: here}.prove(t.Context(), module)
	require.NoError(t, err)
	require.Equal(t, "`TestEveryByteComesBack`", caughtBy)

	_, err = mutant{edits: []edit{{file, "byte(c))", "c)"}}, tests: here}.prove(t.Context(), module)
	require.ErrorContains(t, err, "does not compile")

	_, err = mutant{edits: []edit{{file, "are corrupt", "are not well"}}, tests: here}.prove(t.Context(), module)
	require.ErrorContains(t, err, "the tests pass")

	here.run = "^TestNoSuch$"
	_, err = mutant{edits: []edit{{file, "byte(c))", "c)"}}, tests: here}.prove(t.Context(), module)
	require.ErrorContains(t, err, "no test has that name")
}
