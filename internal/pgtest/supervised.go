package pgtest

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// supervised is a shell that runs servers for this process and outlives it just long enough to stop them. The shell reads
// its commands from a pipe that this process alone holds open: when the process ends, be it by a panic or by SIGKILL, the
// pipe closes, and the shell cleans up. Everything goes through the one shell, so that a process killed in the middle of
// a start still leaves nothing: the shell finishes the start and then sees that its input has ended.
type supervised struct {
	command *exec.Cmd
	input   *os.File
	output  *os.File
	answers *bufio.Reader
}

// supervise starts a shell with a script and its arguments, as the user that owns dir.
func supervise(dir, script string, arguments ...string) (*supervised, error) {
	shellInput, input, err := os.Pipe() // closed on exec: no other child of this process keeps it open
	if err != nil {
		return nil, err
	}
	defer shellInput.Close()
	output, shellOutput, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, input.Close())
	}
	defer shellOutput.Close()

	// A shell that dies of writing to a process that is gone would not clean up, so SIGPIPE is ignored.
	command := exec.Command("sh", append([]string{"-c", "trap '' PIPE\n" + script, "sh"}, arguments...)...)
	command.Stdin, command.Stdout = shellInput, shellOutput // files, so that exec starts no goroutine
	command.Dir = dir
	// No PG variable of the caller's may reach the server, and messages are in English.
	command.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "HOME=" + dir}
	if err := detach(command); err != nil {
		return nil, errors.Join(err, input.Close(), output.Close())
	}
	if err := command.Start(); err != nil {
		return nil, errors.Join(err, input.Close(), output.Close())
	}
	return &supervised{command: command, input: input, output: output, answers: bufio.NewReader(output)}, nil
}

// do has the shell run one command, and returns an error unless it succeeds.
func (s *supervised) do(line string) error {
	if err := s.output.SetReadDeadline(time.Now().Add(setupTimeout)); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(s.input, line); err != nil {
		return err
	}
	answer, err := s.answers.ReadString('\n')
	if err != nil {
		return fmt.Errorf("no answer: %w", err)
	}
	if answer != "ok\n" {
		return errors.New("failed")
	}
	return nil
}

// end closes the shell's input and waits until it has cleaned up. One that does not is killed, which is an error.
func (s *supervised) end() error {
	kill := time.AfterFunc(setupTimeout, func() { _ = s.command.Process.Kill() })
	defer kill.Stop()
	return errors.Join(s.input.Close(), s.command.Wait(), s.output.Close())
}

// makeDir makes a directory that belongs to the user whom servers run as.
func makeDir() (string, error) {
	// A unix socket's path has at most 103 bytes on macOS and 107 on Linux, and a server that does not run as root
	// must be able to reach it. A TMPDIR that does not allow both is passed over.
	const longest = len("/holdsend-0123456789/.s.PGSQL.65535.lock")
	for _, parent := range []string{os.TempDir(), "/tmp"} {
		parent, err := filepath.Abs(parent)
		if err != nil || len(parent)+longest > 103 || !isReachable(parent) {
			continue
		}
		dir, err := os.MkdirTemp(parent, "holdsend-")
		if err != nil {
			return "", err
		}
		if err := giveAway(dir); err != nil {
			return "", errors.Join(err, os.RemoveAll(dir))
		}
		return dir, nil
	}
	return "", errors.New("no temporary directory with a short enough path that other users can reach: set TMPDIR to one")
}
