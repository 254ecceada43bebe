package holdsend_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/holdsend/holdsend-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func ExampleFingerprint() {
	first, err := holdsend.Fingerprint("post.create", json.RawMessage(`{"text": "hello", "likes": 1.0}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	again, err := holdsend.Fingerprint("post.create", map[string]any{"likes": 1, "text": "hello"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(first)
	fmt.Println(first == again)
	// Output:
	// hs1:507af3a7c1135400bd3338c41dc998cc43c005754bf5f3a5af25e75cccd419ca
	// true
}

func ExampleMatchFingerprint() {
	stored := "hs1:d522dc874943799449ca6652912e8da08911a63c0127052431219ea00c7aa650"
	for _, content := range []string{`{"text":"hello"}`, `{ "text": "h\u0065llo" }`, `{"text":"goodbye"}`} {
		same, err := holdsend.MatchFingerprint(stored, "post.create", json.RawMessage(content))
		fmt.Println(same, err)
	}
	_, err := holdsend.MatchFingerprint("hs9:d522", "post.create", json.RawMessage(`{"text":"hello"}`))
	fmt.Println(err)
	// Output:
	// true <nil>
	// true <nil>
	// false <nil>
	// holdsend: the stored fingerprint has a tag that this version does not know (known: hs1): update the library, a newer server wrote the record
}

type fingerprintVector struct {
	Name, Operation, Content     string
	Canonical, Fingerprint       string
	FingerprintPlainOrder, Error string
}

func fingerprintVectors(t testing.TB) []fingerprintVector {
	text, err := os.ReadFile(filepath.Join("testdata", "vectors", "hs1.jsonl"))
	require.NoError(t, err)
	var vectors []fingerprintVector
	for line := range bytes.Lines(text) {
		var v struct {
			fingerprintVector
			PlainOrder string `json:"fingerprint_plain_order"`
		}
		require.NoError(t, json.Unmarshal(line, &v))
		v.FingerprintPlainOrder = v.PlainOrder
		vectors = append(vectors, v.fingerprintVector)
	}
	require.Len(t, vectors, 379)
	return vectors
}

func TestFingerprintVectors(t *testing.T) {
	t.Parallel()
	plainOrders := 0
	for _, v := range fingerprintVectors(t) {
		content := json.RawMessage(v.Content)
		fingerprint, err := holdsend.Fingerprint(v.Operation, content)
		if v.Error != "" {
			assert.ErrorIs(t, err, holdsend.ErrNotPlainJSON, v.Name)
			assert.Empty(t, fingerprint, v.Name)
			continue
		}
		require.NoError(t, err, v.Name)
		canonical, err := holdsend.Canonical(content)
		require.NoError(t, err, v.Name)
		assert.Equal(t, v.Canonical, string(canonical), v.Name)
		assert.Equal(t, v.Fingerprint, fingerprint, v.Name)

		stored := []string{v.Fingerprint}
		if v.FingerprintPlainOrder != "" {
			stored = append(stored, v.FingerprintPlainOrder)
			plainOrders++
		}
		for _, stored := range stored {
			same, err := holdsend.MatchFingerprint(stored, v.Operation, content)
			assert.NoError(t, err, v.Name)
			assert.True(t, same, "%s: both readings of hs1 match", v.Name)
			same, err = holdsend.MatchFingerprint(stored, v.Operation+"x", content)
			assert.NoError(t, err, v.Name)
			assert.False(t, same, "%s: another operation is another fingerprint", v.Name)
			same, err = holdsend.MatchFingerprint(stored, v.Operation, json.RawMessage("["+v.Content+"]"))
			assert.NoError(t, err, v.Name)
			assert.False(t, same, "%s: other content is another fingerprint", v.Name)
		}
	}
	assert.Greater(t, plainOrders, 50, "the vectors with two readings are there")
}

// RFC 8785 sorts all keys as text, which is the other reading of hs1. The one that is written differs where an
// array-index key stands beside a key that sorts before it as text.
func TestFingerprintJCS(t *testing.T) {
	t.Parallel()
	differs := map[string]string{
		"structures.json": `{"1":{"\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{"E":"no","e":"yes"}],"":"empty","A":{},"a":{}}`,
		"weird.json": `{"1":"One","\n":"Newline","\r":"Carriage Return","</script>":"Browser Challenge",` +
			"\"\u0080\":\"Control\u007f\",\"ö\":\"Latin Small Letter O With Diaeresis\",\"€\":\"Euro Sign\"," +
			"\"😂\":\"Smiley\",\"\ufb33\":\"Hebrew Letter Dalet With Dagesh\"}",
	}
	inputs, err := filepath.Glob(filepath.Join("testdata", "vectors", "jcs", "input", "*.json"))
	require.NoError(t, err)
	require.Len(t, inputs, 6)
	for _, path := range inputs {
		name := filepath.Base(path)
		input, err := os.ReadFile(path)
		require.NoError(t, err)
		output, err := os.ReadFile(filepath.Join("testdata", "vectors", "jcs", "output", name))
		require.NoError(t, err)

		plain, err := holdsend.CanonicalPlainOrder(input)
		require.NoError(t, err, name)
		assert.Equal(t, string(output), string(plain), name)

		want, ok := differs[name]
		if !ok {
			want = string(output)
		}
		canonical, err := holdsend.Canonical(input)
		require.NoError(t, err, name)
		assert.Equal(t, want, string(canonical), name)
	}
}

func TestFingerprintGoValues(t *testing.T) {
	t.Parallel()
	type note struct {
		Text string  `json:"text"`
		Tags []int   `json:"tags"`
		Size float64 `json:"size"`
		Note *string `json:"note"`
	}
	text := json.RawMessage(`{"note":null,"size":1e21,"tags":[1,2],"text":"<a>&\u2028"}`)
	want, err := holdsend.Fingerprint("post.create", text)
	require.NoError(t, err)
	for name, content := range map[string]any{
		"bytes":         []byte(text),
		"struct":        note{Text: "<a>&\u2028", Tags: []int{1, 2}, Size: 1e21},
		"pointer":       &note{Text: "<a>&\u2028", Tags: []int{1, 2}, Size: 1e21},
		"map":           map[string]any{"text": "<a>&\u2028", "tags": []any{1.0, 2}, "size": json.Number("1.0e21"), "note": nil},
		"text in a map": map[string]any{"text": json.RawMessage(`"\u003ca>&\u2028"`), "tags": []int{1, 2}, "size": 1e21, "note": nil},
	} {
		got, err := holdsend.Fingerprint("post.create", content)
		assert.NoError(t, err, name)
		assert.Equal(t, want, got, name)
	}
}

type badMarshaler struct{ secret string }

func (b badMarshaler) MarshalJSON() ([]byte, error) { return nil, errors.New(b.secret) }

func TestFingerprintRefusesContent(t *testing.T) {
	t.Parallel()
	const secret = "tell nobody"
	cycle := map[string]any{}
	cycle["self"] = cycle
	deep := strings.Repeat("[", 10_001) + strings.Repeat("]", 10_001)
	for name, content := range map[string]any{
		"NaN":                     math.NaN(),
		"infinity":                math.Inf(-1),
		"channel":                 make(chan int),
		"function":                func() {},
		"cycle":                   cycle,
		"MarshalJSON fails":       badMarshaler{secret},
		"empty text":              json.RawMessage{},
		"nil text":                json.RawMessage(nil),
		"nil bytes":               []byte(nil),
		"blank":                   json.RawMessage(" \n"),
		"bad UTF-8":               json.RawMessage("\"" + secret + "\xff\""),
		"bad UTF-8 in a key":      json.RawMessage("{\"\xc3\":1}"),
		"overlong UTF-8":          json.RawMessage("\"\xc0\x80\""),
		"surrogate as UTF-8":      json.RawMessage("\"\xed\xa0\x80\""),
		"beyond U+10FFFF":         json.RawMessage("\"\xf4\x90\x80\x80\""),
		"split by an escape":      json.RawMessage("\"\xc3\\n\xa9\""),
		"bad UTF-8 outside":       json.RawMessage("1\xff"),
		"bad UTF-8 in Marshaler":  map[string]any{"a": json.RawMessage("\"\xff\"")},
		"byte order mark":         json.RawMessage("\ufeff1"),
		"mark at the end":         json.RawMessage("1\ufeff"),
		"NUL":                     json.RawMessage("1\x00"),
		"NUL in a string":         json.RawMessage("\"\x00\""),
		"unit separator":          json.RawMessage("\"\x1f\""),
		"trailing":                json.RawMessage(`{"a":"` + secret + `"} x`),
		"two values":              json.RawMessage(`1 2`),
		"overflow":                json.RawMessage(`1.7976931348623159e308`),
		"overflow by digits":      json.RawMessage(strings.Repeat("9", 400)),
		"overflow by exponent":    json.RawMessage(`1e99999999999999999999`),
		"overflow in a duplicate": json.RawMessage(`{"a":1e309,"a":1}`),
		"negative overflow":       json.RawMessage(`{"` + secret + `":-1e309}`),
		"overflow in a Go value":  map[string]any{"a": json.Number("1e309")},
		"too deep":                json.RawMessage(deep),
		"too deep and open":       json.RawMessage(strings.Repeat("[", 5_000_000)),
		"too deep objects":        json.RawMessage(strings.Repeat(`{"a":`, 5_000_000)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fingerprint, err := holdsend.Fingerprint("post.create", content)
			require.ErrorIs(t, err, holdsend.ErrNotPlainJSON)
			assert.Empty(t, fingerprint)
			assert.NotContains(t, err.Error(), secret, "an error shows no content")
			_, err = holdsend.MatchFingerprint("hs1:"+strings.Repeat("0", 64), "post.create", content)
			assert.ErrorIs(t, err, holdsend.ErrNotPlainJSON)
		})
	}
	for _, text := range []string{
		"{", "[", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "]", "}", "{]", "[}", `{"a"`, `{"a":`, `{"a":1`, `{"a":1,`, `{"a":1,}`, `{,"a":1}`,
		`{"a" 1}`, `{"a":1 "b":2}`, `{1:2}`, `{null:1}`, `{"a"::1}`, `"`, `"a`, `"\`, `"\"`, `"\u`, `"\u123`, `"\u123"`, `"\u12g4"`,
		`"\ud83d\u"`, `"\a"`, `"\'"`, `"\0"`, `"\U0041"`, "\"\n\"", "'a'", "-", "--1", "+1", "01", "-01", "00", "1.", ".1", "1.e1", "1e", "1e+",
		"1e+-1", "0x1", "1_000", "1,000", "1e1.5", "Infinity", "-Infinity", "NaN", "tru", "truE", "True", "nul", "nulll", "falsey", "undefined",
		"//", "1//", "/**/1", "\f1", "\v1", "\u00a01", "\u20281", "\u0000",
	} {
		_, err := holdsend.Fingerprint("post.create", json.RawMessage(text))
		assert.ErrorIs(t, err, holdsend.ErrNotPlainJSON, "%q", text)
		assert.False(t, json.Valid([]byte(text)), "%q: encoding/json refuses it too", text)
	}

	// A forgotten field is the service's mistake, not the client's content.
	_, err := holdsend.Fingerprint("post.create", nil)
	require.Error(t, err)
	assert.NotErrorIs(t, err, holdsend.ErrNotPlainJSON)
}

func TestFingerprintOperation(t *testing.T) {
	t.Parallel()
	content := json.RawMessage(`1`)
	for name, operation := range map[string]string{
		"empty": "", "too long": strings.Repeat("a", 256), "not UTF-8": "post\xff", "NUL": "post\x00",
	} {
		_, err := holdsend.Fingerprint(operation, content)
		require.Error(t, err, name)
		assert.NotErrorIs(t, err, holdsend.ErrNotPlainJSON, name)
	}

	// The length is in UTF-16 code units, the hash over UTF-8.
	got, err := holdsend.Fingerprint("😀é", content)
	require.NoError(t, err)
	assert.Equal(t, fingerprintOf("3:😀é|1"), got)
}

func fingerprintOf(hashed string) string {
	sum := sha256.Sum256([]byte(hashed))
	return "hs1:" + hex.EncodeToString(sum[:])
}

func TestMatchFingerprintStored(t *testing.T) {
	t.Parallel()
	content := json.RawMessage(`{"text":"hello"}`)
	const good = "d522dc874943799449ca6652912e8da08911a63c0127052431219ea00c7aa650"

	for _, stored := range []string{"", ":", good, "hs2:" + good, "HS1:" + good, " hs1:" + good, "hs:" + good, "sha256:" + good} {
		same, err := holdsend.MatchFingerprint(stored, "post.create", content)
		require.Error(t, err, "%q: an unknown tag is an error, not a conflict", stored)
		assert.False(t, same)
		assert.NotErrorIs(t, err, holdsend.ErrNotPlainJSON)
		assert.Contains(t, err.Error(), "known: hs1", "the error says which tags are known")
	}
	for _, hash := range []string{"", good[1:], good + "0", strings.ToUpper(good), "g" + good[1:], " " + good[1:], good + ":"} {
		same, err := holdsend.MatchFingerprint("hs1:"+hash, "post.create", content)
		require.Error(t, err, "%q: a damaged fingerprint is an error, not a conflict", hash)
		assert.False(t, same)
		assert.NotErrorIs(t, err, holdsend.ErrNotPlainJSON)
	}
	_, err := holdsend.MatchFingerprint("hs1", "post.create", content)
	require.Error(t, err)
	_, err = holdsend.MatchFingerprint("hs1:"+good, "post.create", nil)
	require.Error(t, err)
	assert.NotErrorIs(t, err, holdsend.ErrNotPlainJSON)
	_, err = holdsend.MatchFingerprint("hs1:"+good, "", content)
	require.Error(t, err)
}

// The other reading sorts array-index keys as text, at every depth, and lets the last of duplicate keys win too.
func TestMatchFingerprintPlainOrder(t *testing.T) {
	t.Parallel()
	content := json.RawMessage(`{"9":0,"10":[{"b":1,"2":2,"11":3}],"9":4,"!":5}`)
	for canonical, want := range map[string]bool{
		`{"9":4,"10":[{"2":2,"11":3,"b":1}],"!":5}`: true,  // array-index keys first, by number
		`{"!":5,"10":[{"11":3,"2":2,"b":1}],"9":4}`: true,  // as text
		`{"!":5,"10":[{"2":2,"11":3,"b":1}],"9":4}`: false, // some of each
		`{"10":[{"11":3,"2":2,"b":1}],"9":4,"!":5}`: false, // first, but as text
		`{"!":5,"10":[{"11":3,"2":2,"b":1}],"9":0}`: false, // the first duplicate
	} {
		same, err := holdsend.MatchFingerprint(fingerprintOf("8:cart.set|"+canonical), "cart.set", content)
		require.NoError(t, err)
		assert.Equal(t, want, same, canonical)
	}
	fingerprint, err := holdsend.Fingerprint("cart.set", content)
	require.NoError(t, err)
	assert.Equal(t, fingerprintOf(`8:cart.set|{"9":4,"10":[{"2":2,"11":3,"b":1}],"!":5}`), fingerprint)
}

func TestCanonicalNumbers(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"0": "0", "-0": "0", "-0.0": "0", "0.0": "0", "-0e5": "0", "0e99999999999": "0", "1e-400": "0", "-1e-400": "0", "1e-99999999999": "0",
		"4.940656458412465441765687928682213723651e-324": "5e-324", "2e-324": "0", "3e-324": "5e-324",
		"1.0": "1", "1.50": "1.5", "-1.50": "-1.5", "10": "10", "100.0": "100", "0.10": "0.1", "12.99": "12.99", "-0.5": "-0.5",
		"0.000001": "0.000001", "0.0000010": "0.000001", "0.0000001": "1e-7", "-0.0000001": "-1e-7", "0.00000123": "0.00000123",
		"0.000000123": "1.23e-7", "0.1234567": "0.1234567", "1e-10": "1e-10", "1.5E-010": "1.5e-10", "1e100": "1e+100", "1E+00000021": "1e+21",
		"999999999999999": "999999999999999", "9999999999999999": "10000000000000000", "9007199254740993": "9007199254740992",
		"123456789012345680000": "123456789012345680000", "999999999999999999999": "1e+21", "99999999999999999999": "100000000000000000000",
		"1e5": "100000", "-1e20": "-100000000000000000000", "1.7976931348623158e308": "1.7976931348623157e+308",
		"0.30000000000000004": "0.30000000000000004", "0.300000000000000044": "0.30000000000000004", "5e-324": "5e-324",
		"123456.789012345": "123456.789012345", "1234567.890123456": "1234567.890123456", "0.5e1": "5", "2.2250738585072011e-308": "2.225073858507201e-308",
	} {
		got, err := holdsend.Canonical([]byte(text))
		require.NoError(t, err, text)
		assert.Equal(t, want, string(got), text)
	}

	// The digits make up for the exponent, however long both are.
	zeros := strings.Repeat("0", 100_000)
	for text, want := range map[string]string{
		"0." + zeros + "1e100001": "1", "-1" + zeros + "E-100000": "-1", "0." + zeros + "12e+0100003": "120",
		"0." + zeros + "1e99001": "0", "1" + zeros + "e-100400": "0", "0e999999": "0", "-0.0e-999999": "0", "1e-99999999999999999999": "0",
		"1e0000000": "1", "12.5e-0000001": "1.25",
	} {
		got, err := holdsend.Canonical([]byte(text))
		require.NoError(t, err)
		assert.Equal(t, want, string(got))
	}
	for _, text := range []string{"1" + zeros + "e-99000", "0." + zeros + "1e100400", "1e100000", "1e99999999999999999999"} {
		_, err := holdsend.Canonical([]byte(text))
		assert.ErrorIs(t, err, holdsend.ErrNotPlainJSON)
	}
}

// Every code unit, escaped in lower and upper case, in a value and in a key.
func TestCanonicalEscapes(t *testing.T) {
	t.Parallel()
	short := map[rune]string{'"': `\"`, '\\': `\\`, '\b': `\b`, '\f': `\f`, '\n': `\n`, '\r': `\r`, '\t': `\t`}
	for r := rune(0); r <= 0xFFFF; r++ {
		want := string(r)
		if s, ok := short[r]; ok {
			want = s
		} else if r < ' ' || utf16.IsSurrogate(r) {
			want = fmt.Sprintf(`\u%04x`, r)
		}
		text := fmt.Sprintf(`{"\u%04x":"\u%04X","~":0}`, r, r)
		first, second := fmt.Sprintf(`"%s":"%s"`, want, want), `"~":0`
		switch {
		case r == '~':
			first, second = `"~":0`, ""
		case r > '~':
			first, second = second, first
		}
		got, err := holdsend.Canonical([]byte(text))
		if err != nil || string(got) != "{"+strings.TrimSuffix(first+","+second, ",")+"}" {
			t.Fatalf("U+%04X: got %s, %v", r, got, err)
		}
	}
}

func TestCanonicalKeyOrder(t *testing.T) {
	t.Parallel()
	// In order, by UTF-16 code units. A lone surrogate is one unit, wherever the other strings end.
	sorted := []string{
		`0`, `1`, `9`, `10`, `4294967294`, // array indexes
		``, `\u0000`, `\u0001`, `\b`, `\t`, `\n`, `\u000b`, `\f`, `\r`, `\u001f`, ` `, `!`, `\"`, `-1`, `00`, `01`, `1.5`, `10a`, `1e3`,
		`4294967295`, `9999999999`, `99999999999999999999999`, `A`, `\\`, `\\u0000`, `__proto__`, `a`, `a\u0000`, `a `, `aa`, `aé`, `a😀`, "a\ufb33", `b`,
		`é`, `€`, "\ud7ff", `\ud800`, `\ud800a`, `\ud83d`, `\ud83d!`, `\ud83d\ud83d`, `😀`, `😀a`, "\\ud83d\uffff", "\U0010FFFF", `\udfff`, "\ue000", "\ufb33", "\uffff",
	}
	members := make([]string, len(sorted))
	for i, key := range sorted {
		members[i] = `"` + key + `":` + strconv.Itoa(i)
	}
	want := "{" + strings.Join(members, ",") + "}"
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		got, err := holdsend.Canonical([]byte("{" + strings.Join(members, ",") + "}"))
		require.NoError(t, err)
		require.Equal(t, want, string(got))
		random.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
	}
}

