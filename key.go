package holdsend

import (
	"net/http"
	"strings"
)

// The headers of the protocol.
const (
	HeaderIdempotencyKey = "Idempotency-Key"     // one per item, the same on every attempt
	HeaderWrittenAt      = "Written-At"          // when the user wrote the item, by the client's clock
	HeaderReplayed       = "Idempotent-Replayed" // "true" on an answer that was given before
)

// The length of a key, in characters. Eight keep a client from counting 1, 2, 3; 128 hold any UUID or ULID with a prefix.
const (
	minKeyLength = 8
	maxKeyLength = 128
)

// parseKey returns the key in h, "" if there is none, or false if it is malformed. Two headers are, and so is an empty
// one: a client that sends the header means to be protected, and must not be served without.
func parseKey(h http.Header) (string, bool) {
	key, count := headerValue(h, HeaderIdempotencyKey)
	if count == 0 {
		return "", true
	}
	// The IETF draft (draft-ietf-httpapi-idempotency-key-header) has the key as a quoted structured-field string.
	if len(key) >= 2 && key[0] == '"' && key[len(key)-1] == '"' {
		key = key[1 : len(key)-1]
	}
	if count > 1 || len(key) < minKeyLength || len(key) > maxKeyLength {
		return "", false
	}
	for i := range len(key) {
		if !isKeyByte(key[i]) {
			return "", false
		}
	}
	return key, true
}

func isKeyByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
		c == '_' || c == '-' || c == ':' || c == '.'
}

// headerValue returns the first value of the header named name and how many there are, in any spelling of the name: a
// header that was not canonicalised (built by hand, or by a proxy in between) must not hide a second value.
func headerValue(h http.Header, name string) (value string, count int) {
	for n, values := range h {
		if len(n) != len(name) || !strings.EqualFold(n, name) {
			continue
		}
		if count == 0 && len(values) > 0 {
			value = values[0]
		}
		count += len(values)
	}
	return value, count
}
