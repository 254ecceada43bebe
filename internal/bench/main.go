// Command bench measures what protection costs, on a Postgres that it starts for itself:
//
//	go run . [-only create,replay] [-quick] [-report ../../docs/performance.md]
//
// Contenders take turns in short rounds of one run, because a machine's speed changes more between runs than they differ.
// What is printed is the median over the rounds of each contender's ratio to the first, with the quartiles. A ratio means
// something on another machine too; a rate does not.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A part is one thing that is measured. Its tables stand in the report between markers with its name.
type part struct {
	name  string
	about string
	run   func(*bench) []table
}

func parts() []part {
	return []part{
		{"create", "a create, against an unprotected one and other ways to protect it", measureCreates},
		{"replay", "a replay, against a SELECT by primary key", measureReplays},
		{"mix", "95 % creates and 5 % replays", measureMixes},
		{"storm", "duplicates that wait, and creates beside them", measureStorms},
		{"waiters", "how soon waiters answer after the first attempt", measureWaiters},
		{"cost", "WAL, flushes, statements, round trips, CPU and allocations of one operation", measureCosts},
		{"fingerprint", "hs1, against the least that one must do and other canonical forms", measureFingerprints},
		{"fillfactor", "settings of the table, and the index on claims", measureFillfactor},
		{"vacuum", "how soon autovacuum comes", measureVacuum},
		{"partitioned", "records in 16 partitions by owner", measurePartitions},
		{"scale", "many records: how creates, replays, storage, purge and forget grow", measureScale},
	}
}

// A setting is how long and how often to measure.
type setting struct {
	rounds  int
	round   time.Duration
	clients []int
	delays  []time.Duration
	records int64 // the most that part scale generates
	quick   bool
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string) (err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	only := flags.String("only", "", "the parts to run, separated by commas; default: all")
	quick := flags.Bool("quick", false, "a quarter of the time: few and short rounds, for a first impression")
	rounds := flags.Int("rounds", 9, "how many rounds each contender gets")
	round := flags.Duration("round", 300*time.Millisecond, "how long a round is")
	clients := flags.String("clients", "1,8,32", "how many clients there are at once, one number for each run")
	delays := flags.String("delays", "0s,500us", "what the network adds to each round trip, one duration for each run")
	records := flags.Float64("scale", 1e6, "up to how many records part scale generates; 1e7 takes 6 GB of disk")
	report := flags.String("report", "", "a Markdown file to write the tables into, between the markers of their parts")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "Measures what protection costs. The parts:")
		for _, p := range parts() {
			fmt.Fprintf(flags.Output(), "  %-12s %s\n", p.name, p.about)
		}
		flags.PrintDefaults()
	}
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	s := setting{rounds: *rounds, round: *round, records: int64(*records), quick: *quick}
	if *quick {
		given := map[string]bool{}
		flags.Visit(func(f *flag.Flag) { given[f.Name] = true })
		if !given["rounds"] {
			s.rounds = 3
		}
		if !given["round"] {
			s.round = 150 * time.Millisecond
		}
		if !given["scale"] {
			s.records = 1e5
		}
	}
	for text := range strings.SplitSeq(*clients, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 64 {
			return fmt.Errorf("-clients: %q is not a number from 1 to 64", text)
		}
		s.clients = append(s.clients, n)
	}
	for text := range strings.SplitSeq(*delays, ",") {
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 {
			return fmt.Errorf("-delays: %q is not a duration such as 500us", text)
		}
		s.delays = append(s.delays, d)
	}
	if flags.NArg() > 0 || s.rounds < 1 || s.round <= 0 {
		return errors.New("see -help for the flags; rounds and their length must be positive")
	}
	chosen := parts()
	if *only != "" {
		names := strings.Split(*only, ",")
		for _, name := range names {
			if !slices.ContainsFunc(chosen, func(p part) bool { return p.name == name }) {
				return fmt.Errorf("-only: there is no part %q", name)
			}
		}
		chosen = slices.DeleteFunc(chosen, func(p part) bool { return !slices.Contains(names, p.name) })
	}
	return measure(ctx, s, chosen, *report)
}

// measure runs parts one after the other, and prints the tables of each as soon as it has them.
func measure(ctx context.Context, s setting, chosen []part, report string) error {
	return outsideTests(ctx, func(b *bench) {
		b.setting = s
		for _, p := range chosen {
			start := time.Now()
			fmt.Fprintf(os.Stderr, "bench: %s\n", p.name)
			tables := p.run(b)
			text := fmt.Sprintf("%s, %d CPUs. %s.\n", runtime.Version(), runtime.NumCPU(), b.version())
			for _, t := range tables {
				text += "\n" + t.markdown()
			}
			fmt.Printf("\n## %s: %s\n\n%s", p.name, p.about, text)
			if report != "" {
				if err := writeReport(report, p.name, text); err != nil {
					b.Fatal(err)
				}
			}
			fmt.Fprintf(os.Stderr, "bench: %s took %s\n", p.name, time.Since(start).Round(time.Second))
		}
	})
}