// Small objects are put in order as they close, large ones at the end; a large one may hold small ones and be held by
// one whose keys are in order.
func TestCanonicalLargeObjects(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(3, 4))
	var build func(depth int) reference
	build = func(depth int) reference {
		if depth == 0 {
			return reference{text: utf16.Encode([]rune(strings.Repeat("xé😀\n", random.IntN(60))))}
		}
		value := reference{keys: [][]uint16{}}
		if random.IntN(4) == 0 {
			value = reference{items: []reference{}}
		}
		for i := range random.IntN(7) {
			if value.keys != nil {
				value.keys = append(value.keys, utf16.Encode([]rune(strings.Repeat("k", random.IntN(3))+strconv.Itoa(i))))
			}
			value.items = append(value.items, build(depth-1-random.IntN(min(2, depth))))
		}
		return value
	}
	for range 100 {
		value := build(5)
		text := value.disguised(nil, random)
		got, err := holdsend.Canonical(text)
		require.NoError(t, err)
		require.Equal(t, string(value.canonical(nil)), string(got), "%s", text)
	}
}

// Few members are sorted in another way than many; of duplicates the last counts either way.
func TestCanonicalManyMembers(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(5, 6))
	for members := range 40 {
		for range 20 {
			value := reference{keys: [][]uint16{}}
			for i := range members {
				value.keys = append(value.keys, utf16.Encode([]rune(strings.Repeat("k", random.IntN(40))+strconv.Itoa(i))))
				value.items = append(value.items, reference{text: utf16.Encode([]rune(strconv.Itoa(i)))})
			}
			text := value.disguised(nil, random)
			got, err := holdsend.Canonical(text)
			require.NoError(t, err)
			require.Equal(t, string(value.canonical(nil)), string(got), "%s", text)
		}
	}
}

