package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/isergate/isergate/iser/initiator/bench"
)

// streamArg makes this program the far end of a bare TCP stream.
const streamArg = "tcp-stream"

// headerBytes is what goes with each command and each answer: the basic header of iSCSI.
const headerBytes = 48

// shape is what the near end of a bare stream tells the far end first.
type shape struct {
	Request int `json:"request"` // bytes
	Answer  int `json:"answer"`
}

// streamTarget is the far end: for each request of so many bytes it sends an answer of so many. It reads and writes as much at
// once as there is, knows no protocol, and looks at nothing. It writes its address to out and serves until in ends.
func streamTarget(in io.Reader, out io.Writer) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if err := json.NewEncoder(out).Encode(l.Addr().String()); err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = answer(c) // the near end sees what is missing
			}()
		}
	}()
	_, err = io.Copy(io.Discard, in)
	return err
}

func answer(c net.Conn) error {
	r := bufio.NewReaderSize(c, 4096)
	line, err := r.ReadBytes('\n')
	if err != nil {
		return err
	}
	var s shape
	if err := json.Unmarshal(line, &s); err != nil {
		return err
	}
	if s.Request < 1 || s.Answer < 1 || r.Buffered() > 0 {
		return errors.New("not the shape of a stream")
	}
	if _, err := c.Write([]byte{'\n'}); err != nil { // requests may come
		return err
	}
	buf := make([]byte, max(s.Request, 256<<10))
	answers := make([]byte, max(s.Answer, 1<<20/s.Answer*s.Answer))
	pending := 0 // bytes of requests that were not answered
	for {
		n, err := c.Read(buf)
		if err != nil {
			return err
		}
		pending += n
		for pending >= s.Request {
			k := min(pending/s.Request, len(answers)/s.Answer)
			if _, err := c.Write(answers[:k*s.Answer]); err != nil {
				return err
			}
			pending -= k * s.Request
		}
	}
}

// stream keeps depth requests in flight on one connection for a duration, and returns what it measured. Payload is what counts of a
// request and its answer together.
func stream(ctx context.Context, address string, s shape, depth, payload int, d time.Duration) (rawResult, error) {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return rawResult{}, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	failed := func(err error) (rawResult, error) {
		return rawResult{}, fmt.Errorf("bare stream: %w", errors.Join(err, ctx.Err()))
	}
	text, err := json.Marshal(s)
	if err != nil {
		return rawResult{}, err
	}
	if _, err := c.Write(append(text, '\n')); err != nil {
		return failed(err)
	}
	buf := make([]byte, max(s.Answer, 256<<10))
	if _, err := io.ReadFull(c, buf[:1]); err != nil {
		return failed(err)
	}
	requests := make([]byte, depth*s.Request)
	started := make([]time.Time, depth) // a ring: answers come in order
	var hist bench.Histogram
	var sent, answered uint64
	// One goroutine does: requests or answers are so small that all in flight fit in the buffers of the connection.
	send := func(n int, now time.Time) error {
		for range n {
			started[sent%uint64(depth)] = now
			sent++
		}
		_, err := c.Write(requests[:n*s.Request])
		return err
	}
	begin, used := time.Now(), ownCPU()
	end := begin.Add(d)
	if err := send(depth, begin); err != nil {
		return failed(err)
	}
	for pending := 0; answered < sent; {
		n, err := c.Read(buf)
		if err != nil {
			return failed(err)
		}
		pending += n
		k := pending / s.Answer
		if k == 0 {
			continue
		}
		pending -= k * s.Answer
		now := time.Now()
		for range k {
			hist.Record(now.Sub(started[answered%uint64(depth)]))
			answered++
		}
		if now.Before(end) {
			if err := send(k, now); err != nil {
				return failed(err)
			}
		}
	}
	return rawResult{Elapsed: time.Since(begin), CPU: ownCPU() - used, Operations: answered, Bytes: answered * uint64(payload), P50: hist.Quantile(0.5), P99: hist.Quantile(0.99)}, nil
}
