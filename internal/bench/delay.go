package main

import (
	"io"
	"net"
	"net/url"
	"sync"
	"time"
)

// delayed returns connectionURL by way of a proxy that delivers everything half of roundTrip later, in each direction.
// What is sent in one go arrives in one go: bytes that follow others do not wait for them a second time.
func (b *bench) delayed(connectionURL string, roundTrip time.Duration) string {
	if roundTrip == 0 {
		return connectionURL
	}
	u, err := url.Parse(connectionURL)
	b.check(err)
	server := u.Host
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	b.check(err)
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // closed
			}
			running.Go(func() {
				defer client.Close()
				upstream, err := net.Dial("tcp", server)
				if err != nil {
					return
				}
				defer upstream.Close()
				var both sync.WaitGroup
				both.Go(func() { carry(upstream, client, roundTrip/2) })
				both.Go(func() { carry(client, upstream, roundTrip/2) })
				both.Wait()
			})
		}
	})
	b.Cleanup(func() { // the pools are closed by now, and with them every connection
		listener.Close()
		running.Wait()
	})
	u.Host = listener.Addr().String()
	return u.String()
}

// carry delivers what it reads from one end to the other, each piece after delay.
func carry(to, from net.Conn, delay time.Duration) {
	type piece struct {
		bytes []byte
		due   time.Time
	}
	pieces := make(chan piece, 1024)
	go func() {
		defer close(pieces)
		for {
			buffer := make([]byte, 16<<10)
			n, err := from.Read(buffer)
			if n > 0 {
				pieces <- piece{buffer[:n], time.Now().Add(delay)}
			}
			if err != nil {
				return
			}
		}
	}()
	timer, err := newTimer()
	if err != nil {
		timer = sleeper{}
	}
	defer timer.Close()
	for p := range pieces {
		timer.sleepUntil(p.due)
		if _, err := to.Write(p.bytes); err != nil {
			from.Close()
		}
	}
	to.Close() // one end is gone, so the other goes
}

// A timer sleeps. Go's own sleeps to the millisecond when there is nothing else to do, which is longer than the network
// that is acted here.
type timer interface {
	sleepUntil(time.Time)
	io.Closer
}

type sleeper struct{}

func (sleeper) sleepUntil(due time.Time) { time.Sleep(time.Until(due)) }
func (sleeper) Close() error             { return nil }