func TestCanonicalDeepNesting(t *testing.T) {
	t.Parallel()
	const most = 10_000
	arrays := strings.Repeat("[", most) + strings.Repeat("]", most)
	got, err := holdsend.Canonical([]byte(arrays))
	require.NoError(t, err)
	assert.Equal(t, arrays, string(got))

	// Each object is out of order, so each must be put in order inside of the others.
	unsorted := strings.Repeat(`{"b":0,"a":`, most) + "1" + strings.Repeat("}", most)
	want := strings.Repeat(`{"a":`, most) + "1" + strings.Repeat(`,"b":0}`, most)
	got, err = holdsend.Canonical([]byte(unsorted))
	require.NoError(t, err)
	assert.Equal(t, want, string(got))

	_, err = holdsend.Canonical([]byte("[" + arrays + "]"))
	assert.ErrorIs(t, err, holdsend.ErrNotPlainJSON)
}

// A large string in the innermost of many objects is moved once, not once for each of them: that would be forty billion
// bytes here, and a small request would hold a processor for seconds.
func TestCanonicalDeepReorderingIsLinear(t *testing.T) {
	t.Parallel()
	const depth, size = 9_999, 4 << 20
	inner := `"` + strings.Repeat("x", size) + `"`
	unsorted := strings.Repeat(`{"b":0,"a":`, depth) + inner + strings.Repeat("}", depth)
	sorted := strings.Repeat(`{"a":0,"b":`, depth) + inner + strings.Repeat("}", depth)
	fastest := func(text string) time.Duration {
		best := time.Duration(math.MaxInt64)
		for range 3 {
			start := time.Now()
			_, err := holdsend.Canonical([]byte(text))
			best = min(best, time.Since(start))
			require.NoError(t, err)
		}
		return best
	}
	assert.Less(t, fastest(unsorted), 15*fastest(sorted), "it takes about as long as reading it")
}

