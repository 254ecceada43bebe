package main

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// processCPU is the time that this process has had.
func processCPU() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// cpuOf is the time that a process with one thread has had.
func cpuOf(pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil {
		return 0 // it has just ended
	}
	var ran int64
	_, _ = fmt.Sscan(string(text), &ran)
	return time.Duration(ran)
}
