package tcp_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
)

// Writes and reads of all sizes, by every way that data can take, with and without digests.
func TestTransfers(t *testing.T) {
	for _, digests := range []string{"None", "CRC32C"} {
		for _, keys := range [][]string{
			{"InitialR2T=Yes", "ImmediateData=No"},
			{"InitialR2T=Yes", "ImmediateData=Yes", "FirstBurstLength=4096"},
			{"InitialR2T=No", "ImmediateData=Yes", "FirstBurstLength=16384", "MaxBurstLength=32768", "MaxOutstandingR2T=4"},
			{"InitialR2T=No", "ImmediateData=No", "FirstBurstLength=16384", "MaxBurstLength=20480"},
			{"InitialR2T=No", "ImmediateData=Yes", "MaxRecvDataSegmentLength=262144"},
		} {
			t.Run(fmt.Sprint(digests, keys), func(t *testing.T) {
				r := newRig(t)
				c := r.ready(append(keys, "HeaderDigest="+digests, "DataDigest="+digests)...)
				first := 65536
				if v, ok := c.keys.Get("FirstBurstLength"); ok {
					fmt.Sscan(v, &first)
				}
				immediate := false
				if v, _ := c.keys.Get("ImmediateData"); v == "Yes" {
					immediate = true
				}
				r2t, _ := c.keys.Get("InitialR2T")
				for i, blocks := range []int{1, 2, 8, 33, 128, 300, 1024} {
					out := pattern(i, blocks*512)
					n := 0
					if immediate {
						n = min(len(out), first, 8192)
					}
					unsolicited := min(len(out), first)
					follows := r2t == "No" && n < unsolicited
					itt := c.command(write16(i*8, blocks), 0, out, n, func(p *pdu.SCSICommand) { p.Final = !follows })
					if follows {
						c.dataOut(itt, pdu.ReservedTag, n, out[n:unsolicited], 5000)
					} else {
						unsolicited = n
					}
					if res := c.finish(itt, out); res.status != scsi.Good || res.residual != 0 {
						t.Fatalf("write of %d blocks: %+v", blocks, res)
					} else if unsolicited == len(out) && res.r2ts != 0 || unsolicited < len(out) && res.r2ts == 0 {
						t.Errorf("write of %d blocks: %d R2Ts", blocks, res.r2ts)
					}
					if res := c.good(read16(i*8, blocks), len(out), nil); !bytes.Equal(res.data, out) {
						t.Fatalf("read of %d blocks differs", blocks)
					} else if digests == "None" && len(out) <= 8192 && !res.collapsed {
						t.Errorf("the status of a read of %d blocks came alone", blocks)
					}
				}
			})
		}
	}
}