// What is in order and compact is hashed where it lies.
func TestCanonicalSortedAllocatesNothingThatGrows(t *testing.T) {
	document := func(records int) []byte {
		record := `{"10":[1,-2.5,true],"id":12345,"nested":{"a":null,"b":{}},"text":"hello é 😀 \n"}`
		// Space around it does not make it be copied either.
		return []byte("\n[" + strings.Repeat(record+",", records-1) + record + "]\n")
	}
	cost := func(text []byte) (allocations, allocated uint64) {
		canonical, err := holdsend.Canonical(text)
		require.NoError(t, err)
		require.Equal(t, &text[1], &canonical[0], "a canonical document is its own canonical form, where it lies")
		allocations, allocated = math.MaxUint64, math.MaxUint64
		for range 5 { // the least of them: another goroutine may allocate meanwhile
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err = holdsend.Canonicalize(text)
			runtime.ReadMemStats(&after)
			require.NoError(t, err)
			allocations = min(allocations, after.Mallocs-before.Mallocs)
			allocated = min(allocated, after.TotalAlloc-before.TotalAlloc)
		}
		return allocations, allocated
	}
	smallCount, smallBytes := cost(document(10))
	largeCount, largeBytes := cost(document(20_000))
	assert.Equal(t, smallCount, largeCount)
	assert.Equal(t, smallBytes, largeBytes)
}

