package holdsend

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/holdsend/holdsend-go/internal/bounds"
)

// ErrNotPlainJSON is returned for content that every server must refuse alike: text that is not strict JSON (RFC
// 8259), bad UTF-8, a number too large for a double (even one that a duplicate key hides), nesting deeper than
// 10,000, or a Go value that json.Marshal refuses.
var ErrNotPlainJSON = errors.New("holdsend: the content is not plain JSON")

var errContentNil = errors.New("holdsend: the content is nil, which would make all requests the same: use json.RawMessage(\"null\") for JSON null")

// tagHS1 is the only tag so far. The tag before a stored fingerprint's colon decides how it is compared.
const tagHS1 = "hs1"

// maxNesting is how many arrays and objects may be open at once. Deeper content is an attack on a reader's stack.
const maxNesting = 10_000

// Fingerprint returns what makes two requests the same: "hs1:" and the hex SHA-256 of operation and content. The same
// JSON value has the same fingerprint in any key order, spacing and escaping, on every server that speaks hs1.
//
// A json.RawMessage and a []byte are JSON text (a named type of yours is not); anything else goes through json.Marshal,
// which turns bad UTF-8 in a Go string into U+FFFD. Numbers are compared as doubles: integers beyond 2^53 that round to
// the same double are the same. Of duplicate keys the last one counts.
//
// The error wraps ErrNotPlainJSON if the content is not plain JSON. It is another one if content is nil, or operation
// is empty, over 255 bytes, not UTF-8 or has a NUL. No error shows content.
func Fingerprint(operation string, content any) (string, error) {
	text, err := jsonText(operation, content)
	if err != nil {
		return "", err
	}
	sum, _, err := hashHS1(operation, text, indexFirst)
	if err != nil {
		return "", err
	}
	var fingerprint [len(tagHS1) + 1 + 2*sha256.Size]byte
	return string(hex.AppendEncode(append(fingerprint[:0], tagHS1+":"...), sum[:])), nil
}

// MatchFingerprint reports whether stored is the fingerprint of operation and content. Use it instead of comparing with
// Fingerprint: a stored fingerprint is compared as its own tag says, and hs1 has two readings (an early server sorted
// keys such as "10" and "9" as text, where JavaScript orders them as numbers). Both match.
//
// Beside the errors of Fingerprint, a tag that is not known is an error and not a mismatch: a newer server wrote it,
// and the client must not give its item up. So is a fingerprint that is damaged. Neither is ErrNotPlainJSON.
func MatchFingerprint(stored, operation string, content any) (bool, error) {
	tag, hash, _ := strings.Cut(stored, ":")
	switch tag {
	case tagHS1:
		return matchHS1(hash, operation, content)
	}
	return false, errors.New("holdsend: the stored fingerprint has a tag that this version does not know (known: " +
		tagHS1 + "): update the library, a newer server wrote the record")
}

func matchHS1(stored, operation string, content any) (bool, error) {
	if !isHash(stored) {
		return false, errors.New("holdsend: the stored fingerprint is damaged: it must be hs1: and 64 lower-case hex digits")
	}
	text, err := jsonText(operation, content)
	if err != nil {
		return false, err
	}
	sum, readingsDiffer, err := hashHS1(operation, text, indexFirst)
	if err != nil {
		return false, err
	}
	if same := hex.EncodeToString(sum[:]) == stored; same || !readingsDiffer {
		return same, nil
	}
	sum, _, err = hashHS1(operation, text, plainOrder)
	return hex.EncodeToString(sum[:]) == stored, err
}