// ISCSI-50, ISCSI-51, ISCSI-54, ISCSI-47, ISCSI-48: what is wrong with Data-Out, and what becomes of the task.
func TestDataOutFaults(t *testing.T) {
	const unexpected, amount, crc = 0x0c0c, 0x0c0d, 0x4705
	out := pattern(1, 16384)
	send := func(c *client, itt, ttt pdu.TaskTag, sn, off int, final bool, data []byte, change ...func(*pdu.DataOut)) {
		d := pdu.DataOut{Final: final, ITT: itt, TTT: ttt, DataSN: pdu.Serial(sn), Offset: uint32(off)}
		for _, f := range change {
			f(&d)
		}
		var h pdu.Header
		d.Encode(&h)
		c.write(&h, data)
	}
	tests := []struct {
		name string
		keys []string
		run  func(t *testing.T, c *client) result
		asc  int
	}{
		{"immediate data where there is none", []string{"ImmediateData=No"}, func(t *testing.T, c *client) result {
			return c.finish(c.command(write16(0, 32), 0, out, 512), out)
		}, unexpected},
		{"unsolicited Data-Out where there is none", []string{"InitialR2T=Yes"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0, func(p *pdu.SCSICommand) { p.Final = false })
			c.dataOut(itt, pdu.ReservedTag, 0, out, 8192)
			return c.finish(itt, out)
		}, unexpected},
		{"data with a read", nil, func(t *testing.T, c *client) result {
			p := pdu.SCSICommand{Final: true, Read: true, EDTL: 512, ITT: c.tag(), CmdSN: c.sn()}
			copy(p.CDB[:], read16(0, 1))
			var h pdu.Header
			p.Encode(&h)
			c.write(&h, out[:512])
			res := c.finish(p.ITT, nil)
			return res
		}, unexpected},
		{"too much immediate data", []string{"FirstBurstLength=512"}, func(t *testing.T, c *client) result {
			return c.finish(c.command(write16(0, 32), 0, out, 1024), out)
		}, amount},
		{"too little unsolicited data", []string{"InitialR2T=No", "FirstBurstLength=8192"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0, func(p *pdu.SCSICommand) { p.Final = false })
			c.dataOut(itt, pdu.ReservedTag, 0, out[:4096], 4096)
			return c.finish(itt, out)
		}, amount},
		{"too much unsolicited data", []string{"InitialR2T=No", "FirstBurstLength=8192"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0, func(p *pdu.SCSICommand) { p.Final = false })
			c.dataOut(itt, pdu.ReservedTag, 0, out[:12288], 4096)
			return c.finish(itt, out)
		}, amount},
		{"unsolicited DataSN", []string{"InitialR2T=No"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0, func(p *pdu.SCSICommand) { p.Final = false })
			send(c, itt, pdu.ReservedTag, 0, 0, false, out[:8192])
			send(c, itt, pdu.ReservedTag, 0, 8192, true, out[8192:])
			c.reject(pdu.RejectProtocolError)
			return c.finish(itt, out)
		}, crc},
		{"unsolicited offset", []string{"InitialR2T=No"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0, func(p *pdu.SCSICommand) { p.Final = false })
			send(c, itt, pdu.ReservedTag, 0, 512, true, out[512:])
			c.reject(pdu.RejectProtocolError)
			return c.finish(itt, out)
		}, crc},
		{"solicited DataSN", []string{"ImmediateData=No"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0)
			h, _ := c.read()
			send(c, itt, h.TTT(), 1, 0, true, out)
			c.reject(pdu.RejectProtocolError)
			return c.finish(itt, out)
		}, crc},
		{"solicited offset", []string{"ImmediateData=No"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0)
			h, _ := c.read()
			send(c, itt, h.TTT(), 0, 512, true, out[512:])
			c.reject(pdu.RejectProtocolError)
			return c.finish(itt, out)
		}, crc},
		{"more than the R2T asked for", []string{"ImmediateData=No"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0)
			h, _ := c.read()
			send(c, itt, h.TTT(), 0, 0, true, append(out, 1, 2, 3, 4))
			c.reject(pdu.RejectProtocolError)
			return c.finish(itt, out)
		}, amount},
		{"less than the R2T asked for", []string{"ImmediateData=No"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0)
			h, _ := c.read()
			send(c, itt, h.TTT(), 0, 0, true, out[:512])
			c.reject(pdu.RejectProtocolError)
			return c.finish(itt, out)
		}, amount},
		{"another task's tag, then the right one", []string{"ImmediateData=No"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0)
			h, _ := c.read()
			send(c, itt+100, h.TTT(), 0, 0, true, out)
			c.reject(pdu.RejectInvalidField)
			send(c, itt, h.TTT(), 0, 0, true, out, func(d *pdu.DataOut) { d.LUN = pdu.LUNOf(1) })
			c.reject(pdu.RejectInvalidField)
			send(c, itt, h.TTT()+1000, 0, 0, true, out)
			c.reject(pdu.RejectInvalidField)
			send(c, itt, h.TTT(), 0, 0, true, out)
			return c.finish(itt, out)
		}, 0},
		{"ISCSI-58 empty segments", []string{"ImmediateData=No"}, func(t *testing.T, c *client) result {
			itt := c.command(write16(0, 32), 0, out, 0)
			h, _ := c.read()
			send(c, itt, h.TTT(), 0, 0, false, nil)
			send(c, itt, h.TTT(), 1, 0, false, out[:100])
			send(c, itt, h.TTT(), 2, 100, true, out[100:])
			return c.finish(itt, out)
		}, 0},
		{"ISCSI-54 the status waits for the last Data-Out", []string{"InitialR2T=No"}, func(t *testing.T, c *client) result {
			// WRITE beyond the end fails at once; its data is still on its way.
			itt := c.command(write16(1<<40, 32), 0, out, 0, func(p *pdu.SCSICommand) { p.Final = false })
			send(c, itt, pdu.ReservedTag, 0, 0, false, out[:8192])
			c.ping() // nothing else comes before
			send(c, itt, pdu.ReservedTag, 1, 8192, true, out[8192:])
			return c.finish(itt, out)
		}, 0x2100},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			c := r.ready(tt.keys...)
			res := tt.run(t, c)
			if tt.asc == 0 {
				if res.status != scsi.Good || !bytes.Equal(r.medium.Bytes()[:len(out)], out) {
					t.Errorf("status %#x, sense %x", res.status, res.sense)
				}
			} else {
				if k := res.key(); res.status != scsi.CheckCondition || int(k[1])<<8|int(k[2]) != tt.asc {
					t.Errorf("status %#x, sense %x; want ASC %04x", res.status, res.sense, tt.asc)
				}
				if n := bytes.Count(r.medium.Bytes(), []byte{0}); n != len(r.medium.Bytes()) {
					t.Error("something was written")
				}
			}
			c.ping()
			if in := c.good(read16(0, 1), 512, nil); in.status != scsi.Good {
				t.Error("the session is broken")
			}
		})
	}
}