func TestFingerprintConcurrently(t *testing.T) {
	t.Parallel()
	vectors := fingerprintVectors(t)
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for _, v := range vectors {
				if got, err := holdsend.Fingerprint(v.Operation, []byte(v.Content)); got != v.Fingerprint {
					t.Errorf("%s: got %s, %v", v.Name, got, err)
				}
			}
		})
	}
	group.Wait()
}

// The input is the caller's: it is read, never written.
func TestFingerprintLeavesContentAlone(t *testing.T) {
	t.Parallel()
	for _, v := range fingerprintVectors(t) {
		content := []byte(v.Content + "    ")[:len(v.Content)]
		_, _ = holdsend.Fingerprint(v.Operation, content) // the bad ones too
		require.Equal(t, v.Content+"    ", string(content[:len(content)+4]), v.Name)
	}
}

func FuzzFingerprint(f *testing.F) {
	for i, v := range fingerprintVectors(f) {
		if i < 120 {
			f.Add([]byte(v.Content), uint64(i))
		}
	}
	f.Fuzz(func(t *testing.T, text []byte, seed uint64) {
		canonical, err := holdsend.Canonical(text)
		reference, isPlain := parseReference(text)
		if err != nil {
			if !errors.Is(err, holdsend.ErrNotPlainJSON) {
				t.Fatalf("%q: %v", text, err)
			}
			if isPlain {
				t.Fatalf("%q is plain JSON, but: %v", text, err)
			}
			return
		}
		if !isPlain {
			t.Fatalf("%q is not plain JSON, but gives %s", text, canonical)
		}
		if want := reference.canonical(nil); string(want) != string(canonical) {
			t.Fatalf("%q: got %s, want %s", text, canonical, want)
		}
		if fixed, err := holdsend.Canonical(canonical); err != nil || !bytes.Equal(fixed, canonical) {
			t.Fatalf("%q: %s is no fixed point: %s, %v", text, canonical, fixed, err)
		}
		if !bytes.Contains(canonical, []byte(`\ud`)) { // encoding/json loses lone surrogates
			var before, after any
			require.NoError(t, json.Unmarshal(text, &before))
			require.NoError(t, json.Unmarshal(canonical, &after))
			require.Equal(t, before, after, "the meaning is kept")
		}

		random := rand.New(rand.NewPCG(seed, 1))
		want, err := holdsend.Fingerprint("post.create", text)
		require.NoError(t, err)
		for range 3 {
			again := reference.disguised(nil, random)
			if got, err := holdsend.Fingerprint("post.create", again); err != nil || got != want {
				t.Fatalf("%q and %q are the same value, but: %s, %s, %v", text, again, want, got, err)
			}
		}
	})
}

