package main

import (
	"fmt"
	"os"
	"strings"
)

// writeReport puts text between the markers of a part in a Markdown file.
func writeReport(file, part, text string) error {
	document, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	opening, closing := "<!-- bench:"+part+" -->\n", "<!-- /bench:"+part+" -->"
	before, rest, found := strings.Cut(string(document), opening)
	_, after, closed := strings.Cut(rest, closing)
	if !found || !closed {
		return fmt.Errorf("%s has no lines %q and %q to write between", file, strings.TrimSpace(opening), closing)
	}
	return os.WriteFile(file, []byte(before+opening+text+closing+after), 0o644)
}
