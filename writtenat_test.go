package holdsend_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func ExampleAcceptWrittenAt() {
	now := time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)
	for _, raw := range []string{
		"2026-11-23T20:15:00.5+02:00", // in a tunnel, the evening before
		"2026-11-24T12:01:00Z",        // by a clock that is a little ahead
		"2031-01-01T00:00:00Z",        // by one that is wrong
		"yesterday",
	} {
		at, ok := holdsend.AcceptWrittenAt(raw, now)
		if !ok {
			fmt.Println("not accepted")
			continue
		}
		fmt.Println(at.Format(time.RFC3339Nano))
	}
	// Output:
	// 2026-11-23T18:15:00.5Z
	// 2026-11-24T12:00:00Z
	// not accepted
	// not accepted
}

type writtenAtVector struct {
	Name, Raw string
	Now       time.Time
	Want      *time.Time
}

func writtenAtVectors(t testing.TB) []writtenAtVector {
	text, err := os.ReadFile(filepath.Join("testdata", "vectors", "written_at.jsonl"))
	require.NoError(t, err)
	var vectors []writtenAtVector
	for line := range bytes.Lines(text) {
		var v writtenAtVector
		require.NoError(t, json.Unmarshal(line, &v))
		vectors = append(vectors, v)
	}
	require.Len(t, vectors, 80)
	return vectors
}

func TestAcceptWrittenAtVectors(t *testing.T) {
	t.Parallel()
	for _, v := range writtenAtVectors(t) {
		// The server's zone makes no difference.
		for _, now := range []time.Time{v.Now, v.Now.In(time.FixedZone("east", 5*3600+45*60))} {
			at, ok := holdsend.AcceptWrittenAt(v.Raw, now)
			assert.Equal(t, v.Want != nil, ok, v.Name)
			if v.Want != nil {
				assert.Equal(t, v.Want.UTC(), at, v.Name)
			} else {
				assert.True(t, at.IsZero(), v.Name)
			}
		}
	}
}

func TestAcceptWrittenAtForms(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	for raw, want := range map[string]string{
		"2026-02-28T24:00:00.000Z":                 "2026-03-01T00:00:00Z",
		"2026-02-28T24:00+01:00":                   "2026-02-28T23:00:00Z",
		"2026-02-28T23:59:59.9999999999Z":          "2026-02-28T23:59:59.999999999Z",
		"2026-02-28T10:00:00,000000001-0030":       "2026-02-28T10:30:00.000000001Z",
		"2026-02-28T10:00+23:59":                   "2026-02-27T10:01:00Z",
		"2026-02-28T10:00-12":                      "2026-02-28T22:00:00Z",
		"2026-02-28T10:00:00Z+01":                  "",
		"2026-02-28T10:00:00+1":                    "",
		"2026-02-28T10:00:00+01:":                  "",
		"2026-02-28T10:00:00+01:0":                 "",
		"2026-02-28T10:00:00+010":                  "",
		"2026-02-28T10:00:00+01000":                "",
		"2026-02-28T10:00:00+":                     "",
		"2026-02-28T10:00:00.+01":                  "",
		"2026-02-28T10:00:00..5Z":                  "",
		"2026-02-28T10:00:00.5,5Z":                 "",
		"2026-02-28T10:00,5Z":                      "",
		"2026-02-28T10:00:5Z":                      "",
		"2026-02-28T1:00:00Z":                      "",
		"2026-02-28T10:00:-1Z":                     "",
		"2026-02-28T-1:00:00Z":                     "",
		"2026-02-28T10:00:00":                      "",
		"2026-02-28T10:00:00ZZ":                    "",
		"2026-02-28T99:00:00Z":                     "",
		"2026-02-28T10:99:00Z":                     "",
		"2026-02-28T24:00:00.000000001Z":           "",
		"2026/02/28T10:00:00Z":                     "",
		"0000-00-00T00:00:00Z":                     "",
		"0000-01-01T00:00:00Z":                     "", // further back than a Duration can say
		"9999-12-31T23:59:59Z":                     "",
		"2026-02-28T10:00:00.0000000000000000+01":  "2026-02-28T09:00:00Z",
		"2026-02-28T10:00:00.00000000000000000+01": "2026-02-28T09:00:00Z",
		strings.Repeat("\x80", 40):                 "",
	} {
		at, ok := holdsend.AcceptWrittenAt(raw, now)
		require.Equal(t, want != "", ok, raw)
		if ok {
			assert.Equal(t, want, at.Format(time.RFC3339Nano), raw)
			assert.Equal(t, time.UTC, at.Location(), raw)
		}
	}
}

// A date that does not exist is refused also where the real date that it runs over into would be accepted.
func TestAcceptWrittenAtRealDatesOnly(t *testing.T) {
	t.Parallel()
	for month := range 100 {
		for day := range 100 {
			raw := fmt.Sprintf("2028-%02d-%02dT10:00:00Z", month, day)
			now := time.Date(2028, time.Month(month), day, 10, 0, 0, 0, time.UTC) // what it runs over into
			_, err := time.Parse(time.RFC3339, raw)
			_, ok := holdsend.AcceptWrittenAt(raw, now)
			require.Equal(t, err == nil, ok, raw)
		}
	}
}

// What comes back is a date: the reading of the monotonic clock in time.Now is not part of it.
func TestAcceptWrittenAtHasNoMonotonicClock(t *testing.T) {
	t.Parallel()
	now := time.Now()
	at, ok := holdsend.AcceptWrittenAt(now.Add(time.Minute).UTC().Format(time.RFC3339Nano), now)
	require.True(t, ok)
	assert.Equal(t, now.Round(0).UTC(), at)
	assert.NotContains(t, at.String(), "m=")
}

// internetTime is the form of RFC 3339. time.Parse takes offsets of 24 hours and of 60 minutes too, which do not exist.
var internetTime = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$`)

func FuzzAcceptWrittenAt(f *testing.F) {
	for _, v := range writtenAtVectors(f) {
		f.Add(v.Raw, v.Now.UnixNano())
	}
	f.Fuzz(func(t *testing.T, raw string, unixNano int64) {
		now := time.Unix(0, unixNano)
		at, ok := holdsend.AcceptWrittenAt(raw, now)
		if ok {
			if len(raw) > 40 || at.After(now) || now.Sub(at) > 30*24*time.Hour || at.Location() != time.UTC {
				t.Fatalf("%q at %v gave %v", raw, now, at)
			}
		}
		// Go's own parser agrees where the form is one that both take.
		parsed, err := time.Parse(time.RFC3339Nano, raw)
		if len(raw) <= 40 && internetTime.MatchString(raw) && raw[11:13] != "24" {
			if err != nil {
				if ok {
					t.Fatalf("%q is no real date, but gave %v", raw, at)
				}
				return
			}
			ahead := parsed.Sub(now)
			want := ahead <= 2*time.Minute && ahead >= -30*24*time.Hour
			if ok != want {
				t.Fatalf("%q at %v: accepted is %v, want %v", raw, now, ok, want)
			}
			if ahead > 0 {
				parsed = now
			}
			if ok && !at.Equal(parsed) {
				t.Fatalf("%q at %v: got %v, want %v", raw, now, at, parsed)
			}
		}
	})
}
