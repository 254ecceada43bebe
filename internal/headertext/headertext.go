// Package headertext keeps an http.Header in a text column so that any byte of a value comes back.
package headertext

import (
	"encoding/json"
	"errors"
	"net/http"
)

var errCorrupt = errors.New("holdsend: the stored headers of a record are corrupt: the record needs repair by hand")

// Encode returns h as a JSON object of arrays. Header values are bytes and need not be UTF-8, so each byte is written as
// the character of that number (ISO 8859-1): ASCII stays readable, and nothing is replaced.
func Encode(h http.Header) (string, error) {
	characters := make(map[string][]string, len(h))
	for name, values := range h {
		encoded := make([]string, len(values))
		for i, value := range values {
			encoded[i] = toCharacters(value)
		}
		characters[toCharacters(name)] = encoded
	}
	text, err := json.Marshal(characters)
	return string(text), err
}

// Decode is the reverse of Encode. Its error names nothing of text.
func Decode(text string) (http.Header, error) {
	var characters map[string][]string
	if json.Unmarshal([]byte(text), &characters) != nil {
		return nil, errCorrupt
	}
	h := make(http.Header, len(characters))
	for name, values := range characters {
		decodedName, ok := toBytes(name)
		if !ok {
			return nil, errCorrupt
		}
		decoded := make([]string, len(values))
		for i, value := range values {
			if decoded[i], ok = toBytes(value); !ok {
				return nil, errCorrupt
			}
		}
		h[decodedName] = decoded
	}
	return h, nil
}

func toCharacters(bytes string) string {
	if isASCII(bytes) {
		return bytes
	}
	characters := make([]rune, len(bytes))
	for i := range len(bytes) {
		characters[i] = rune(bytes[i])
	}
	return string(characters)
}

func toBytes(characters string) (string, bool) {
	if isASCII(characters) {
		return characters, true
	}
	bytes := make([]byte, 0, len(characters))
	for _, c := range characters {
		if c > 0xFF {
			return "", false
		}
		bytes = append(bytes, byte(c))
	}
	return string(bytes), true
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}
