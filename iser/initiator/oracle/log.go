package oracle

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// The log is text, one record a line:
//
//	isergate-oracle 1 <volume> <seed> <blocks>
//	S <tick> <seq> <kind> <first> <count> <fua>   submitted
//	A <tick> <seq>                                acknowledged
//	F <tick>                                      flush submitted
//	E <tick> <flush's tick>                       flush ended with GOOD
//	C <tick>                                      crash
//	R <tick>, B <block> <seq> ..., Z <tick>       rebase

const logMagic = "isergate-oracle 1"

// maxLine bounds a line of the log.
const maxLine = 256

// ErrBadLog means that a log is not one of ours, or damaged.
var ErrBadLog = errors.New("oracle: bad log")

// Log writes the history to w from now on; nothing may have been submitted yet. Each record is one Write, done
// before the call that made it returns.
func (h *History) Log(w io.Writer) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.clock != 0 {
		return errors.New("oracle: the history has begun")
	}
	h.log = w
	return h.logLocked("%s %x %d %d\n", logMagic, h.volume, h.seed, h.Blocks())
}

func (h *History) logLocked(format string, args ...any) error {
	if h.log == nil {
		return nil
	}
	if h.logErr == nil {
		if _, err := fmt.Fprintf(h.log, format, args...); err != nil {
			h.logErr = fmt.Errorf("%w: %w", ErrLog, err)
		}
	}
	return h.logErr
}

// Load reads a log back. A last line without its end is ignored, and so is a rebase without its end: the process that wrote
// it died there. The result can be verified, and continued without a log.
func Load(r io.Reader) (*History, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	var h *History
	ops := make(map[uint64]*Op)
	var rebase map[uint64]uint64
	for number := 1; ; number++ {
		line, err := in.ReadSlice('\n')
		if err == io.EOF {
			break
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		if len(line) > maxLine {
			return nil, fmt.Errorf("%w: line %d is too long", ErrBadLog, number)
		}
		fields := bytes.Fields(line)
		if h == nil {
			if h, err = parseHead(fields); err != nil {
				return nil, fmt.Errorf("%w: line %d: %w", ErrBadLog, number, err)
			}
			continue
		}
		if err := h.replay(fields, ops, &rebase); err != nil {
			return nil, fmt.Errorf("%w: line %d: %w", ErrBadLog, number, err)
		}
	}
	if h == nil {
		return nil, fmt.Errorf("%w: it has no first line", ErrBadLog)
	}
	return h, nil
}

var errFields = errors.New("malformed record")

func parseHead(f [][]byte) (*History, error) {
	if len(f) != 5 || string(f[0])+" "+string(f[1]) != logMagic {
		return nil, errors.New("not an oracle log")
	}
	var v Volume
	if hex.DecodedLen(len(f[2])) != len(v) {
		return nil, errFields
	}
	if _, err := hex.Decode(v[:], f[2]); err != nil {
		return nil, errFields
	}
	n, err := numbers(f[3:], 2)
	if err != nil {
		return nil, err
	}
	return NewHistory(v, n[0], n[1])
}

func numbers(f [][]byte, want int) ([]uint64, error) {
	if len(f) != want {
		return nil, errFields
	}
	out := make([]uint64, want)
	for i, s := range f {
		n, err := strconv.ParseUint(string(s), 10, 64)
		if err != nil {
			return nil, errFields
		}
		out[i] = n
	}
	return out, nil
}

// replay applies one record.
func (h *History) replay(f [][]byte, ops map[uint64]*Op, rebase *map[uint64]uint64) error {
	if len(f) == 0 || len(f[0]) != 1 {
		return errFields
	}
	kind := f[0][0]
	if (*rebase != nil) != (kind == 'B' || kind == 'Z') {
		return errFields
	}
	args := f[1:]
	tick := func(n uint64) error {
		if n <= h.clock || n == never {
			return errors.New("the clock goes back")
		}
		h.clock = n
		return nil
	}
	switch kind {
	case 'S':
		if len(args) != 6 {
			return errFields
		}
		fua, err := strconv.ParseBool(string(args[5]))
		if err != nil {
			return errFields
		}
		n, err := numbers(args[:5], 5)
		if err != nil {
			return err
		}
		if n[2] > 255 || n[1] == never {
			return errFields
		}
		if err := tick(n[0]); err != nil {
			return err
		}
		op := &Op{Seq: n[1], Kind: Kind(n[2]), First: n[3], Count: n[4], FUA: fua, submit: n[0], end: never}
		if err := h.submitLocked(op); err != nil {
			return err
		}
		ops[op.Seq] = op
		return nil
	case 'B':
		n, err := numbers(args, 2)
		if err != nil {
			return err
		}
		if n[0] >= h.Blocks() {
			return errFields
		}
		(*rebase)[n[0]] = n[1]
		return nil
	}
	want := 1
	if kind == 'A' || kind == 'E' {
		want = 2
	}
	n, err := numbers(args, want)
	if err != nil {
		return err
	}
	if err := tick(n[0]); err != nil {
		return err
	}
	switch kind {
	case 'A':
		op := ops[n[1]]
		delete(ops, n[1])
		return h.ackLocked(op, n[0])
	case 'F':
		h.flushOpen[n[0]] = n[0]
	case 'E':
		return h.endFlushLocked(n[1])
	case 'C':
		h.crashLocked(n[0])
		clear(ops)
	case 'R':
		if len(h.open) > 0 {
			return errors.New("rebase with open operations")
		}
		*rebase = make(map[uint64]uint64)
	case 'Z':
		for b := range h.ops {
			h.ops[b] = nil
		}
		for b, v := range *rebase {
			h.base[b] = v
		}
		*rebase = nil
	default:
		return errFields
	}
	return nil
}
