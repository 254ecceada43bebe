package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/gowebpki/jcs"

	"github.com/holdsend/holdsend-go"
)

// A digest is one way to tell whether two JSON documents are the same.
type digest struct {
	name string
	of   func(document []byte) error
}

// digests starts with the floor: what anybody must do who refuses bad JSON and compares by hash.
func digests() []digest {
	return []digest{
		{"json.Valid and SHA-256", func(document []byte) error {
			if !json.Valid(document) {
				return errors.New("not JSON")
			}
			sum := sha256.Sum256(document)
			_ = hex.EncodeToString(sum[:])
			return nil
		}},
		{"holdsend", func(document []byte) error {
			_, err := holdsend.Fingerprint(operation, json.RawMessage(document))
			return err
		}},
		{"gowebpki/jcs", func(document []byte) error {
			canonical, err := jcs.Transform(document)
			sum := sha256.Sum256(canonical)
			_ = hex.EncodeToString(sum[:])
			return err
		}},
		{"jsontext", func(document []byte) error {
			value := jsontext.Value(bytes.Clone(document)) // it works in place, and the body is still needed
			err := value.Canonicalize()
			sum := sha256.Sum256(value)
			_ = hex.EncodeToString(sum[:])
			return err
		}},
	}
}

// document makes a JSON document of size bytes: notes, each with text, numbers and a nested object.
func document(size int, sorted bool) ([]byte, error) {
	var text bytes.Buffer
	text.WriteString(`{"version":3,"notes":[`)
	for n := 0; n == 0 || text.Len() < size-160; n++ {
		if n > 0 {
			text.WriteByte(',')
		}
		fmt.Fprintf(&text, `{"text":"Note %d: milk, bread and a \"cheese\"\n","place":{"lon":13.%d,"lat":52.5},"done":false,"count":%d,"at":1.5e9,"by":null}`,
			n, n%1000+1, n)
	}
	fmt.Fprintf(&text, `],"author":"%s"}`, strings.Repeat("a", max(1, size-text.Len()-len(`],"author":""}`))))
	if !sorted {
		return text.Bytes(), nil
	}
	value := jsontext.Value(text.Bytes())
	err := value.Canonicalize()
	return value, err
}

// measureFingerprints compares the digests, in turns, on documents whose keys are in order and on others.
func measureFingerprints(b *bench) []table {
	ways := digests()
	var tables []table
	for _, sorted := range []bool{false, true} {
		t := table{title: "Keys in no order", rows: [][]string{{"document"}}}
		if sorted {
			t.title = "Keys in order"
		}
		for _, d := range ways[1:] {
			t.rows[0] = append(t.rows[0], d.name+", times the floor", "allocations", "allocated, bytes")
		}
		t.rows[0] = append(t.rows[0], "holdsend, MB/s")
		for _, size := range []int{200, 1 << 10, 100 << 10, 10 << 20} {
			if b.setting.quick && size > 1<<20 {
				continue
			}
			text, err := document(size, sorted)
			b.check(err)
			took := make([][]float64, len(ways))
			repeat := max(1, 20_000/len(text)) // short documents many times, for the clock's sake
			for round := range b.setting.rounds + 1 {
				for i, d := range ways {
					start := time.Now()
					n := 0
					for ; n == 0 || time.Since(start) < b.setting.round/50; n++ {
						for range repeat {
							b.check(d.of(text))
						}
					}
					if round > 0 { // the first warms up
						took[i] = append(took[i], time.Since(start).Seconds()/float64(n*repeat))
					}
				}
				b.check(b.ctx.Err())
			}
			row := []string{byteSize(len(text))}
			for i, d := range ways {
				if i == 0 {
					continue
				}
				allocations, allocated := allocationsOf(func() { b.check(d.of(text)) })
				row = append(row, ratios(took[i], took[0]).String(), number(allocations), number(allocated))
			}
			t.add(append(row, number(float64(len(text))/1e6/spreadOf(took[1]).median))...)
		}
		t.note("The floor is `json.Valid` and SHA-256 of the bytes as they are. The others canonicalise first. Medians of %d "+
			"rounds, and the quartiles.", b.setting.rounds)
		tables = append(tables, t)
	}
	return tables
}

func allocationsOf(do func()) (count, size float64) {
	const n = 5
	do()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range n {
		do()
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / n, float64(after.TotalAlloc-before.TotalAlloc) / n
}

func byteSize(n int) string {
	switch {
	case n >= 1<<20:
		return number(float64(n)/(1<<20)) + " MB"
	case n >= 1<<10:
		return number(float64(n)/(1<<10)) + " KB"
	}
	return fmt.Sprintf("%d B", n)
}
