package scsitest

import (
	"context"
	"fmt"
)

// Data is a scsi.Data whose bytes are in memory. It checks that offsets ascend without
// gaps, and panics where a logical unit breaks that.
type Data struct {
	Out []byte // what the initiator sends
	In  []byte // what it receives: as long as it declared; Got of it are filled

	Got      int   // bytes of In that were filled
	Received int64 // bytes of Out that were asked for
	Sent     int64 // bytes of data-in, the dropped ones included

	Err error // if set, every transfer fails with it
}

// NewData declares out to be sent and in bytes to be received.
func NewData(out []byte, in int) *Data { return &Data{Out: out, In: make([]byte, in)} }

// OutLength implements scsi.Data.
func (d *Data) OutLength() int64 { return int64(len(d.Out)) }

// InLength implements scsi.Data.
func (d *Data) InLength() int64 { return int64(len(d.In)) }

// Receive implements scsi.Data.
func (d *Data) Receive(ctx context.Context, into [][]byte, off int64) error {
	if err := d.check(ctx, off, d.Received); err != nil {
		return err
	}
	for _, b := range into {
		if off+int64(len(b)) > int64(len(d.Out)) {
			panic(fmt.Sprintf("scsitest: data-out of %d bytes read to %d", len(d.Out), off+int64(len(b))))
		}
		copy(b, d.Out[off:])
		off += int64(len(b))
	}
	d.Received = off
	return nil
}

// Send implements scsi.Data.
func (d *Data) Send(ctx context.Context, from [][]byte, off int64) error {
	if err := d.check(ctx, off, d.Sent); err != nil {
		return err
	}
	for _, b := range from {
		if off < int64(len(d.In)) {
			d.Got += copy(d.In[off:], b)
		}
		off += int64(len(b))
	}
	d.Sent = off
	return nil
}

func (d *Data) check(ctx context.Context, off, next int64) error {
	if off != next {
		panic(fmt.Sprintf("scsitest: offset %d, but %d was due", off, next))
	}
	if d.Err != nil {
		return d.Err
	}
	return ctx.Err()
}

// Reset makes d usable for another command with the same lengths.
func (d *Data) Reset() { d.Got, d.Received, d.Sent = 0, 0, 0 }
