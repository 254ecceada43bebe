package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
)

func TestMain(m *testing.M) {
	serveIfAsked()
	os.Exit(m.Run())
}

// seed is that of the short form in tests: the faults are the same each time, what they meet is not.
const seed = 1

func TestNothingIsLostDoubledStuckOrAnsweredWrongly(t *testing.T) {
	rep := run(t, options{seed: seed, command: "go test ./internal/chaos", within: 3 * time.Minute})
	t.Log("\n" + rep.markdown())
	assert.Empty(t, rep.problem())

	planned := 0
	for _, plan := range plans(false) {
		struck := 0
		for _, steps := range rep.hits[plan.world] {
			for _, count := range steps {
				struck += count
			}
		}
		for _, round := range plan.faults(false, newDice(seed, 0)) {
			planned += len(round)
		}
		assert.NotZero(t, struck, plan.world)
	}
	assert.Greater(t, rep.strikes(), planned*3/4, "most of the %d planned faults must have struck", planned)
}

// A harness that finds nothing proves something only if it finds what is there.
func TestPlantedBugsAreFound(t *testing.T) {
	for bug, verdict := range map[string]string{service.BugNoRecord: doubled, service.BugEarly: lost} {
		t.Run(bug, func(t *testing.T) {
			rep := run(t, options{seed: seed, bug: bug, within: 30 * time.Second, plans: []plan{{
				world: worldPostgres, rounds: 1, items: 60,
				aims: []aim{{fault: killService, steps: anyTime, short: 6}, {fault: killService, steps: []service.Step{service.Answering}, short: 4}},
			}}})
			assert.NotZero(t, rep.verdicts[verdict], "the bug was not found:\n%s", rep.markdown())
			assert.NotEmpty(t, rep.problem())
		})
	}
}

func TestTheSeedMakesTheSchedule(t *testing.T) {
	t.Parallel()
	for _, long := range []bool{false, true} {
		for n, plan := range plans(long) {
			faults := plan.faults(long, newDice(7, uint64(n)))
			assert.Equal(t, faults, plan.faults(long, newDice(7, uint64(n))))
			assert.NotEqual(t, faults, plan.faults(long, newDice(8, uint64(n))))
			for _, round := range faults {
				assert.Less(t, len(round), plan.items*9/10, "more faults than items")
			}
		}
	}
}

func TestALongRunHasWhatItsTablePromises(t *testing.T) {
	t.Parallel()
	items, faults, steps := 0, map[string]int{}, map[service.Step]int{}
	for n, plan := range plans(true) {
		items += plan.rounds * plan.items
		for _, round := range plan.faults(true, newDice(seed, uint64(n))) {
			for _, f := range round {
				faults[f.fault]++
				steps[f.step]++
			}
		}
	}
	cuts := 0
	for _, cut := range []string{cutBeforeCommit, cutInsideCommit, delayCommit, loseCommitAnswer, loseAnswers, silenceCommitAnswer} {
		cuts += faults[cut]
	}
	assert.GreaterOrEqual(t, items, 100_000)
	assert.GreaterOrEqual(t, faults[killService], 500)
	assert.GreaterOrEqual(t, faults[terminateBackend], 500)
	assert.GreaterOrEqual(t, cuts, 300)
	assert.GreaterOrEqual(t, faults[crashDatabase], 40)
	assert.GreaterOrEqual(t, faults[stopService], 50)
	for _, step := range service.Steps() {
		assert.GreaterOrEqual(t, steps[step], 100, step)
	}
}

func TestTheReportReplacesItsTableAlone(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "document.md")
	rep := newReport(seed, "a command")
	rep.hit(worldPostgres, planned{killService, service.InCreate})
	require.NoError(t, os.WriteFile(file, []byte("before\n"), 0o644))
	require.Error(t, rep.writeInto(file), "there is no place for it")

	require.NoError(t, os.WriteFile(file, []byte("before\n"+tableBegins+"old\n"+tableEnds+"after\n"), 0o644))
	for range 2 {
		require.NoError(t, rep.writeInto(file))
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		assert.Equal(t, "before\n"+tableBegins+"\n"+rep.markdown()+"\n"+tableEnds+"after\n", string(text))
	}
}
