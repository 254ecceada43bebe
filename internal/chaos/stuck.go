package main

import (
	"fmt"
	"os"
	"runtime/pprof"
	"strings"
	"testing"
	"time"
)

// stuckAfter is for how long a round may neither carry an item nor go on to its next step: longer than it takes waitFor
// to send no more items and to give up those that are under way.
const stuckAfter = quiet + answerWithin + 20*time.Second

// watch waits until a round has ended, and returns its error, or until it is stuck. It takes no lock that it would have to
// wait for: a round that is stuck may hold any.
func (r *round) watch(ended <-chan error) error {
	look := time.NewTicker(time.Second)
	defer look.Stop()
	type place struct {
		step    any
		carried int64
	}
	var last place
	looks := 0 // since it moved: not the time, for the machine may have slept
	for {
		select {
		case err := <-ended:
			return err
		case <-look.C:
		}
		now := place{r.report.step.Load(), r.report.carried.Load()}
		if looks++; now != last {
			last, looks = now, 0
		}
		if time.Duration(looks)*time.Second > stuckAfter {
			return fmt.Errorf("%sthe harness is stuck (its goroutines are above). For %v nothing has moved in the step:\n%v\nfaults under way: %s",
				goroutines(), stuckAfter, now.step, r.underWay())
		}
	}
}

// underWay names the faults that have begun and not ended.
func (r *round) underWay() string {
	if !r.mu.TryLock() {
		return "unknown"
	}
	defer r.mu.Unlock()
	var names []string
	for _, s := range r.shots {
		if s.isUnderWay() {
			names = append(names, fmt.Sprintf("%s (%s)", s.fault, s.step))
		}
	}
	if names == nil {
		return "none"
	}
	return strings.Join(names, ", ")
}

// goroutines says where all goroutines are, those in the same place once.
func goroutines() string {
	var text strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&text, 1) // a Builder takes everything
	return text.String() + "\n"
}

// endWithin ends this process if t, with all that it cleans up, has not ended by then: the last resort, which nothing
// holds up.
func endWithin(t testing.TB, limit time.Duration, rep *report) {
	timer := time.AfterFunc(limit, func() {
		fmt.Fprintf(os.Stderr, "%sthe harness has not ended within %v (its goroutines are above). Its last step:\n%v\n",
			goroutines(), limit, rep.step.Load())
		os.Exit(1)
	})
	t.Cleanup(func() { timer.Stop() })
}