// A reference is a JSON value as a tree, from which the canonical form is made in the simplest way. Strings are code
// units as in JavaScript, so that lone surrogates are kept.
type reference struct {
	word   string // null, true or false
	number *float64
	text   []uint16
	items  []reference
	keys   [][]uint16 // of items: it is an object
}

// parseReference is false if text is not plain JSON.
func parseReference(text []byte) (reference, bool) {
	if !utf8.Valid(text) || !json.Valid(text) {
		return reference{}, false
	}
	p := referenceParser{text: string(text)}
	value := p.value()
	return value, !p.overflow
}

// A referenceParser relies on its text being valid.
type referenceParser struct {
	text     string
	overflow bool
}

func (p *referenceParser) space() byte {
	p.text = strings.TrimLeft(p.text, " \t\r\n")
	return p.text[0]
}

func (p *referenceParser) take(n int) string {
	taken := p.text[:n]
	p.text = p.text[n:]
	return taken
}

func (p *referenceParser) value() reference {
	switch p.space() {
	case '{':
		object := reference{keys: [][]uint16{}}
		for p.take(1); p.space() != '}'; {
			if p.text[0] == ',' {
				p.take(1)
				p.space()
			}
			key := p.units()
			p.space()
			p.take(1)
			value := p.value()
			if i := slices.IndexFunc(object.keys, func(k []uint16) bool { return slices.Equal(k, key) }); i >= 0 {
				object.items[i] = value
			} else {
				object.keys, object.items = append(object.keys, key), append(object.items, value)
			}
		}
		p.take(1)
		return object
	case '[':
		array := reference{items: []reference{}}
		for p.take(1); p.space() != ']'; {
			if p.text[0] == ',' {
				p.take(1)
			}
			array.items = append(array.items, p.value())
		}
		p.take(1)
		return array
	case '"':
		return reference{text: p.units()}
	case 't', 'n':
		return reference{word: p.take(4)}
	case 'f':
		return reference{word: p.take(5)}
	}
	end := strings.IndexAny(p.text+" ", " \t\r\n,]}")
	number, err := strconv.ParseFloat(p.take(end), 64)
	p.overflow = p.overflow || err != nil
	return reference{number: &number}
}

