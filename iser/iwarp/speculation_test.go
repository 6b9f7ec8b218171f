package iwarp

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/isergate/isergate/iser/rdma"
)

// Responses in segments of sizes that change all the time, with other messages in between, in pieces of any size: whatever was guessed of what comes, every
// sink holds what its response carried, and nothing else is written.
func TestGuesses(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 400 {
		m := newMachine(t, true, 0)
		m.q.reads.pop()
		m.q.reads.init(8)
		var stream []byte
		var want, got [][]byte
		var sinks [][]byte
		for k := range 8 {
			size := 1 + rnd.IntN([]int{600, 3000, 40_000}[rnd.IntN(3)])
			mem := make([]byte, size+20)
			a := rnd.IntN(size + 1)
			m.q.reads.push(uint32(k+1), 1000, &sendWQE{sge: []rdma.SGE{{Buf: mem[:a]}, {Buf: mem[a+10 : size+10]}}})
			p := pattern(rnd.Uint64(), make([]byte, size))
			w := make([]byte, size+20)
			copy(w, p[:a])
			copy(w[a+10:], p[a:])
			want, sinks = append(want, w), append(sinks, mem)
			typical := 1 + rnd.IntN(size)
			for at := 0; at < size; {
				n := min(typical, size-at)
				if rnd.IntN(6) == 0 {
					n = 1 + rnd.IntN(size-at)
				}
				if rnd.IntN(10) == 0 {
					stream = append(stream, fpdu(true, segment{op: opWrite, tagged: true, last: true, stag: m.writable, to: m.base}, pattern(1, make([]byte, rnd.IntN(1000))))...)
				}
				stream = append(stream, fpdu(true, segment{op: opReadResponse, tagged: true, stag: uint32(k + 1), to: 1000 + uint64(at), last: at+n == size}, p[at:at+n])...)
				at += n
			}
		}
		max := []int{30, 3000, 200_000}[rnd.IntN(3)]
		for _, e := range m.feed(stream, func() int { return 1 + rnd.IntN(max) }, true) {
			switch e.kind {
			case eventRead:
				got = append(got, sinks[len(got)])
			case eventFault:
				t.Fatalf("after %d of 8 Reads: %v", len(got), e.fault)
			}
		}
		if len(got) != 8 {
			t.Fatalf("%d of 8 Reads are complete", len(got))
		}
		for k := range got {
			if !bytes.Equal(got[k], want[k]) {
				t.Fatalf("Read %d differs", k)
			}
		}
		m.check(t)
	}
}

// Reads whose sinks are the same memory, as those of who throws the bytes away: what is in it is nobody's, but the stream must stay whole.
func TestSinksOverlap(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for _, o := range []Options{{MaxULPDU: 1442}, {MaxULPDU: 8942, NoCRC: true}, {MaxULPDU: 600}} {
		rnd := rand.New(rand.NewPCG(seed, uint64(o.MaxULPDU)))
		i, r := pair(t, overTCP, o, o)
		w := r.bind(0, 64<<10, rdma.RemoteRead)
		pattern(seed, r.buf)
		under := 0
		for range 400 {
			n := 600 + rnd.IntN(12_000)
			at := rnd.IntN(3) * 500
			i.send(rdma.SendWR{Op: rdma.OpRead, Flags: rdma.Signaled, RKey: w.RKey(), RemoteAddr: w.Addr(), SGE: []rdma.SGE{i.sge(at, n/2), i.sge(at+n/4, n-n/2)}})
			if under++; under == 8 {
				i.good(under)
				under = 0
			}
		}
		i.qp.Close()
		r.qp.Close()
		w.Close()
	}
}
