package holdsend

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
)

// The default operation and the default content decide what records are compared with, so both are frozen, like the
// fingerprint itself: a change here would make retries that are under way create again, or conflict. The vectors in
// testdata/http pin them.

// defaultOperation returns the method and the matched pattern, without the method that a pattern may itself begin with;
// or the method and the escaped path, if no pattern matched. The host of a pattern stays: it is another route.
func defaultOperation(r *http.Request) string {
	method, route, _ := strings.Cut(r.Pattern, " ")
	if method == r.Method && route == strings.TrimLeft(route, " \t") && route != "" {
		return r.Pattern // as it stands
	}
	route = r.Pattern
	if route == "" {
		route = r.URL.EscapedPath()
	} else if end := strings.IndexAny(route, " \t"); end >= 0 {
		route = strings.TrimLeft(route[end:], " \t")
	}
	return r.Method + " " + route
}

// contentOpening begins the default content of a JSON body.
const contentOpening = `{"json":`

// roomForNames is for what else defaultContent puts around a body, but for path and query.
const roomForNames = 64

// A roomyBody is the body of a request as readBody leaves it: behind contentOpening, and with room behind it, so that the
// default content is put around it where it is. The zero value is an empty body.
type roomyBody struct{ text []byte }

func (b roomyBody) bytes() []byte {
	if b.text == nil {
		return nil
	}
	return b.text[len(contentOpening):len(b.text):len(b.text)]
}

// defaultContent returns a JSON object of the method, the escaped path, the raw query, and one of
//
//	"json": the body, if it is JSON
//	"form": the parts of a multipart form
//	"media_type" and "sha256": any other body
//	nothing, if the body is empty
//
// The JSON text is put together by hand, its keys in order: json.Marshal would copy and check the body twice more. The
// object around a JSON body is one level of nesting, of the 10,000 that there may be. The body in it is checked with the
// fingerprint.
func defaultContent(r *http.Request, read roomyBody) (any, error) {
	body := read.bytes()
	text := []byte{'{'}
	kind := mediaType(r.Header.Get("Content-Type"))
	opaque, framed := false, false
	switch {
	case len(body) == 0: // whatever its type: proxies drop the type of an empty body
	case isEncoded(r.Header): // compressed bytes are neither JSON nor a form
		opaque = true
	case kind == "application/json" || strings.HasSuffix(kind, "+json"):
		framed = true
		copy(read.text, contentOpening)
		text = append(read.text, ',')
	case kind == "multipart/form-data":
		form, err := formContent(r.Header.Get("Content-Type"), body)
		if err != nil {
			return nil, fmt.Errorf("%w: malformed form: %w", ErrNotPlainJSON, err)
		}
		text = append(text, `"form":`...)
		text = append(text, form...)
		text = append(text, ',')
	default:
		opaque = true
	}
	if opaque {
		text = append(text, `"media_type":`...)
		text = appendURLString(text, kind)
		text = append(text, ',')
	}
	text = append(text, `"method":`...)
	text = appendURLString(text, r.Method)
	text = append(text, `,"path":`...)
	text = appendURLString(text, r.URL.EscapedPath())
	text = append(text, `,"query":`...)
	text = appendURLString(text, r.URL.RawQuery)
	if opaque {
		sum := sha256.Sum256(body)
		text = append(text, `,"sha256":"`...)
		text = hex.AppendEncode(text, sum[:])
		text = append(text, '"')
	}
	text = append(text, '}')
	if framed {
		return framedJSON{text, len(contentOpening), len(contentOpening) + len(body)}, nil
	}
	return json.RawMessage(text), nil
}

// A formPart is one part of a multipart form. File names may be anything: bytes that are not UTF-8 become U+FFFD.
type formPart struct {
	Name      string  `json:"name"`
	FileName  *string `json:"file_name,omitempty"` // nil: none, which is not the same as an empty one
	MediaType string  `json:"media_type"`          // empty: none
	SHA256    string  `json:"sha256"`              // of what the part holds, any transfer encoding undone
}

// formContent returns the parts of a multipart form in their order, as JSON. A form that is cut short, or has a part
// that does not say its name properly, is an error: it is one for http.Request.ParseMultipartForm too, or loses a part.
func formContent(contentType string, body []byte) ([]byte, error) {
	_, parameters, err := mime.ParseMediaType(contentType)
	if err != nil {
		return nil, err
	}
	if parameters["boundary"] == "" {
		return nil, http.ErrMissingBoundary
	}
	parts := []formPart{}
	reader := multipart.NewReader(bytes.NewReader(body), parameters["boundary"])
	for {
		part, err := reader.NextPart()
		if err == io.EOF { // itself, not wrapped: only the last boundary ends a form
			return json.Marshal(parts)
		}
		if err != nil {
			return nil, err
		}
		_, disposition, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
		if err != nil {
			return nil, err
		}
		hash := sha256.New()
		if _, err := io.Copy(hash, part); err != nil {
			return nil, err
		}
		described := formPart{
			Name:      disposition["name"],
			MediaType: mediaType(part.Header.Get("Content-Type")),
			SHA256:    hex.EncodeToString(hash.Sum(nil)),
		}
		if name, ok := disposition["filename"]; ok {
			described.FileName = &name
		}
		parts = append(parts, described)
	}
}

// mediaType returns the media type of a Content-Type, in lower case and without its parameters: the charset and the
// boundary do not tell two requests with equal bytes apart. It reads what mime.ParseMediaType would refuse, too.
func mediaType(contentType string) string {
	kind, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.Trim(kind, " \t"))
}

// isEncoded reports whether h says that the body is compressed.
func isEncoded(h http.Header) bool {
	encoding := strings.Trim(h.Get("Content-Encoding"), " \t")
	return encoding != "" && !strings.EqualFold(encoding, "identity")
}

// appendURLString appends s as a JSON string. A byte that is not printable ASCII, which only a raw query can hold,
// becomes %XX, as it should have been sent: two queries that differ never look the same, as with U+FFFD they would.
func appendURLString(text []byte, s string) []byte {
	const hexDigits = "0123456789ABCDEF"
	text = append(text, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			text = append(text, '\\', c)
		case c < 0x20 || c > 0x7e:
			text = append(text, '%', hexDigits[c>>4], hexDigits[c&15])
		default:
			text = append(text, c)
		}
	}
	return append(text, '"')
}