func (p *referenceParser) units() []uint16 {
	units := []uint16{}
	for p.take(1); ; {
		r, size := utf8.DecodeRuneInString(p.text)
		p.take(size)
		switch r {
		case '"':
			return units
		case '\\':
			escape := p.take(1)
			if escape == "u" {
				unit, _ := strconv.ParseUint(p.take(4), 16, 16)
				units = append(units, uint16(unit))
				continue
			}
			r = rune(strings.NewReplacer("b", "\b", "f", "\f", "n", "\n", "r", "\r", "t", "\t").Replace(escape)[0])
		}
		units = utf16.AppendRune(units, r)
	}
}

func (v reference) canonical(dst []byte) []byte {
	switch {
	case v.word != "":
		return append(dst, v.word...)
	case v.number != nil:
		return append(dst, javaScriptNumber(*v.number)...)
	case v.text != nil:
		return appendReferenceString(dst, v.text, nil)
	}
	order := make([]int, len(v.items))
	for i := range order {
		order[i] = i
	}
	if v.keys != nil {
		index := func(i int) int {
			key := string(utf16.Decode(v.keys[i]))
			if n, err := strconv.Atoi(key); err == nil && n >= 0 && n < math.MaxUint32 && strconv.Itoa(n) == key {
				return n
			}
			return math.MaxInt
		}
		slices.SortFunc(order, func(i, j int) int {
			if index(i) != index(j) {
				return index(i) - index(j)
			}
			return slices.Compare(v.keys[i], v.keys[j])
		})
	}
	return v.append(dst, order, nil)
}

// disguised is the same value in another key order, spacing and escapes, with duplicates that do not count.
func (v reference) disguised(dst []byte, random *rand.Rand) []byte {
	dst = append(dst, []string{"", "", " ", "\n\t", "\r "}[random.IntN(5)]...)
	switch {
	case v.word != "":
		dst = append(dst, v.word...)
	case v.number != nil:
		format := [](func() string){
			func() string { return javaScriptNumber(*v.number) },
			func() string { return strconv.FormatFloat(*v.number, 'E', -1, 64) },
			func() string { return strconv.FormatFloat(*v.number, 'f', 1, 64) + "e-0" },
			func() string { return strconv.FormatFloat(*v.number, 'e', 30, 64) },
		}
		text := format[random.IntN(len(format))]()
		if same, err := strconv.ParseFloat(text, 64); err != nil || same != *v.number {
			text = format[0]()
		}
		dst = append(dst, text...)
	case v.text != nil:
		dst = appendReferenceString(dst, v.text, random)
	default:
		order := random.Perm(len(v.items))
		if v.keys == nil {
			slices.Sort(order)
		}
		dst = v.append(dst, order, random)
	}
	return append(dst, []string{"", "", " ", "\n", "\t\r"}[random.IntN(5)]...)
}

// append writes an array or object, plainly if random is nil.
func (v reference) append(dst []byte, order []int, random *rand.Rand) []byte {
	brackets := "[]"
	if v.keys != nil {
		brackets = "{}"
	}
	dst = append(dst, brackets[0])
	for n, i := range order {
		if n > 0 {
			dst = append(dst, ',')
		}
		if v.keys != nil {
			if random != nil && random.IntN(4) == 0 { // a duplicate that comes first, and so does not count
				dst = append(appendReferenceString(dst, v.keys[i], random), `:{"z":[],"a":1},`...)
			}
			if random != nil {
				dst = append(dst, ' ')
			}
			dst = append(appendReferenceString(dst, v.keys[i], random), ':')
		}
		if random != nil {
			dst = v.items[i].disguised(dst, random)
		} else {
			dst = v.items[i].canonical(dst)
		}
	}
	return append(dst, brackets[1])
}

