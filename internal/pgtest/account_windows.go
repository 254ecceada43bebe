package pgtest

import (
	"errors"
	"os/exec"
)

// Throwaway servers need a Unix shell. On Windows, tests use the server that HOLDSEND_TEST_DATABASE names.

func detach(*exec.Cmd) error {
	return errors.New("throwaway clusters need a Unix: set " + Variable)
}

func giveAway(string) error { return nil }

func isReachable(string) bool { return true }
