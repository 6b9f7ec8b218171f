package main

import (
	"bufio"
	wire "encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

// disk is a disk with a volatile write cache for a virtual machine, served by the NBD protocol (fixed newstyle; commands read, write, flush). A
// write is durable when a flush that came after it was answered. It speaks to one machine at a time.
type disk struct {
	path string // of the socket

	mu     sync.Mutex // guards what follows, and is held by each command
	mem    *vfs.Mem
	file   vfs.File
	conn   net.Conn
	broken error         // a command that should have succeeded
	fuse   int           // writes until the power fails; 0: it does not
	blown  chan struct{} // closed when it has
	// Commands since the last cut.
	writes, flushes, unsynced int
}

const diskFile = "/disk"

// newDisk serves a disk with the content of a file until the test ends.
func newDisk(t *testing.T, image string) *disk {
	t.Helper()
	d := &disk{path: filepath.Join(filepath.Dir(image), "nbd"), mem: vfs.NewMem()}
	src, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if d.file, err = d.mem.OpenFile(diskFile, os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		t.Fatal(err)
	}
	size := int64(0)
	for buf := make([]byte, 1<<20); ; {
		n, err := io.ReadFull(src, buf)
		if n > 0 {
			if _, err := d.file.WriteAt(buf[:n], size); err != nil {
				t.Fatal(err)
			}
			size += int64(n)
		}
		if err != nil {
			break
		}
	}
	if err := errors.Join(d.file.Sync(), d.mem.SyncDir("/")); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", d.path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			d.mu.Lock()
			d.conn = c
			d.mu.Unlock()
			var protocol protocolError
			if err := d.serve(c, size); errors.As(err, &protocol) {
				d.mu.Lock()
				d.broken = err
				d.mu.Unlock()
			}
			c.Close()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		d.mu.Lock()
		if d.conn != nil {
			d.conn.Close()
		}
		d.mu.Unlock()
		<-done
	})
	return d
}

// uri is how qemu calls it.
func (d *disk) uri() string { return "nbd+unix:///?socket=" + d.path }

// protocolError is what the machine should not have said.
type protocolError struct{ what any }

func (e protocolError) Error() string { return fmt.Sprintf("%+v", e.what) }

// arm has the power fail in the middle of the nth write from now on; the channel is closed then.
func (d *disk) arm(n int) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fuse, d.blown = n, make(chan struct{})
	return d.blown
}

// restore is the return of the power: what was not flushed has survived as rng says, in blocks of 4 KiB (ext4 does not bear a torn superblock).
func (d *disk) restore(rng *rand.Rand) (writes, flushes, unsynced int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	writes, flushes, unsynced, err = d.writes, d.flushes, d.unsynced, d.broken
	d.writes, d.flushes, d.unsynced, d.broken = 0, 0, 0, nil
	d.mem = d.mem.CrashClone(rng, vfs.CrashOptions{Whole: true})
	var oerr error
	d.file, oerr = d.mem.OpenFile(diskFile, os.O_RDWR, 0)
	return writes, flushes, unsynced, errors.Join(err, oerr)
}

const (
	nbdOption, nbdRequest, nbdReply         = 0x49484156454f5054, 0x25609513, 0x67446698
	nbdRead, nbdWrite, nbdDisconnect, nbdFl = 0, 1, 2, 3
)

var be = wire.BigEndian

// serve answers one machine.
func (d *disk) serve(c net.Conn, size int64) error {
	in, out := bufio.NewReaderSize(c, 1<<20), bufio.NewWriterSize(c, 1<<20)
	const fixedNewstyle, noZeroes = 1, 2
	fmt.Fprint(out, "NBDMAGICIHAVEOPT")
	if err := errors.Join(wire.Write(out, be, uint16(fixedNewstyle|noZeroes)), out.Flush()); err != nil {
		return err
	}
	if _, err := in.Discard(4); err != nil { // the client's flags
		return err
	}
	for export := false; !export; {
		var option struct {
			Magic           uint64
			Option, DataLen uint32
		}
		if err := wire.Read(in, be, &option); err != nil {
			return err
		}
		if option.Magic != nbdOption {
			return protocolError{option}
		}
		if _, err := in.Discard(int(option.DataLen)); err != nil {
			return err
		}
		reply := func(kind uint32, data ...byte) {
			out.Write(be.AppendUint32(be.AppendUint32(be.AppendUint32(be.AppendUint64(nil, 0x3e889045565a9), option.Option), kind), uint32(len(data))))
			out.Write(data)
		}
		const abort, info, goOn, ack, infoReply, unsupported = 2, 6, 7, 1, 3, 1<<31 | 1
		switch option.Option {
		case info, goOn:
			const hasFlags, sendFlush = 1, 4 // no FUA: the machine flushes in its place
			reply(infoReply, be.AppendUint16(be.AppendUint64([]byte{0, 0}, uint64(size)), hasFlags|sendFlush)...)
			reply(infoReply, be.AppendUint32(be.AppendUint32(be.AppendUint32([]byte{0, 3}, 512), 4096), 1<<25)...)
			reply(ack)
			export = option.Option == goOn
		case abort:
			reply(ack)
			return errors.Join(out.Flush(), io.EOF)
		default:
			reply(unsupported)
		}
		if err := out.Flush(); err != nil {
			return err
		}
	}
	buf := make([]byte, 1<<25)
	for {
		var r struct {
			Magic       uint32
			Flags, Type uint16
			Handle      [8]byte
			Offset      uint64
			Length      uint32
		}
		if err := wire.Read(in, be, &r); err != nil {
			return err
		}
		if r.Magic != nbdRequest || int(r.Length) > len(buf) {
			return protocolError{r}
		}
		data := buf[:r.Length]
		if r.Type == nbdWrite {
			if _, err := io.ReadFull(in, data); err != nil {
				return err
			}
		}
		if r.Type == nbdDisconnect {
			return io.EOF
		}
		status, err := d.command(c, r.Type, data, int64(r.Offset))
		if err != nil {
			return err
		}
		if r.Type != nbdRead {
			data = nil
		}
		out.Write(append(be.AppendUint32(be.AppendUint32(nil, nbdReply), status), r.Handle[:]...))
		out.Write(data)
		if in.Buffered() == 0 {
			if err := out.Flush(); err != nil {
				return err
			}
		}
	}
}

// command does one command of the machine at c, unless its power is off.
func (d *disk) command(c net.Conn, kind uint16, data []byte, off int64) (status uint32, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conn != c {
		return 0, io.EOF
	}
	defer func() {
		if err != nil {
			d.broken = err
		}
	}()
	switch kind {
	case nbdRead:
		_, err = d.file.ReadAt(data, off)
		if errors.Is(err, io.EOF) {
			err = nil
		}
	case nbdWrite:
		_, err = d.file.WriteAt(data, off)
		d.writes++
		d.unsynced++
		if d.fuse--; d.fuse == 0 {
			d.conn = nil
			c.Close()
			close(d.blown)
		}
	case nbdFl:
		err = d.file.SyncData()
		d.flushes++
		d.unsynced = 0
	default:
		return 22, nil // EINVAL
	}
	return 0, err
}
