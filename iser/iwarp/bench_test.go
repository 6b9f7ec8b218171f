package iwarp

import (
	"fmt"
	"io"
	"syscall"
	"testing"

	"github.com/isergate/isergate/iser/rdma"
)

// Both ends are in this process: cpu-ns/op is that of both.

func cpuTime() int64 {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return u.Utime.Nano() + u.Stime.Nano()
}

func measured(b *testing.B, size int, f func()) {
	b.SetBytes(int64(size))
	b.ReportAllocs()
	cpu := cpuTime()
	b.ResetTimer()
	f()
	b.StopTimer()
	b.ReportMetric(float64(cpuTime()-cpu)/float64(b.N), "cpu-ns/op")
}

var benchOptions = []Options{{NoCRC: true}, {}, {NoCRC: true, MaxULPDU: 1442}, {MaxULPDU: 1442}}

func (o Options) benchName() string {
	return fmt.Sprintf("crc=%v,ulpdu=%d", !o.NoCRC, o.MaxULPDU)
}

// BenchmarkPingPong: 128 bytes there and back.
func BenchmarkPingPong(b *testing.B) {
	b.Run("tcp", func(b *testing.B) {
		x, y := overTCP(b)
		defer x.Close()
		defer y.Close()
		go func() {
			buf := make([]byte, 128)
			for {
				if _, err := io.ReadFull(y, buf); err != nil {
					return
				}
				y.Write(buf)
			}
		}()
		buf := make([]byte, 128)
		measured(b, 128, func() {
			for range b.N {
				x.Write(buf)
				io.ReadFull(x, buf)
			}
		})
	})
	for _, o := range benchOptions[:2] {
		b.Run(o.benchName(), func(b *testing.B) {
			i, r := pair(b, overTCP, o, o)
			echo := func(e *end, serve bool, n int) {
				var wc [16]rdma.WC
				recv := []rdma.RecvWR{{SGE: []rdma.SGE{e.sge(0, 4096)}}}
				send := []rdma.SendWR{{Op: rdma.OpSend, SGE: []rdma.SGE{e.sge(8192, 128)}}}
				e.qp.PostRecv(recv)
				if !serve {
					e.qp.PostSend(send)
				}
				for n > 0 {
					k, err := e.cq.Wait(b.Context(), wc[:], false)
					if err != nil {
						b.Error(err)
						return
					}
					for range k {
						n--
						if e.qp.PostRecv(recv); serve || n > 0 {
							e.qp.PostSend(send)
						}
					}
				}
			}
			r.recv(rdma.RecvWR{SGE: []rdma.SGE{r.sge(0, 4096)}})
			done := make(chan struct{})
			measured(b, 128, func() {
				go func() {
					echo(r, true, b.N)
					close(done)
				}()
				echo(i, false, b.N)
				<-done
			})
		})
	}
}

const benchSize, benchDepth = 256 << 10, 8

// BenchmarkStream is the bare TCP stream for comparison.
func BenchmarkStream(b *testing.B) {
	x, y := overTCP(b)
	defer x.Close()
	defer y.Close()
	out, in := make([]byte, benchSize), make([]byte, benchSize)
	done := make(chan struct{})
	measured(b, benchSize, func() {
		go func() {
			for range b.N {
				if _, err := io.ReadFull(y, in); err != nil {
					b.Error(err)
				}
			}
			close(done)
		}()
		for range b.N {
			x.Write(out)
		}
		<-done
	})
}

