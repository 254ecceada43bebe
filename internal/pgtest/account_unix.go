//go:build unix

package pgtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// account returns whom servers run as: nil for the user of this process, or another user if that is root, as whom
// neither Postgres nor PgBouncer runs.
func account() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		found, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(found.Uid, 10, 32)
		if err != nil {
			return nil, err
		}
		gid, err := strconv.ParseUint(found.Gid, 10, 32)
		if err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("tests run as root, Postgres does not, and there is no user named postgres or nobody: run them as another user")
}

// detach makes a command run as the account and in a session of its own, so that Ctrl-C in a terminal reaches the test
// alone and the servers are stopped in order.
func detach(command *exec.Cmd) error {
	credential, err := account()
	if err != nil {
		return err
	}
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: credential}
	return nil
}

// giveAway makes dir the account's.
func giveAway(dir string) error {
	credential, err := account()
	if err != nil || credential == nil {
		return err
	}
	if err := os.Chown(dir, int(credential.Uid), int(credential.Gid)); err != nil {
		return fmt.Errorf("as root, a cluster must be given to another user: %w", err)
	}
	return nil
}

// isReachable reports that the account may enter dir. Only root needs to ask: its own directories may be closed to
// others.
func isReachable(dir string) bool {
	if os.Geteuid() != 0 {
		return true
	}
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return false
	}
	for {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
		dir = filepath.Dir(dir)
	}
}