// ISCSI-81: a data digest error is a Reject and then 0B/47/05; a header digest error closes the connection.
func TestDigestErrors(t *testing.T) {
	out := pattern(1, 16384)
	digests := []string{"HeaderDigest=CRC32C", "DataDigest=CRC32C", "InitialR2T=No"}
	fails := func(t *testing.T, c *client, itt pdu.TaskTag) {
		t.Helper()
		res := c.finish(itt, out)
		if res.status != scsi.CheckCondition || res.key() != [3]byte{0x0b, 0x47, 0x05} {
			t.Errorf("status %#x, sense %x", res.status, res.sense)
		}
		c.ping()
	}
	command := func(c *client, final bool) (pdu.Header, pdu.TaskTag) {
		p := pdu.SCSICommand{Final: final, Write: true, EDTL: uint32(len(out)), ITT: c.tag(), CmdSN: c.sn()}
		copy(p.CDB[:], write16(0, 32))
		var h pdu.Header
		p.Encode(&h)
		return h, p.ITT
	}
	t.Run("immediate data", func(t *testing.T) {
		c := newRig(t).ready(digests...)
		h, itt := command(c, true)
		c.writeDamaged(&h, out[:512], 0, 1)
		c.reject(pdu.RejectDataDigest)
		fails(t, c, itt)
	})
	t.Run("unsolicited", func(t *testing.T) {
		c := newRig(t).ready(digests...)
		h, itt := command(c, false)
		c.write(&h, nil)
		d := pdu.DataOut{ITT: itt, TTT: pdu.ReservedTag}
		d.Encode(&h)
		c.writeDamaged(&h, out[:8192], 0, 1)
		c.reject(pdu.RejectDataDigest)
		c.ping() // the rest is still expected
		d = pdu.DataOut{Final: true, ITT: itt, TTT: pdu.ReservedTag, DataSN: 1, Offset: 8192}
		d.Encode(&h)
		c.write(&h, out[8192:])
		fails(t, c, itt)
	})
	t.Run("solicited", func(t *testing.T) {
		c := newRig(t).ready(digests...)
		h, itt := command(c, true)
		c.write(&h, nil)
		r2t, _ := c.read()
		d := pdu.DataOut{Final: true, ITT: itt, TTT: r2t.TTT()}
		d.Encode(&h)
		c.writeDamaged(&h, out, 0, 1)
		c.reject(pdu.RejectDataDigest)
		fails(t, c, itt)
	})
	t.Run("ping", func(t *testing.T) {
		c := newRig(t).ready(digests...)
		p := pdu.NopOut{Immediate: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.cmdSN}
		var h pdu.Header
		p.Encode(&h)
		c.writeDamaged(&h, []byte("x"), 0, 1)
		c.reject(pdu.RejectDataDigest)
		c.ping()
	})
	t.Run("header", func(t *testing.T) {
		c := newRig(t).ready(digests...)
		h, _ := command(c, true)
		c.writeDamaged(&h, nil, 1, 0)
		c.closed()
	})
}

// ISCSI-55.
func TestResiduals(t *testing.T) {
	c := newRig(t).ready()
	for _, tt := range []struct {
		name        string
		cdb         []byte
		edtl        int
		over, under bool
		residual    uint32
		data        int
	}{
		{"exact", read16(0, 4), 2048, false, false, 0, 2048},
		{"underflow", read16(0, 4), 4096, false, true, 2048, 2048},
		{"overflow", read16(0, 4), 1000, true, false, 1048, 1000},
		{"allocation length is no overflow", []byte{0x12, 0, 0, 0, 36}, 255, false, true, 219, 36},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c.t = t
			res := c.good(tt.cdb, tt.edtl, nil)
			if res.over != tt.over || res.under != tt.under || res.residual != tt.residual || len(res.data) != tt.data {
				t.Errorf("%+v", res)
			}
		})
	}
	t.Run("no data expected", func(t *testing.T) {
		c.t = t
		res := c.good(read16(0, 1), 0, nil)
		if !res.over || res.residual != 512 || len(res.data) != 0 {
			t.Errorf("%+v", res)
		}
	})
}