// appendReferenceString writes a string, with needless escapes at random.
func appendReferenceString(dst []byte, units []uint16, random *rand.Rand) []byte {
	dst = append(dst, '"')
	for i := 0; i < len(units); i++ {
		unit := rune(units[i])
		short := strings.IndexRune("\"\\\b\f\n\r\t", unit)
		switch {
		case random != nil && random.IntN(5) == 0:
			dst = fmt.Appendf(dst, []string{`\u%04x`, `\u%04X`}[random.IntN(2)], unit)
		case random != nil && unit == '/' && random.IntN(2) == 0:
			dst = append(dst, `\/`...)
		case short >= 0:
			dst = append(dst, '\\', `"\bfnrt`[short])
		case unit < ' ':
			dst = fmt.Appendf(dst, `\u%04x`, unit)
		case utf16.IsSurrogate(unit):
			pair := rune(utf8.RuneError)
			if i+1 < len(units) {
				pair = utf16.DecodeRune(unit, rune(units[i+1]))
			}
			if pair == utf8.RuneError {
				dst = fmt.Appendf(dst, `\u%04x`, unit)
				continue
			}
			dst = utf8.AppendRune(dst, pair)
			i++
		default:
			dst = utf8.AppendRune(dst, unit)
		}
	}
	return append(dst, '"')
}

// javaScriptNumber follows Number::toString of ECMA-262 step by step: the digits are s, k of them, and the value is
// s × 10^(n-k).
func javaScriptNumber(value float64) string {
	if value == 0 {
		return "0"
	}
	if value < 0 {
		return "-" + javaScriptNumber(-value)
	}
	mantissa, exponent, _ := strings.Cut(strconv.FormatFloat(value, 'e', -1, 64), "e")
	s := strings.Replace(mantissa, ".", "", 1)
	power, err := strconv.Atoi(exponent)
	if err != nil {
		panic(err)
	}
	k, n := len(s), power+1
	switch {
	case k <= n && n <= 21:
		return s + strings.Repeat("0", n-k)
	case 0 < n && n <= 21:
		return s[:n] + "." + s[n:]
	case -6 < n && n <= 0:
		return "0." + strings.Repeat("0", -n) + s
	}
	if k > 1 {
		s = s[:1] + "." + s[1:]
	}
	return fmt.Sprintf("%se%+d", s, n-1)
}

// BenchmarkFingerprint reports how many times the cost of json.Valid and SHA-256 a fingerprint takes.
func BenchmarkFingerprint(b *testing.B) {
	record := `{"id":%d,"author":"user-%d","text":"A line of text, as people write it – with a dash and an é.",` +
		`"tags":["one","two","three"],"price":12.99,"position":{"longitude":13.404954,"latitude":52.520008},"draft":false}`
	sorted := `{"author":"user-%[2]d","draft":false,"id":%[1]d,"position":{"latitude":52.520008,"longitude":13.404954},` +
		`"price":12.99,"tags":["one","two","three"],"text":"A line of text, as people write it – with a dash and an é."}`
	for _, size := range []struct {
		name  string
		bytes int
	}{{"200B", 200}, {"1KB", 1 << 10}, {"100KB", 100 << 10}, {"10MB", 10 << 20}} {
		for _, form := range []struct{ name, record string }{{"sorted", sorted}, {"unsorted", record}, {"indented", record}} {
			b.Run(size.name+"/"+form.name, func(b *testing.B) {
				var document []byte
				for i := 0; len(document) < size.bytes; i++ {
					document = append(fmt.Appendf(document, form.record, 1000+i, i), ',')
				}
				document = append(append([]byte{'['}, document[:len(document)-1]...), ']')
				if size.bytes == 200 {
					document = document[1 : len(document)-1] // one record
				}
				if form.name == "indented" {
					var indented bytes.Buffer
					require.NoError(b, json.Indent(&indented, document, "", "  "))
					document = indented.Bytes()
				}
				b.SetBytes(int64(len(document)))
				b.ReportAllocs()
				// In turns, so that other load on the machine slows both alike.
				var base time.Duration
				turns := 0
				turn := max(1, 1<<20/len(document))
				for run := 0; b.Loop(); run++ {
					if _, err := holdsend.Fingerprint("post.create", document); err != nil {
						b.Fatal(err)
					}
					if run%turn != 0 {
						continue
					}
					b.StopTimer()
					start := time.Now()
					for range turn {
						if !json.Valid(document) || sha256.Sum256(document) == [sha256.Size]byte{} {
							b.Fatal("the document is not valid")
						}
					}
					base += time.Since(start) / time.Duration(turn)
					turns++
					b.StartTimer()
				}
				b.ReportMetric(float64(b.Elapsed())/float64(b.N)/(float64(base)/float64(turns)), "x-valid+sha256")
			})
		}
	}
}
