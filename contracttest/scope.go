package contracttest

import (
	"fmt"
	"strings"

	"github.com/holdsend/holdsend-go"
)

// scopeCases has the rules for what a record is unique on.
func scopeCases[Tx any]() []contractCase[Tx] {
	separate := func(name, what string, other holdsend.Scope) contractCase[Tx] {
		return contractCase[Tx]{
			name: name,
			rule: "records of different " + what + " have nothing to do with each other",
			run:  func(b *bench[Tx]) { b.separate([]holdsend.Scope{scope(), other}) },
		}
	}
	owner, operation, key := scope(), scope(), scope()
	owner.Owner = "owner-2"
	operation.Operation = "note.delete"
	key.Key = "key-00000002"
	return []contractCase[Tx]{
		separate("ScopeByOwner", "owners", owner),
		separate("ScopeByOperation", "operations", operation),
		separate("ScopeByKey", "keys", key),
		{
			name: "ScopePartsAreNotJoined",
			rule: "scopes whose parts only look the same when joined are different scopes",
			run: func(b *bench[Tx]) {
				var scopes []holdsend.Scope
				for _, joint := range []string{"", ":", "|", "/", ",", ".", "-", "_", " ", "'", "\"", "\\", "\n", "\x1f"} {
					scopes = append(scopes,
						holdsend.Scope{Owner: "a" + joint + "b", Operation: "c", Key: "key-00000001"},
						holdsend.Scope{Owner: "a", Operation: "b" + joint + "c", Key: "key-00000001"})
				}
				scopes = append(scopes,
					holdsend.Scope{Owner: "a", Operation: "b:key-0000", Key: "key-00000001"},
					holdsend.Scope{Owner: "a", Operation: "b", Key: "key-0000:key-00000001"})
				b.separate(scopes)
			},
		},
		{
			name: "ScopeHostileNames",
			rule: "any UTF-8 without a NUL is a name as it is: quotes, patterns, spaces, case and look-alikes tell scopes apart",
			run: func(b *bench[Tx]) {
				names := []string{
					"o'brien", `o"brien`, `o\brien`, "o`brien", "'; DROP TABLE holdsend_records; --", "$1", "?", ":name", "%", "_",
					"a%", "a_", "*", "NULL", "null", "0", "false", "{}", "../etc", "a\nb", "a\r\nb", "a\tb", "\x01",
					"a", "A", " a", "a ", "ａ", "а", // full-width, Cyrillic
					"é", "e\u0301", "ß", "ss", "ﬁ", "fi", "İ", "i", "ı", "\u200b", "\u200ba", "\ufeffa", "🙂", "🙂\ufe0f",
				}
				var scopes []holdsend.Scope
				for _, name := range names {
					scopes = append(scopes,
						holdsend.Scope{Owner: name, Operation: "note.create", Key: "key-00000001"},
						holdsend.Scope{Owner: "owner-1", Operation: name, Key: "key-00000001"})
				}
				b.separate(scopes)
			},
		},
		{
			name: "ScopeLongNames",
			rule: "owner and operation may be 255 bytes long and a key 128, and the last byte of each counts",
			run: func(b *bench[Tx]) {
				long := strings.Repeat("o", 254)
				wide := strings.Repeat("語", 84) + "ab" // 254 bytes
				key := strings.Repeat("k", 127)
				b.separate([]holdsend.Scope{
					{Owner: long + "1", Operation: long + "1", Key: key + "1"},
					{Owner: long + "2", Operation: long + "1", Key: key + "1"},
					{Owner: long + "1", Operation: long + "2", Key: key + "1"},
					{Owner: long + "1", Operation: long + "1", Key: key + "2"},
					{Owner: wide + "1", Operation: wide + "1", Key: key + "1"},
					{Owner: wide + "2", Operation: wide + "1", Key: key + "1"},
					{Owner: wide + "1", Operation: wide + "2", Key: key + "1"},
				})
			},
		},
		{
			name: "ScopeIllFormedIsNeverShared",
			rule: "a scope whose owner or operation is empty, over 255 bytes, not UTF-8 or has a NUL is an error, or else a scope of its own",
			run: func(b *bench[Tx]) {
				// The protocol refuses such names before it asks a store. What they would become if a store cut or
				// mended them:
				for _, name := range []string{"owner", "owner-1", "owner\uFFFD", "\uFFFD", "owner?", "owner\\x00", strings.Repeat("o", 255)} {
					b.completed(holdsend.Scope{Owner: name, Operation: "note.create", Key: "key-00000001"}, response(name), 0)
					b.completed(holdsend.Scope{Owner: "owner-2", Operation: name, Key: "key-00000001"}, response(name), 0)
				}
				for what, name := range illFormed() {
					for part, ill := range map[string]holdsend.Scope{
						"owner":     {Owner: name, Operation: "note.create", Key: "key-00000001"},
						"operation": {Owner: "owner-2", Operation: name, Key: "key-00000001"},
					} {
						if record, err := b.Store.Find(b.context(), ill); err == nil || record != nil {
							b.broken("Find with an %s that is %s returned %s", part, what, describe(record))
						}
						attempt, record, _ := b.tryBegin(b.context(), claimOf(ill))
						if record != nil {
							b.broken("Begin with an %s that is %s returned %s", part, what, describe(record))
						}
						if attempt != nil {
							b.abort(attempt)
						}
					}
				}
			},
		},
	}
}

// illFormed returns names that no owner, operation or resource ref may have, by what is wrong with them.
func illFormed() map[string]string {
	return map[string]string{
		"empty":            "",
		"256 bytes long":   strings.Repeat("o", 256),
		"not UTF-8":        "owner\xff",
		"cut UTF-8":        "owner\xe8\xaa",
		"with a NUL":       "owner\x00",
		"with a NUL first": "\x00owner-1",
	}
}

// separate checks that each scope has a record of its own: it can be claimed, and shows its own answer in the end.
func (b *bench[Tx]) separate(scopes []holdsend.Scope) {
	b.t.Helper()
	first := b.begin(claimOf(scopes[0])) // stays claimed beside all others
	alone := b.alone("a claim beside the others")
	if alone {
		b.complete(first, responseOf("answer 0", "note-0"), 0)
	}
	for i, s := range scopes[1:] {
		attempt := b.begin(claimOf(s))
		b.complete(attempt, responseOf(fmt.Sprintf("answer %d", i+1), fmt.Sprintf("note-%d", i+1)), 0)
	}
	if !alone {
		b.findState(scopes[0], holdsend.StateClaimed)
		b.complete(first, responseOf("answer 0", "note-0"), 0)
	}
	for i, s := range scopes {
		r := b.findState(s, holdsend.StateCompleted)
		want := responseOf(fmt.Sprintf("answer %d", i), fmt.Sprintf("note-%d", i))
		if difference := sameAnswer(r.Response, want); difference != "" {
			b.broken("scope %d of %d shows another's answer: %s", i+1, len(scopes), difference)
		}
		if r.Scope != s {
			b.broken("scope %d of %d came back as another", i+1, len(scopes))
		}
	}
}
