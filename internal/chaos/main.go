// Command chaos runs services that are protected by holdsend, sends them items while faults strike (killed processes, cut
// connections, a database that crashes), and then judges from the outside, by what clients saw and what the database
// holds: that nothing is lost, doubled, stuck or answered wrongly.
//
//	go run ./internal/chaos         // a short form, about two minutes
//	go run ./internal/chaos -long   // makes the table of docs/reliability.md
//
// A seed makes the schedule: which fault strikes at which step of which item. How processes interleave it does not make,
// so the same seed gives the same faults and not the same run.
package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
)

func main() {
	serveIfAsked()
	var o options
	flag.BoolVar(&o.long, "long", false, "make the table of docs/reliability.md")
	flag.Uint64Var(&o.seed, "seed", rand.Uint64N(1<<32), "makes the schedule")
	flag.StringVar(&o.worlds, "worlds", "", "run the worlds alone whose names contain this")
	flag.StringVar(&o.bug, "bug", "", "plant a bug in the service, one of: "+strings.Join(service.Bugs(), ", "))
	flag.StringVar(&o.document, "report", "", "replace the generated table in this document, after every round")
	flag.DurationVar(&o.limit, "limit", 0, "stop after this time and judge what was sent by then; 0: no limit")
	flag.Parse()
	o.command = strings.Join(append([]string{"go run ./internal/chaos"}, os.Args[1:]...), " ")

	t := &program{}
	rep := run(t, o)
	t.end()
	fmt.Println(rep.markdown())
	if problem := rep.problem(); problem != "" || t.failed {
		fmt.Fprintln(os.Stderr, problem)
		os.Exit(1)
	}
}

// serveIfAsked makes this process a service if the harness started it as one.
func serveIfAsked() {
	config, isService, err := service.FromEnvironment()
	if !isService {
		return
	}
	if err == nil {
		err = service.RunPostgres(config)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

type options struct {
	long     bool
	seed     uint64
	worlds   string
	bug      string
	document string
	limit    time.Duration
	command  string
	plans    []plan        // nil: those of a long or short run
	within   time.Duration // it is stuck if it has not ended by then, its builds not counted; 0: no limit
}

// progressEvery is how often a run says how far it is.
const progressEvery = 30 * time.Second

// run runs all rounds of all worlds.
func run(t testing.TB, o options) *report {
	t.Helper()
	if o.bug != "" && !slices.Contains(service.Bugs(), o.bug) {
		t.Fatalf("there is no bug named %q", o.bug)
	}
	rep := newReport(o.seed, o.command)
	t.Logf("seed %d", o.seed)
	stop := make(chan struct{})
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(interrupted)
	over := make(chan struct{})
	defer close(over)
	go watch(t, rep, o.limit, interrupted, stop, over)

	all := o.plans
	if all == nil {
		all = plans(o.long)
	}
	chosen := func(p plan) bool { return strings.Contains(strings.ToLower(p.world), strings.ToLower(o.worlds)) }
	programs := map[string]string{} // built before anything runs: the source may change meanwhile
	for _, plan := range all {
		if chosen(plan) {
			programs[plan.world] = serviceProgram(t, plan.world)
		}
	}
	if o.within > 0 {
		endWithin(t, o.within, rep)
	}
	for n, plan := range all {
		if !chosen(plan) {
			continue
		}
		rep.step.Store(plan.world + ": open it")
		w := openWorld(t, plan.world, programs[plan.world], o.bug)
		for number, faults := range plan.faults(o.long, newDice(o.seed, uint64(n))) {
			if isClosed(stop) {
				break
			}
			runRound(t, w, number, plan.items, faults, newDice(o.seed, uint64(1000*(n+1)+number)), rep, stop)
			if o.document != "" {
				if err := rep.writeInto(o.document); err != nil {
					t.Fatalf("write the report: %v", err)
				}
			}
		}
		t.Logf("%s: %s", plan.world, rep.progress())
	}
	rep.step.Store("close all worlds")
	return rep
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// watch says how far a run is, and stops it at its limit or when somebody interrupts it.
func watch(t testing.TB, rep *report, limit time.Duration, interrupted <-chan os.Signal, stop chan<- struct{}, over <-chan struct{}) {
	var atLimit <-chan time.Time
	if limit > 0 {
		atLimit = time.After(limit)
	}
	progress := time.NewTicker(progressEvery)
	defer progress.Stop()
	for {
		select {
		case <-progress.C:
			t.Log(rep.progress())
			continue
		case <-atLimit:
		case <-interrupted:
		case <-over:
			return
		}
		t.Log("stopping: what was sent is judged")
		close(stop)
		return
	}
}