// BenchmarkWrite: RDMA Writes of 256 KiB, 8 outstanding, each with a Send behind it that the peer receives and answers.
func BenchmarkWrite(b *testing.B) {
	for _, o := range benchOptions {
		b.Run(o.benchName(), func(b *testing.B) {
			i, r := pair(b, overTCP, o, o)
			w := r.bind(0, benchSize, rdma.RemoteWrite)
			stop := make(chan struct{})
			recv := []rdma.RecvWR{{SGE: []rdma.SGE{r.sge(512<<10, 4096)}}}
			for range 2 * benchDepth {
				r.recv(recv...)
			}
			go func() {
				defer close(stop)
				var wc [16]rdma.WC
				answer := []rdma.SendWR{{Op: rdma.OpSend, SGE: []rdma.SGE{r.sge(600<<10, 76)}}}
				for got := 0; got < b.N; {
					k, err := r.cq.Wait(b.Context(), wc[:], false)
					if err != nil {
						b.Error(err)
						return
					}
					for range k {
						got++
						r.qp.PostRecv(recv)
						r.qp.PostSend(answer)
					}
				}
			}()
			back := []rdma.RecvWR{{SGE: []rdma.SGE{i.sge(512<<10, 4096)}}}
			for range 2 * benchDepth {
				i.recv(back...)
			}
			wrs := []rdma.SendWR{
				{Op: rdma.OpWrite, SGE: []rdma.SGE{i.sge(0, benchSize)}, RKey: w.RKey(), RemoteAddr: w.Addr()},
				{Op: rdma.OpSend, SGE: []rdma.SGE{i.sge(600<<10, 76)}},
			}
			measured(b, benchSize, func() {
				var wc [16]rdma.WC
				for sent, done := 0, 0; done < b.N; {
					for sent < b.N && sent-done < benchDepth {
						i.send(wrs...)
						sent++
					}
					k, err := i.cq.Wait(b.Context(), wc[:], false)
					if err != nil {
						b.Fatal(err)
					}
					for range k {
						done++
						i.qp.PostRecv(back)
					}
				}
			})
			<-stop
			if err := w.Close(); err != nil {
				b.Error(err)
			}
		})
	}
}

// BenchmarkRead: RDMA Reads of 256 KiB, 8 outstanding.
func BenchmarkRead(b *testing.B) {
	for _, o := range benchOptions {
		b.Run(o.benchName(), func(b *testing.B) {
			i, r := pair(b, overTCP, o, o)
			w := r.bind(0, benchSize, rdma.RemoteRead)
			wrs := []rdma.SendWR{{Op: rdma.OpRead, Flags: rdma.Signaled, SGE: []rdma.SGE{i.sge(0, benchSize)}, RKey: w.RKey(), RemoteAddr: w.Addr()}}
			measured(b, benchSize, func() {
				var wc [16]rdma.WC
				for sent, done := 0, 0; done < b.N; {
					for sent < b.N && sent-done < benchDepth {
						i.send(wrs...)
						sent++
					}
					k, err := i.cq.Wait(b.Context(), wc[:], false)
					if err != nil {
						b.Fatal(err)
					}
					done += k
				}
			})
			if err := w.Close(); err != nil {
				b.Error(err)
			}
		})
	}
}

// BenchmarkFrames: a response to a read of 4 KiB, an RDMA Write and a Send with Invalidate, from posting to bytes and from bytes to the completion, without sockets.
func BenchmarkFrames(b *testing.B) {
	for _, crc := range []bool{false, true} {
		b.Run(fmt.Sprintf("crc=%v", crc), func(b *testing.B) {
			d := newDomain()
			mem := make([]byte, 64<<10)
			mr, err := d.Register(mem, rdma.LocalWrite)
			if err != nil {
				b.Fatal(err)
			}
			w, err := d.AllocWindow()
			if err != nil {
				b.Fatal(err)
			}
			q := queues{tags: newTagTable()}
			q.recvs.init(4, true)
			q.reads.init(1)
			q.resps.init(1)
			var r receiver
			take(&r)
			r.init(crc, 0, &q)
			r.opened = true
			var s sender
			s.init(crc, false, maxULPDU)
			s.out = getOut()
			data, status := []rdma.SGE{{Buf: mem[8192:12288]}}, []rdma.SGE{{Buf: mem[:commandLen]}}
			recv := []rdma.RecvWR{{SGE: []rdma.SGE{{Buf: mem[4096:8192], LKey: mr.LKey()}}}}
			bind := rdma.Bind{Window: w, MR: mr, Buf: mem[16384:20480], Access: rdma.RemoteWrite}
			var m message
			var e event
			b.SetBytes(4096)
			b.ReportAllocs()
			for b.Loop() {
				key, _, bound, err := q.tags.reserve(&bind, true)
				if err != nil || !bound {
					b.Fatal(bound, err)
				}
				if _, err := q.recvs.post(recv); err != nil {
					b.Fatal(err)
				}
				s.out, s.mark = s.out[:0], 0
				m.cur.reset(data)
				s.start(&m, segment{op: opWrite, tagged: true, stag: key, to: w.Addr()})
				s.whole(&m)
				m.cur.reset(status)
				s.start(&m, segment{op: opSendInvalidate, queue: queueSend, stag: key})
				s.whole(&m)
				r.from, r.to = 0, copy(r.buf, s.out)
				if !r.step(&e) || e.kind != eventReceived || !e.wc.Invalidated {
					b.Fatalf("%+v", e)
				}
				q.recvs.pop()
			}
		})
	}
}