// Data-In keeps to the initiator's MaxRecvDataSegmentLength and to MaxBurstLength (ISCSI-53).
func TestDataInSequences(t *testing.T) {
	c := newRig(t).ready("MaxRecvDataSegmentLength=4096", "MaxBurstLength=10240")
	itt := c.command(read16(0, 64), 32768, nil, 0)
	burst := 0
	for {
		h, data := c.read()
		var d pdu.DataIn
		if err := d.Decode(&h); err != nil {
			t.Fatal(err)
		}
		if d.ITT != itt || len(data) > 4096 {
			t.Fatalf("%d bytes", len(data))
		}
		if burst += len(data); burst > 10240 {
			t.Fatal("sequence is too long")
		}
		if (burst == 10240 || d.HasStatus) != d.Final {
			t.Errorf("F=%v after %d bytes", d.Final, burst)
		}
		if d.Final {
			burst = 0
		}
		if d.HasStatus {
			return
		}
	}
}

// Many commands at once, of random kinds and sizes, with commands aborted in between. The medium holds
// in the end what was acknowledged last.
func TestRandomLoad(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	r := newRig(t, func(r *rig, o *iscsi.Options) { o.MaxBurstLength = 65536 })
	c := r.ready("InitialR2T=No", "FirstBurstLength=8192", "MaxBurstLength=16384", "MaxOutstandingR2T=3", "DataDigest=CRC32C", "MaxRecvDataSegmentLength=16384")
	type job struct {
		out   []byte
		lba   int
		read  int
		got   []byte
		abort bool
	}
	image := make([]byte, len(r.medium.Bytes()))
	jobs := map[pdu.TaskTag]*job{}
	aborts := map[pdu.TaskTag]pdu.TaskTag{} // function → task
	slots := make([]bool, 32)               // 64 KiB each, one write at a time
	start := func() {
		slot := rnd.IntN(len(slots))
		if slots[slot] {
			return
		}
		slots[slot] = true
		blocks := 1 + rnd.IntN(128)
		j := &job{lba: slot * 128}
		var itt pdu.TaskTag
		if rnd.IntN(2) == 0 {
			j.read = blocks * 512
			itt = c.command(read16(j.lba, blocks), j.read, nil, 0)
		} else {
			j.out = pattern(rnd.IntN(1<<30), blocks*512)
			n := rnd.IntN(min(len(j.out), 8192) + 1)
			first := min(len(j.out), 8192)
			follows := n < first && rnd.IntN(2) == 0
			itt = c.command(write16(j.lba, blocks), 0, j.out, n, func(p *pdu.SCSICommand) { p.Final = !follows })
			if follows {
				c.dataOut(itt, pdu.ReservedTag, n, j.out[n:first], 1+rnd.IntN(8192))
			}
		}
		jobs[itt] = j
		if j.read > 0 && rnd.IntN(20) == 0 {
			j.abort = true
			aborts[c.manage(pdu.AbortTask, itt, func(p *pdu.TaskRequest) { p.RefCmdSN = c.cmdSN - 1 })] = itt
		}
	}
	end := func(itt pdu.TaskTag, status scsi.Status) {
		j := jobs[itt]
		if j == nil {
			t.Fatalf("status for an unknown task %#x", itt)
		}
		if status != scsi.Good {
			t.Fatalf("status %#x", status)
		}
		if j.out != nil {
			copy(image[j.lba*512:], j.out)
		} else if !bytes.Equal(j.got, image[j.lba*512:j.lba*512+j.read]) {
			t.Fatal("read differs")
		}
		slots[j.lba/128] = false
		delete(jobs, itt)
	}
	for done := 0; done < 2000 || len(jobs) > 0 || len(aborts) > 0; done++ {
		for done < 2000 && len(jobs) < 16 {
			start()
		}
		h, data := c.read()
		itt := h.ITT()
		switch h.Opcode() {
		case pdu.OpR2T:
			var p pdu.R2T
			p.Decode(&h)
			c.dataOut(itt, p.TTT, int(p.Offset), jobs[itt].out[p.Offset:p.Offset+p.Length], 1+rnd.IntN(16384))
		case pdu.OpDataIn:
			jobs[itt].got = append(jobs[itt].got, data...)
			if h[1]&1 != 0 {
				end(itt, scsi.Status(h[3]))
			}
		case pdu.OpSCSIResponse:
			end(itt, scsi.Status(h[3]))
		case pdu.OpTaskResponse:
			task := aborts[itt]
			delete(aborts, itt)
			j, running := jobs[task]
			switch complete := h[2] == byte(pdu.FunctionComplete); {
			case complete && running:
				slots[j.lba/128] = false
				delete(jobs, task)
			case complete || running: // both a status and function complete, or neither
				t.Fatalf("ISCSI-60: response %d, running %v", h[2], running)
			}
		default:
			t.Fatalf("%v", h.Opcode())
		}
	}
	if !bytes.Equal(image, r.medium.Bytes()) {
		t.Error("the medium differs")
	}
}

