package main

import (
	"math/rand/v2"
	"sync"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
)

// dice is a seeded source of chance for many goroutines.
type dice struct {
	mu     sync.Mutex
	random *rand.Rand
}

func newDice(seed, stream uint64) *dice { return &dice{random: rand.New(rand.NewPCG(seed, stream))} }

func (d *dice) below(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.random.IntN(n)
}

func (d *dice) oneIn(n int) bool { return d.below(n) == 0 }

// atRandom is the step of a fault that strikes at no step in particular.
const atRandom service.Step = "at random"

// Where faults can strike.
var (
	everyStep = []service.Step{service.BeforeClaim, service.Claimed, service.InCreate, service.Completing, service.Committing, service.Answering}
	inAttempt = []service.Step{service.Claimed, service.InCreate, service.Completing, service.Committing}
	onTheWay  = []service.Step{service.Claimed, service.InCreate, service.Completing}
	aroundIt  = []service.Step{service.BeforeClaim, service.Answering}
	inCreate  = []service.Step{service.InCreate}
	atCommit  = []service.Step{service.Committing}
	anyTime   = []service.Step{atRandom}
)

// An aim is a fault, where it strikes, and how often at each step: in a long run, and in all in a short one.
type aim struct {
	fault       string
	steps       []service.Step
	long, short int
}

// A plan is what happens in one world.
type plan struct {
	world  string
	rounds int // each with databases emptied and services started afresh, and judged by itself
	items  int // in each round
	aims   []aim
}

// A planned fault strikes one item.
type planned struct {
	fault string
	step  service.Step
}

// faults returns the faults of each round, in an order made by dice.
func (p plan) faults(long bool, dice *dice) [][]planned {
	var all []planned
	for _, a := range p.aims {
		if long {
			for _, step := range a.steps {
				for range a.long {
					all = append(all, planned{a.fault, step})
				}
			}
			continue
		}
		first := dice.below(len(a.steps))
		for n := range a.short {
			all = append(all, planned{a.fault, a.steps[(first+n)%len(a.steps)]})
		}
	}
	dice.random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	rounds := make([][]planned, p.rounds)
	for n, f := range all {
		rounds[n%p.rounds] = append(rounds[n%p.rounds], f)
	}
	return rounds
}

// plans returns what a run does, world by world.
func plans(long bool) []plan {
	all := []plan{
		{world: worldPostgres, rounds: 20, items: 4600, aims: []aim{
			{killService, everyStep, 45, 6}, {killService, anyTime, 30, 2},
			{stopService, onTheWay, 16, 3}, {stopService, atCommit, 16, 1}, {stopService, aroundIt, 8, 1},
			{clientLeaves, everyStep, 15, 6},
			{terminateBackend, inAttempt, 75, 4}, {terminateBackend, aroundIt, 20, 1}, {terminateBackend, anyTime, 40, 1},
			{cancelBackend, inAttempt, 25, 4}, {cancelBackend, anyTime, 10, 1},
			{killBackend, inAttempt, 4, 1}, {crashDatabase, everyStep, 6, 2},
			{cutBeforeCommit, atCommit, 60, 2}, {cutInsideCommit, atCommit, 60, 2}, {delayCommit, atCommit, 60, 2},
			{loseCommitAnswer, atCommit, 80, 3}, {loseAnswers, atCommit, 40, 1}, {silenceCommitAnswer, atCommit, 12, 1},
			{cutConnection, onTheWay, 25, 3}, {cutEverything, anyTime, 20, 1},
			{delayNetwork, everyStep, 10, 2}, {stallNetwork, everyStep, 4, 1},
			{service.MakeStatementTimeout, inCreate, 30, 1}, {service.MakeLockTimeout, inCreate, 30, 1},
			{service.MakeIdleTimeout, inCreate, 30, 1}, {service.MakeDeadlock, inCreate, 30, 1},
			{service.MakeError, inCreate, 30, 1}, {service.MakePanic, inCreate, 30, 1}, {service.MakeUnavailable, inCreate, 30, 1},
			{readOnlyDatabase, everyStep, 4, 1}, {fullPool, everyStep, 10, 2},
			{purgeRecords, inAttempt, 15, 2}, {forgetOwner, inAttempt, 15, 2}, {deleteResource, aroundIt, 25, 2},
		}},
		{world: worldSerializable, rounds: 4, items: 700, aims: []aim{
			{killService, everyStep, 16, 3}, {terminateBackend, inAttempt, 20, 3}, {cancelBackend, inAttempt, 8, 1},
			{service.MakeSerialization, inCreate, 100, 3}, {service.MakeDeadlock, inCreate, 50, 2},
			{cutBeforeCommit, atCommit, 15, 1}, {cutInsideCommit, atCommit, 15, 1}, {delayCommit, atCommit, 15, 1},
			{loseCommitAnswer, atCommit, 20, 1}, {stopService, inAttempt, 3, 1}, {crashDatabase, everyStep, 1, 0},
			{forgetOwner, inAttempt, 5, 1}, {purgeRecords, inAttempt, 5, 1}, {deleteResource, aroundIt, 10, 1},
		}},
		{world: worldPgBouncer, rounds: 4, items: 1500, aims: []aim{
			{killService, everyStep, 16, 3}, {terminateBackend, inAttempt, 20, 3}, {cancelBackend, inAttempt, 8, 1},
			{restartPgBouncer, everyStep, 12, 2}, {crashDatabase, everyStep, 1, 0}, {stopService, inAttempt, 3, 1},
			{cutBeforeCommit, atCommit, 15, 1}, {cutInsideCommit, atCommit, 15, 1}, {delayCommit, atCommit, 15, 1},
			{loseCommitAnswer, atCommit, 20, 1}, {loseAnswers, atCommit, 10, 1}, {cutConnection, onTheWay, 10, 1},
			{stallNetwork, everyStep, 2, 0}, {fullPool, everyStep, 5, 1},
			{service.MakeStatementTimeout, inCreate, 10, 1}, {service.MakeIdleTimeout, inCreate, 10, 1},
			{forgetOwner, inAttempt, 5, 1}, {purgeRecords, inAttempt, 5, 1}, {deleteResource, aroundIt, 10, 1},
		}},
		{world: worldSQLite, rounds: 4, items: 1500, aims: []aim{
			{killService, everyStep, 25, 6}, {killService, anyTime, 30, 1}, {stopService, everyStep, 5, 2},
			{clientLeaves, everyStep, 10, 3}, {busyWriter, everyStep, 10, 2}, {fullDisk, everyStep, 10, 3},
			{service.MakeError, inCreate, 20, 1}, {service.MakePanic, inCreate, 20, 1}, {service.MakeUnavailable, inCreate, 20, 1},
			{forgetOwner, inAttempt, 5, 1}, {purgeRecords, inAttempt, 5, 1}, {deleteResource, aroundIt, 10, 1},
		}},
	}
	if long { // its service takes a minute to build
		all = append(all, plan{world: worldClocks, rounds: 1, items: 1500, aims: []aim{
			{killService, everyStep, 5, 0}, {terminateBackend, inAttempt, 5, 0}, {stopService, inAttempt, 2, 0},
			{loseCommitAnswer, atCommit, 10, 0}, {crashDatabase, everyStep, 1, 0},
			{purgeRecords, inAttempt, 10, 0}, {forgetOwner, inAttempt, 3, 0}, {deleteResource, aroundIt, 5, 0},
		}})
	}
	if !long {
		for n := range all {
			all[n].rounds, all[n].items = 1, 250
		}
	}
	return all
}
