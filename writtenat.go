package holdsend

import "time"

const (
	// A phone's clock may be a little ahead: up to maxAhead the item was written now. Further ahead, or over maxBack in
	// the past, the clock is wrong and says nothing.
	maxAhead = 2 * time.Minute
	maxBack  = 30 * 24 * time.Hour

	maxWrittenAtLength = 40 // in characters: the longest form with fourteen digits after the point
)

// AcceptWrittenAt returns when the user wrote an item, in UTC, read from raw, the value of a Written-At header; or
// false if it says nothing that can be trusted. It never fails a request: an item without a written time is still an
// item.
//
// The form is YYYY-MM-DDThh:mm[:ss[.fff]] with a zone: Z, ±hh:mm, ±hhmm or ±hh. The fraction has any number of digits
// after a point or a comma; those after nanoseconds are cut. 24:00 is the end of a day. The whole has at most 40
// characters.
//
// now is the server's clock. A time at most 2 minutes ahead of it is returned as now. One further ahead, or more than
// 30 days (of 24 hours) back, is not accepted.
func AcceptWrittenAt(raw string, now time.Time) (time.Time, bool) {
	at, ok := parseWrittenAt(raw)
	if !ok {
		return time.Time{}, false
	}
	ahead := at.Sub(now)
	switch {
	case ahead > maxAhead, ahead < -maxBack:
		return time.Time{}, false
	case ahead > 0:
		return now.UTC(), true
	}
	return at, true
}

// parseWrittenAt does what time.Parse cannot: it takes several zones, a comma and 24:00, and nothing beside them.
func parseWrittenAt(raw string) (time.Time, bool) {
	if len(raw) > maxWrittenAtLength {
		return time.Time{}, false
	}
	r := timeReader{rest: raw}
	year := r.number(4)
	r.must('-')
	month := r.number(2)
	r.must('-')
	day := r.number(2)
	r.must('T')
	hour := r.number(2)
	r.must(':')
	minute := r.number(2)
	second, nanosecond := 0, 0
	if r.take(':') {
		second = r.number(2)
		if r.take('.') || r.take(',') {
			nanosecond = r.fraction()
		}
	}
	zone := r.zone()
	if r.bad || r.rest != "" {
		return time.Time{}, false
	}

	if hour > 24 || minute > 59 || second > 59 || hour == 24 && (minute > 0 || second > 0 || nanosecond > 0) {
		return time.Time{}, false
	}
	// time.Date turns 30 February into 2 March, and month 13 into January: only a real date keeps its month.
	if time.Date(year, time.Month(month), day, 0, 0, 0, 0, time.UTC).Month() != time.Month(month) {
		return time.Time{}, false
	}
	// Fields out of range are meant here: hour 24 is the next day, and the zone is taken off the seconds.
	return time.Date(year, time.Month(month), day, hour, minute, second-zone, nanosecond, time.UTC), true
}

// A timeReader reads a time from its front. Once something is missing it is bad for good.
type timeReader struct {
	rest string
	bad  bool
}

// take reads c if it comes next.
func (r *timeReader) take(c byte) bool {
	if r.rest == "" || r.rest[0] != c {
		return false
	}
	r.rest = r.rest[1:]
	return true
}

func (r *timeReader) must(c byte) {
	r.bad = !r.take(c) || r.bad
}

// digit reads one ASCII digit if one comes next.
func (r *timeReader) digit() (int, bool) {
	if r.rest == "" || r.rest[0] < '0' || r.rest[0] > '9' {
		return 0, false
	}
	d := int(r.rest[0] - '0')
	r.rest = r.rest[1:]
	return d, true
}

// number reads exactly n digits.
func (r *timeReader) number(n int) int {
	value := 0
	for range n {
		d, ok := r.digit()
		if !ok {
			r.bad = true
		}
		value = value*10 + d
	}
	return value
}

// fraction reads the digits of a second's fraction, one at least, as nanoseconds.
func (r *timeReader) fraction() int {
	nanoseconds, unit := 0, 100_000_000
	d, ok := r.digit()
	r.bad = r.bad || !ok
	for ok {
		nanoseconds += d * unit
		unit /= 10
		d, ok = r.digit()
	}
	return nanoseconds
}

// zone reads Z, ±hh:mm, ±hhmm or ±hh, as seconds east of UTC.
func (r *timeReader) zone() int {
	if r.take('Z') {
		return 0
	}
	sign := 1
	if r.take('-') {
		sign = -1
	} else {
		r.must('+')
	}
	hours, minutes := r.number(2), 0
	if r.take(':') || r.rest != "" {
		minutes = r.number(2)
	}
	r.bad = r.bad || hours > 23 || minutes > 59
	return sign * (hours*60 + minutes) * 60
}
