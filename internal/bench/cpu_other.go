//go:build !linux

package main

import "time"

// CPU is measured on Linux alone.
func processCPU() time.Duration { return 0 }
func cpuOf(int) time.Duration   { return 0 }
