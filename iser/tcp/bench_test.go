package tcp_test

import (
	"fmt"
	"io"
	"syscall"
	"testing"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// BenchmarkCommand measures whole commands over loopback against a logical unit in memory. The client is part of the process: its
// share is in cpu-ns/op. It sends prepared PDUs and reads answers without looking at them.
func BenchmarkCommand(b *testing.B) {
	for _, depth := range []int{1, 32} {
		for _, size := range []int{4096, 65536, 262144} {
			for _, kind := range []string{"read", "write"} {
				b.Run(fmt.Sprintf("%s/%dKiB/depth%d", kind, size>>10, depth), func(b *testing.B) { benchmark(b, kind, size, depth) })
			}
		}
	}
}

func benchmark(b *testing.B, kind string, size, depth int) {
	r := newRig(b)
	c := r.ready("InitialR2T=No", "ImmediateData=Yes", "FirstBurstLength=65536", "MaxBurstLength=1048576", "MaxRecvDataSegmentLength=262144")
	blocks := size / 512
	p := pdu.SCSICommand{Final: true, Attr: pdu.AttrSimple, EDTL: uint32(size)}
	out := make([]byte, pdu.HeaderLen, pdu.HeaderLen+size)
	h := (*pdu.Header)(out)
	if kind == "read" {
		p.Read = true
		copy(p.CDB[:], read16(0, blocks))
		p.Encode(h)
	} else {
		p.Write = true
		copy(p.CDB[:], write16(0, blocks))
		p.Encode(h)
		n := min(size, 65536)
		h.SetDataLength(n)
		out = out[:pdu.HeaderLen+n]
	}
	base := c.cmdSN
	issue := func(i int) {
		h[16], h[17], h[18], h[19] = byte(i>>24), byte(i>>16), byte(i>>8), byte(i)
		h.SetCmdSN(base.Add(int32(i)))
		if _, err := c.c.Write(out); err != nil {
			b.Fatal(err)
		}
	}
	var in pdu.Header
	sink := make([]byte, 1<<20)
	rest := make([]byte, pdu.HeaderLen+size)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	cpu := cpuTime()
	b.ResetTimer()
	sent := 0
	for done := 0; done < b.N; {
		for sent < b.N && sent-done < depth {
			issue(sent)
			sent++
		}
		if _, err := io.ReadFull(c.c, in[:]); err != nil {
			b.Fatal(err)
		}
		if n := in.DataLength(); n > 0 {
			if _, err := io.ReadFull(c.c, sink[:n]); err != nil {
				b.Fatal(err)
			}
		}
		switch in.Opcode() {
		case pdu.OpSCSIResponse:
			if in[3] != 0 {
				b.Fatalf("status %#x", in[3])
			}
			done++
		case pdu.OpDataIn:
			if in[1]&1 != 0 {
				done++
			}
		case pdu.OpR2T:
			var t pdu.R2T
			t.Decode(&in)
			d := pdu.DataOut{Final: true, ITT: t.ITT, TTT: t.TTT, Offset: t.Offset}
			dh := (*pdu.Header)(rest)
			d.Encode(dh)
			dh.SetDataLength(int(t.Length))
			if _, err := c.c.Write(rest[:pdu.HeaderLen+int(t.Length)]); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(cpuTime()-cpu)/float64(b.N), "cpu-ns/op")
	c.cmdSN = base.Add(int32(sent))
}

func cpuTime() int64 {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return u.Utime.Nano() + u.Stime.Nano()
}
