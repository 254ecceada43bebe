package main

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A kernelTimer is a file that can be read when the time has come, so the goroutine that waits holds no thread.
type kernelTimer struct {
	fd int
	*os.File
	ticks [8]byte
}

func newTimer() (timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return &kernelTimer{fd: fd, File: os.NewFile(uintptr(fd), "timer")}, nil
}

func (t *kernelTimer) sleepUntil(due time.Time) {
	left := time.Until(due)
	if left <= 0 {
		return
	}
	setting := unix.ItimerSpec{Value: unix.NsecToTimespec(left.Nanoseconds())}
	if unix.TimerfdSettime(t.fd, 0, &setting, nil) == nil {
		_, _ = t.Read(t.ticks[:])
	}
}