// isHash reports whether s is a SHA-256 as hs1 writes it.
func isHash(s string) bool {
	if len(s) != hex.EncodedLen(sha256.Size) {
		return false
	}
	for i := range len(s) {
		if c := s[i]; !isDigit(c) && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// A framedJSON is JSON text of which text[from:to] is not yet checked. It must be one value: text that closes the frame
// around it, and opens it again, is none. The frame is canonical; an object, or nothing.
type framedJSON struct {
	text     []byte
	from, to int
}

func unframed(text []byte) framedJSON { return framedJSON{text, 0, len(text)} }

// jsonText returns content as JSON text, not yet checked if it came as text.
func jsonText(operation string, content any) (framedJSON, error) {
	if err := bounds.Required("the operation", operation); err != nil {
		return framedJSON{}, err
	}
	switch content := content.(type) {
	case nil:
		return framedJSON{}, errContentNil
	case framedJSON:
		return content, nil
	case json.RawMessage:
		return unframed(content), nil
	case []byte:
		return unframed(content), nil
	}
	text, err := json.Marshal(content)
	if err != nil {
		// Not err itself: a MarshalJSON method's error may quote what it was given.
		return framedJSON{}, fmt.Errorf("%w: json.Marshal refuses this %T", ErrNotPlainJSON, content)
	}
	if string(text) == "null" { // a nil pointer or map
		return framedJSON{}, errContentNil
	}
	return unframed(text), nil
}

// hashHS1 returns the SHA-256 of "<operation length>:<operation>|<canonical JSON>". The length is in UTF-16 code
// units, which is what JavaScript counts; it keeps operation and content from running into each other. readingsDiffer
// reports that the other reading may give another hash.
func hashHS1(operation string, text framedJSON, order keyOrder) (sum [sha256.Size]byte, readingsDiffer bool, err error) {
	c := canonicalizers.Get().(*canonicalizer)
	defer c.release()
	length := 0
	for _, r := range operation {
		length += utf16.RuneLen(r)
	}
	if c.digest == nil {
		c.digest = sha256.New()
	}
	c.digest.Reset()
	c.prefix = strconv.AppendInt(c.prefix[:0], int64(length), 10)
	c.prefix = append(c.prefix, ':')
	c.prefix = append(c.prefix, operation...)
	c.prefix = append(c.prefix, '|')
	c.digest.Write(c.prefix)
	if err := c.canonicalize(text, order, c.digest); err != nil {
		return sum, false, err
	}
	c.prefix = c.digest.Sum(c.prefix[:0])
	copy(sum[:], c.prefix)
	return sum, c.indexKeys, nil
}

// keyOrder is one of hs1's two readings.
type keyOrder int

const (
	// indexFirst is what JavaScript does, and what is written: array-index keys ("0" to "4294967294") first, by number.
	indexFirst keyOrder = iota
	// plainOrder sorts all keys as text.
	plainOrder
)

// A canonicalizer turns JSON text into its canonical form in one pass: it checks the text, and rewrites what is not
// canonical already.
//
// Most of a compact document is canonical as it stands, so text is only copied where it must change. The output is
// written followed by text[copied:pos]; a place in it is an offset into both, as place returns.
//
// An object whose keys are out of order is put in order as it closes, if it is small. A large one stays as it is until
// the output is assembled, at the end: moving its members at once would copy the innermost ones once for every object
// around them, up to 10,000 times.
type canonicalizer struct {
	text  []byte
	pos   int
	order keyOrder

	written []byte // the output up to text[copied]
	copied  int

	members   []member // of the objects that are open, for those that turn out to be out of order
	objects   []object // by their place, the outer first: those that are open, out of order, or hold one that is
	reordered []span   // the members of objects out of order, in order
	indexKeys bool     // an array-index key stands beside another key, so that the readings may differ

	small     []byte // a small object as it was
	assembled *bufio.Writer
	prefix    []byte
	digest    hash.Hash
}

// maxSmall is the size of a small object in bytes. It bounds how often one byte is moved: at most once for every small
// object around it, and a hundred of them at the most fit into the size.
const maxSmall = 1 << 10

// A span is a member in the output: its key, the colon and its value.
type span struct {
	start, end int // places
	inner      int // the first of objects that may lie in it
}

// A member is a span while its object is open.
type member struct {
	span
	keyEnd   int  // the place after the key's closing quote
	bytewise bool // among such keys the order of bytes is that of UTF-16 code units
}

// An object is out of order if it has reordered members; if not, it stands for what it holds.
type object struct {
	start, end   int // places
	first, count int // of reordered
	next         int // the first of objects after this one and all that it holds
}

// canonicalizers saves the buffers of one document for the next.
var canonicalizers = sync.Pool{New: func() any { return new(canonicalizer) }}

// maxKept is the longest text, in bytes, whose buffers are kept: a rare large one must not hold its memory for good.
const maxKept = 2 << 20

func (c *canonicalizer) release() {
	if len(c.text) > maxKept {
		return
	}
	*c = canonicalizer{ // the caller's text is let go
		written:   c.written[:0],
		members:   c.members[:0],
		objects:   c.objects[:0],
		reordered: c.reordered[:0],
		small:     c.small[:0],
		assembled: c.assembled,
		prefix:    c.prefix[:0],
		digest:    c.digest,
	}
	canonicalizers.Put(c)
}

// canonicalize writes the canonical form of content to a hash, which cannot fail.
func (c *canonicalizer) canonicalize(content framedJSON, order keyOrder, to io.Writer) error {
	c.text, c.pos, c.order = content.text, content.from, order
	depth := min(content.from, 1)
	c.skipSpace()
	if err := c.value(depth); err != nil {
		return err
	}
	end := c.place()
	if next := c.spaceEnd(); next != content.to {
		c.pos = next
		return c.fail("something follows the value")
	}
	if content.to < len(c.text) {
		c.skipSpace()
		c.pos = len(c.text)
		end = c.place()
	}
	if len(c.objects) == 0 {
		_, _ = to.Write(c.output(0, end))
		return nil
	}
	if c.assembled == nil {
		c.assembled = bufio.NewWriter(nil)
	}
	c.assembled.Reset(to)
	c.assemble(span{0, end, 0})
	_ = c.assembled.Flush()
	return nil
}

// fail returns the error for what stands at pos. It shows where, never what.
func (c *canonicalizer) fail(reason string) error {
	if c.pos >= len(c.text) {
		reason = "it ends too early"
	}
	return fmt.Errorf("%w: %s, at byte %d", ErrNotPlainJSON, reason, c.pos)
}

// place returns where text[pos] goes in the output.
func (c *canonicalizer) place() int {
	return len(c.written) + c.pos - c.copied
}

// replace leaves text[from:to] out of the output. What goes there instead may then be appended to written.
func (c *canonicalizer) replace(from, to int) {
	if len(c.written) == 0 && from > c.copied {
		c.written = slices.Grow(c.written, len(c.text)+len(c.text)/16) // the output is seldom longer
	}
	c.written = append(c.written, c.text[c.copied:from]...)
	c.copied = to
}

// output returns the output between two places. Read it before written is cut or written over, as rewrite does.
func (c *canonicalizer) output(from, to int) []byte {
	if to <= len(c.written) {
		return c.written[from:to]
	}
	if from < len(c.written) { // it goes on in text: copy that
		c.replace(c.pos, c.pos)
		return c.written[from:to]
	}
	shift := c.copied - len(c.written)
	return c.text[from+shift : to+shift]
}

// assemble writes s of the output, with the objects in it put in order.
func (c *canonicalizer) assemble(s span) {
	for i := s.inner; i < len(c.objects) && c.objects[i].start < s.end; {
		o := c.objects[i]
		if o.count == 0 {
			i++
			continue
		}
		_, _ = c.assembled.Write(c.output(s.start, o.start+1))
		for j, member := range c.reordered[o.first : o.first+o.count] {
			if j > 0 {
				_ = c.assembled.WriteByte(',')
			}
			c.assemble(member)
		}
		s.start = o.end - 1 // the closing brace
		i = o.next
	}
	_, _ = c.assembled.Write(c.output(s.start, s.end))
}

// peek returns the byte at pos, or 0, which no JSON text has outside or inside of a string.
func (c *canonicalizer) peek() byte {
	if c.pos < len(c.text) {
		return c.text[c.pos]
	}
	return 0
}

// skipSpace leaves the white space at pos out of the output.
func (c *canonicalizer) skipSpace() {
	if c.peek() > ' ' {
		return
	}
	if end := c.spaceEnd(); end > c.pos {
		c.replace(c.pos, end)
		c.pos = end
	}
}

// spaceEnd returns where the white space at pos ends.
func (c *canonicalizer) spaceEnd() int {
	end := c.pos
	for end < len(c.text) && (c.text[end] == ' ' || c.text[end] == '\n' || c.text[end] == '\t' || c.text[end] == '\r') {
		end++
	}
	return end
}

// value reads one value. depth is how many arrays and objects are open around it.
func (c *canonicalizer) value(depth int) error {
	switch c.peek() {
	case '{', '[':
		if depth == maxNesting {
			return c.fail("it is nested deeper than 10,000")
		}
		if c.peek() == '{' {
			return c.object(depth + 1)
		}
		return c.array(depth + 1)
	case '"':
		_, err := c.string()
		return err
	case 't':
		return c.literal("true")
	case 'f':
		return c.literal("false")
	case 'n':
		return c.literal("null")
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		return c.number()
	}
	return c.fail("a value is expected")
}

func (c *canonicalizer) literal(word string) error {
	for i := range len(word) {
		if c.peek() != word[i] {
			return c.fail("a value is expected")
		}
		c.pos++
	}
	return nil
}

func (c *canonicalizer) array(depth int) error {
	c.pos++
	c.skipSpace()
	if c.peek() == ']' {
		c.pos++
		return nil
	}
	for {
		if err := c.value(depth); err != nil {
			return err
		}
		c.skipSpace()
		switch c.peek() {
		case ',':
			c.pos++
			c.skipSpace()
		case ']':
			c.pos++
			return nil
		default:
			return c.fail("a comma or the end of the array is expected")
		}
	}
}

func (c *canonicalizer) object(depth int) error {
	self, base := len(c.objects), len(c.members)
	c.objects = append(c.objects, object{start: c.place()})
	c.pos++
	c.skipSpace()
	if c.peek() == '}' {
		c.pos++
		c.objects = c.objects[:self]
		return nil
	}
	inOrder := true
	for {
		last := len(c.members)
		if err := c.key(); err != nil {
			return err
		}
		// Equal keys are out of order too: all but the last must go.
		if inOrder && last > base && c.compare(&c.members[last-1], &c.members[last]) >= 0 {
			inOrder = false
		}
		if err := c.value(depth); err != nil {
			return err
		}
		c.members[last].end = c.place()
		c.skipSpace()
		switch c.peek() {
		case ',':
			c.pos++
			c.skipSpace()
		case '}':
			c.pos++
			c.close(self, base, inOrder)
			return nil
		default:
			return c.fail("a comma or the end of the object is expected")
		}
	}
}

// key reads a key and the colon after it, and opens a member.
func (c *canonicalizer) key() error {
	if c.peek() != '"' {
		return c.fail("a key in double quotes is expected")
	}
	m := member{span: span{start: c.place(), inner: len(c.objects)}}
	bytewise, err := c.string()
	if err != nil {
		return err
	}
	m.keyEnd, m.bytewise = c.place(), bytewise
	c.members = append(c.members, m)
	c.skipSpace()
	if c.peek() != ':' {
		return c.fail("a colon is expected")
	}
	c.pos++
	c.skipSpace()
	return nil
}

// close ends the object at objects[self], whose members start at members[base].
func (c *canonicalizer) close(self, base int, inOrder bool) {
	o := &c.objects[self]
	o.end, o.next = c.place(), len(c.objects)
	holdsNone := o.next == self+1
	if !inOrder {
		members := c.sort(c.members[base:])
		if o.end-o.start <= maxSmall { // so what it holds is in order by now
			c.rewrite(*o, members)
			inOrder = true
		} else {
			o.first, o.count = len(c.reordered), len(members)
			for i := range members {
				c.reordered = append(c.reordered, members[i].span)
			}
		}
	}
	c.members = c.members[:base]
	if inOrder && holdsNone {
		c.objects = c.objects[:self] // nothing to put in order at the end, neither here nor inside
	}
}

// fewMembers is how many are sorted by insertion, which moves each as little as can be: most objects have no more.
const fewMembers = 12

// sort sorts members by key and leaves out those that do not count.
func (c *canonicalizer) sort(members []member) []member {
	duplicates := false
	if len(members) <= fewMembers {
		for i := 1; i < len(members); i++ {
			m, at := members[i], i
			for ; at > 0; at-- {
				order := c.compare(&m, &members[at-1])
				if order >= 0 {
					duplicates = duplicates || order == 0
					break
				}
				members[at] = members[at-1]
			}
			members[at] = m
		}
	} else {
		slices.SortFunc(members, func(a, b member) int {
			order := c.compare(&a, &b)
			duplicates = duplicates || order == 0
			return cmp.Or(order, cmp.Compare(a.start, b.start))
		})
	}
	if !duplicates {
		return members
	}
	counting := members[:0]
	for i := range members {
		if i+1 == len(members) || c.compare(&members[i], &members[i+1]) != 0 { // the last of duplicate keys wins
			counting = append(counting, members[i])
		}
	}
	return counting
}

// rewrite puts o, which has just been read, in order.
func (c *canonicalizer) rewrite(o object, members []member) {
	c.replace(c.pos, c.pos)
	c.small = append(c.small[:0], c.written[o.start:]...)
	c.written = c.written[:o.start+1]
	for i := range members {
		if i > 0 {
			c.written = append(c.written, ',')
		}
		c.written = append(c.written, c.small[members[i].start-o.start:members[i].end-o.start]...)
	}
	c.written = append(c.written, '}')
}

// compare orders two members by their keys.
func (c *canonicalizer) compare(a, b *member) int {
	keyA, keyB := c.output(a.start+1, a.keyEnd-1), c.output(b.start+1, b.keyEnd-1)
	indexA, isIndexA := arrayIndex(keyA)
	indexB, isIndexB := arrayIndex(keyB)
	if isIndexA || isIndexB {
		c.indexKeys = true
		switch {
		case c.order == plainOrder: // as text, below
		case !isIndexB:
			return -1
		case !isIndexA:
			return 1
		default:
			return cmp.Compare(indexA, indexB)
		}
	}
	if a.bytewise && b.bytewise {
		return bytes.Compare(keyA, keyB)
	}
	return compareUTF16(keyA, keyB)
}

// arrayIndex returns the number that key is, if JavaScript takes it for an array index: the shortest decimal form of
// 0 to 2^32 - 2.
func arrayIndex(key []byte) (uint64, bool) {
	if len(key) == 0 || len(key) > len("4294967294") || key[0] == '0' && len(key) > 1 {
		return 0, false
	}
	var index uint64
	for _, c := range key {
		if !isDigit(c) {
			return 0, false
		}
		index = index*10 + uint64(c-'0')
	}
	return index, index < math.MaxUint32
}

// compareUTF16 orders two canonical strings, without their quotes, by UTF-16 code units, as JavaScript does. That is
// the order of their UTF-8 bytes but for escapes, and for characters beyond U+FFFF: their surrogates come before
// U+E000.
func compareUTF16(a, b []byte) int {
	unitsA, unitsB := codeUnits{text: a}, codeUnits{text: b}
	for {
		unitA, moreA := unitsA.next()
		unitB, moreB := unitsB.next()
		switch {
		case !moreA && !moreB:
			return 0
		case !moreA:
			return -1
		case !moreB:
			return 1
		case unitA != unitB:
			return cmp.Compare(unitA, unitB)
		}
	}
}

// codeUnits reads a canonical string as UTF-16.
type codeUnits struct {
	text []byte
	low  rune // the second half of a pair, if not 0
}

func (u *codeUnits) next() (unit rune, ok bool) {
	if u.low != 0 {
		unit, u.low = u.low, 0
		return unit, true
	}
	if len(u.text) == 0 {
		return 0, false
	}
	unit, size := rune(u.text[0]), 1
	switch {
	case unit == '\\':
		unit, size = unescape(u.text)
	case unit >= utf8.RuneSelf:
		unit, size = utf8.DecodeRune(u.text)
	}
	u.text = u.text[size:]
	if high, low := utf16.EncodeRune(unit); high != utf8.RuneError {
		unit, u.low = high, low
	}
	return unit, true
}

// string reads a string. bytewise is as in member.
func (c *canonicalizer) string() (bytewise bool, err error) {
	start := c.pos
	highest := byte(0)
	escaped := false
	for i := start + 1; i < len(c.text); {
		b := c.text[i]
		switch {
		case b == '"':
			c.pos = i + 1
			if highest >= utf8.RuneSelf && !utf8.Valid(c.text[start:c.pos]) {
				c.pos = start
				return false, c.fail("a string has bad UTF-8")
			}
			const firstOfPairs = 0xF0 // what is a pair in UTF-16 starts with this byte or a higher one
			return !escaped && highest < firstOfPairs, nil
		case b == '\\':
			escaped = true
			size := c.escape(i)
			if size == 0 {
				c.pos = i
				return false, c.fail("a string has an escape that JSON does not know")
			}
			i += size
		case b < ' ':
			c.pos = i
			return false, c.fail("a string has a control character that is not escaped")
		default:
			highest = max(highest, b)
			i++
		}
	}
	c.pos = len(c.text)
	return false, c.fail("")
}

// escape rewrites the escape at text[i], if it is not canonical, and returns its length, or 0 if it is none.
func (c *canonicalizer) escape(i int) int {
	r, size := unescape(c.text[i:])
	switch {
	case size == 0, size == 2 && r != '/': // \" \\ \b \f \n \r \t
		return size
	}
	c.replace(i, i+size)
	c.written = appendRune(c.written, r)
	return size
}

// unescape returns the character of the escape that text starts with and the escape's length, which is 0 if it is
// none. A surrogate is joined with the one that follows, if they make a pair.
func unescape(text []byte) (r rune, size int) {
	if len(text) < 2 {
		return 0, 0
	}
	switch text[1] {
	case '"', '\\', '/':
		return rune(text[1]), 2
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	}
	r, ok := unescapeUnit(text)
	if !ok {
		return 0, 0
	}
	if utf16.IsSurrogate(r) {
		if low, ok := unescapeUnit(text[6:]); ok {
			if pair := utf16.DecodeRune(r, low); pair != utf8.RuneError {
				return pair, 12
			}
		}
	}
	return r, 6
}

// unescapeUnit returns the code unit of the \u escape that text starts with.
func unescapeUnit(text []byte) (unit rune, ok bool) {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return 0, false
	}
	for _, b := range text[2:6] {
		switch {
		case isDigit(b):
			b -= '0'
		case 'a' <= b && b <= 'f':
			b -= 'a' - 10
		case 'A' <= b && b <= 'F':
			b -= 'A' - 10
		default:
			return 0, false
		}
		unit = unit<<4 | rune(b)
	}
	return unit, true
}

// appendRune appends r as JSON.stringify writes it in a string.
func appendRune(dst []byte, r rune) []byte {
	switch r {
	case '"', '\\':
		return append(dst, '\\', byte(r))
	case '\b':
		return append(dst, `\b`...)
	case '\f':
		return append(dst, `\f`...)
	case '\n':
		return append(dst, `\n`...)
	case '\r':
		return append(dst, `\r`...)
	case '\t':
		return append(dst, `\t`...)
	}
	if r < ' ' || utf16.IsSurrogate(r) {
		const digits = "0123456789abcdef"
		return append(dst, '\\', 'u', digits[r>>12], digits[r>>8&15], digits[r>>4&15], digits[r&15])
	}
	return utf8.AppendRune(dst, r)
}

func (c *canonicalizer) number() error {
	start := c.pos
	negative := c.peek() == '-'
	if negative {
		c.pos++
	}
	zero := c.peek() == '0'
	whole, fraction, exponent := c.digits(), 0, false
	if whole == 0 || zero && whole > 1 {
		return c.fail("a number is expected, without leading zeros")
	}
	if c.peek() == '.' {
		c.pos++
		if fraction = c.digits(); fraction == 0 {
			return c.fail("a digit is expected after the point")
		}
	}
	lastZero := c.text[c.pos-1] == '0'
	if c.peek() == 'e' || c.peek() == 'E' {
		c.pos++
		if c.peek() == '+' || c.peek() == '-' {
			c.pos++
		}
		if exponent = c.digits() > 0; !exponent {
			return c.fail("a digit is expected in the exponent")
		}
	}

	// A double tells all decimals of up to 15 digits apart, so such a one is canonical if it is written the shortest
	// way.
	if whole+fraction <= 15 && !exponent {
		if fraction == 0 && !(negative && zero) { // -0 is 0
			return nil
		}
		if fraction > 0 && !lastZero && (!zero || fraction <= 6) { // 0.0000001 has an exponent
			return nil
		}
	}
	number := string(c.text[start:c.pos])
	if len(number) > 800 {
		number = normalizeNumber(number)
	}
	value, err := strconv.ParseFloat(number, 64)
	if err != nil { // the grammar is checked: it can only be the range
		c.pos = start
		return c.fail("a number is too large for a double")
	}
	var buffer [32]byte
	canonical := appendNumber(buffer[:0], value)
	if !bytes.Equal(canonical, c.text[start:c.pos]) {
		c.replace(start, c.pos)
		c.written = append(c.written, canonical...)
	}
	return nil
}

// normalizeNumber moves the point of a long number before its first digit that is not 0. strconv.ParseFloat needs that
// where many digits and a large exponent make up for each other: it may count no more than 800 digits before the point,
// and reads no exponent whole that has more than five digits.
func normalizeNumber(number string) string {
	const far = 1 << 40 // as good as any exponent beyond
	number, negative := strings.CutPrefix(number, "-")
	mantissa, exponent, _ := strings.Cut(strings.ToLower(number), "e")
	whole, fraction, _ := strings.Cut(mantissa, ".")
	digits := strings.TrimLeft(whole+fraction, "0")
	zeros := len(whole) + len(fraction) - len(digits)
	power, _ := strconv.ParseInt(exponent, 10, 64) // out of range: the largest or smallest there is
	number = "0." + digits + "e" + strconv.FormatInt(min(max(power, -far), far)+int64(len(whole)-zeros), 10)
	if negative {
		number = "-" + number
	}
	return number
}

// digits reads digits and returns how many there are.
func (c *canonicalizer) digits() int {
	start := c.pos
	for c.pos < len(c.text) && isDigit(c.text[c.pos]) {
		c.pos++
	}
	return c.pos - start
}

// appendNumber appends value as JavaScript's Number.prototype.toString does.
func appendNumber(dst []byte, value float64) []byte {
	size := math.Abs(value)
	if size == 0 {
		return append(dst, '0') // without the sign of -0
	}
	if 1e-6 <= size && size < 1e21 {
		return strconv.AppendFloat(dst, value, 'f', -1, 64)
	}
	dst = strconv.AppendFloat(dst, value, 'e', -1, 64)
	// Go writes at least two digits of exponent.
	if n := len(dst); dst[n-2] == '0' && (dst[n-3] == '-' || dst[n-3] == '+') {
		dst[n-2] = dst[n-1]
		dst = dst[:n-1]
	}
	return dst
}

func isDigit(c byte) bool {
	return '0' <= c && c <= '9'
}