// The buffers of the logical unit are not touched after a task was aborted, although its data is on its way.
func TestAbortWhileDataLands(t *testing.T) {
	r := newRig(t)
	c := r.ready("ImmediateData=No")
	out := pattern(3, 65536)
	itt := c.command(write16(0, 128), 0, out, 0)
	h, _ := c.read()
	if h.Opcode() != pdu.OpR2T {
		t.Fatal(h.Opcode())
	}
	// Half of a Data-Out, then nothing: the reader is in the middle of the landing.
	d := pdu.DataOut{Final: true, ITT: itt, TTT: h.TTT()}
	var dh pdu.Header
	d.Encode(&dh)
	dh.SetDataLength(len(out))
	c.c.Write(dh[:])
	c.c.Write(out[:40000])
	// Another session resets the unit. It gets its answer although the first initiator stays silent.
	c2 := r.dial()
	c2.isid[5] = 9
	c2.login()
	c2.tur()
	if res := c2.managed(c2.manage(pdu.LogicalUnitReset, pdu.ReservedTag)); res.Response != pdu.FunctionComplete {
		t.Fatal(res.Response)
	}
	if r.medium.Open() != 0 {
		t.Error("the landing is still open")
	}
	c.c.Write(out[40000:])
	res := c.finish(itt, out)
	if res.status != scsi.TaskAborted {
		t.Errorf("status %#x", res.status)
	}
	c.ping()
	if bytes.Count(r.medium.Bytes(), []byte{0}) != len(r.medium.Bytes()) {
		t.Error("something was written")
	}
}

// A connection that breaks in the middle of a Data-Out writes nothing.
func TestBrokenInTheMiddle(t *testing.T) {
	r := newRig(t)
	for _, keys := range [][]string{{"ImmediateData=No"}, {"InitialR2T=No"}} {
		c := r.ready(append(keys, "DefaultTime2Retain=0")...)
		out := pattern(3, 32768)
		unsolicited := keys[0] == "InitialR2T=No"
		itt := c.command(write16(0, 64), 0, out, 0, func(p *pdu.SCSICommand) { p.Final = !unsolicited })
		ttt := pdu.ReservedTag
		if !unsolicited {
			h, _ := c.read()
			ttt = h.TTT()
		}
		d := pdu.DataOut{Final: true, ITT: itt, TTT: ttt}
		var h pdu.Header
		d.Encode(&h)
		h.SetDataLength(len(out))
		c.c.Write(h[:])
		c.c.Write(out[:30000])
		c.c.Close()
		await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 0 })
		if bytes.Count(r.medium.Bytes(), []byte{0}) != len(r.medium.Bytes()) {
			t.Error("something was written")
		}
	}
}

// Unsolicited data that is in the middle of its way when the logical unit asks for it lands in the right place.
func TestUnsolicitedDataIsCutAnywhere(t *testing.T) {
	r := newRig(t)
	c := r.ready("InitialR2T=No", "FirstBurstLength=32768")
	other := r.dial()
	other.isid[5] = 8
	other.login()
	for i := range 200 {
		out := pattern(i, 32768)
		itt := c.command(write16(0, 64), 0, out, 512*(i%3), func(p *pdu.SCSICommand) { p.Final = false })
		off := 512 * (i % 3)
		for sn := 0; off < len(out); sn++ {
			n := min(9000, len(out)-off)
			d := pdu.DataOut{Final: off+n == len(out), ITT: itt, TTT: pdu.ReservedTag, DataSN: pdu.Serial(sn), Offset: uint32(off)}
			var h pdu.Header
			d.Encode(&h)
			h.SetDataLength(n)
			b := append(append(h[:], out[off:off+n]...), make([]byte, pdu.Padding(n))...)
			cut := 1 + (i*331+sn*1777)%(len(b)-1)
			c.c.Write(b[:cut])
			other.ping() // gives the target time
			c.c.Write(b[cut:])
			off += n
		}
		if res := c.finish(itt, out); res.status != scsi.Good {
			t.Fatalf("%d: status %#x, sense %x", i, res.status, res.sense)
		}
		if !bytes.Equal(r.medium.Bytes()[:len(out)], out) {
			t.Fatalf("%d: the medium differs", i)
		}
	}
}
