// Command rping speaks the protocol of rdmacm-utils' rping, as server or client, over software iWARP: for manual runs against other
// implementations.
//
//	rping -s 127.0.0.1:7174            and there: rping -c -a HOST -p 7174 -C 10 -S 100000 -V
//	rping -c HOST:7174 -n 10 -size N   and there: rping -s -a HOST -p 7174 -V
//
// The client advertises a source (address 8, key 4, size 4, big-endian), which the server fetches by RDMA Read and acknowledges; then a sink,
// to which the server writes the same bytes by RDMA Write, and acknowledges.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
)

const (
	infoLen = 16
	maxSize = 64 << 20
)

func main() {
	server := flag.String("s", "", "serve one client at a time on `address`")
	client := flag.String("c", "", "ping the server at `address`")
	count := flag.Int("n", 10, "pings")
	size := flag.Int("size", 64, "bytes of a ping")
	pause := flag.Duration("wait", 0, "between the connection and the first ping: Linux's siw, as server, may lose what comes right behind its reply")
	once := flag.Bool("1", false, "serve one client only")
	var o iwarp.Options
	flag.BoolVar(&o.NoCRC, "nocrc", false, "do not ask for CRCs")
	flag.IntVar(&o.Revision, "mpa", 2, "MPA `revision` of the client")
	flag.BoolVar(&o.PeerToPeer, "p2p", false, "peer-to-peer model of the client")
	flag.IntVar(&o.MaxULPDU, "ulpdu", 0, "largest ULPDU")
	flag.Parse()
	if err := run(o, *server, *client, *count, *size, *once, *pause); err != nil {
		fmt.Fprintln(os.Stderr, "rping:", err)
		os.Exit(1)
	}
}

func run(o iwarp.Options, server, client string, count, size int, once bool, pause time.Duration) error {
	p, err := iwarp.New(o)
	if err != nil {
		return err
	}
	ctx := context.Background()
	if client != "" {
		d, err := p.Resolve(ctx, client)
		if err != nil {
			return err
		}
		return ping(ctx, p, d, count, size, pause)
	}
	l, err := p.Listen(ctx, server)
	if err != nil {
		return err
	}
	for {
		r, err := l.Accept(ctx)
		if err != nil {
			return err
		}
		err = serve(ctx, p, r)
		fmt.Println("client", r.RemoteAddr(), "is done:", err)
		if once {
			return err
		}
	}
}

// side is what both ends have.
type side struct {
	ctx context.Context
	cq  rdma.CQ
	qp  rdma.QP
	pd  rdma.PD
	mr  rdma.MR
	mem []byte // infoLen to receive into, infoLen to send, the rest is data
}

func newSide(ctx context.Context, p rdma.Provider, e rdma.Endpoint, size int) (*side, error) {
	s := &side{ctx: ctx, mem: make([]byte, 2*infoLen+size)}
	var err error
	if s.cq, err = p.CreateCQ(64); err != nil {
		return nil, err
	}
	if s.pd, err = p.AllocPD(); err != nil {
		return nil, err
	}
	if s.mr, err = s.pd.Register(s.mem, rdma.LocalWrite); err != nil {
		return nil, err
	}
	if s.qp, err = e.CreateQP(s.pd, rdma.QPAttr{SendCQ: s.cq, RecvCQ: s.cq, MaxSend: 16, MaxRecv: 16}); err != nil {
		return nil, err
	}
	return s, s.post()
}

func (s *side) sge(from, to int) []rdma.SGE {
	return []rdma.SGE{{Buf: s.mem[from:to], LKey: s.mr.LKey()}}
}

func (s *side) post() error {
	_, err := s.qp.PostRecv([]rdma.RecvWR{{SGE: s.sge(0, infoLen)}})
	return err
}

// wait returns when something of a kind is complete.
func (s *side) wait(op rdma.Opcode) error {
	var wc [1]rdma.WC
	if _, err := s.cq.Wait(s.ctx, wc[:], false); err != nil {
		return err
	}
	if wc[0].Status != rdma.StatusSuccess || wc[0].Op != op {
		return fmt.Errorf("%v: %v: %w", wc[0].Op, wc[0].Status, s.qp.Err())
	}
	return nil
}

func (s *side) do(wrs ...rdma.SendWR) error {
	_, err := s.qp.PostSend(wrs)
	return err
}

func (s *side) advertise(addr uint64, key uint32, size int) error {
	b := s.mem[infoLen : 2*infoLen]
	binary.BigEndian.PutUint64(b, addr)
	binary.BigEndian.PutUint32(b[8:], key)
	binary.BigEndian.PutUint32(b[12:], uint32(size))
	return s.do(rdma.SendWR{Op: rdma.OpSend, SGE: s.sge(infoLen, 2*infoLen)})
}

// received waits for the peer's next advertisement, or acknowledgement.
func (s *side) received() (addr uint64, key uint32, size int, err error) {
	if err := s.wait(rdma.OpRecv); err != nil {
		return 0, 0, 0, err
	}
	b := s.mem[:infoLen]
	addr, key, size = binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:]), int(binary.BigEndian.Uint32(b[12:]))
	return addr, key, size, s.post()
}

func serve(ctx context.Context, p *iwarp.Provider, r rdma.Request) error {
	s, err := newSide(ctx, p, r, maxSize)
	if err != nil {
		return err
	}
	defer s.qp.Close()
	peer := r.Peer()
	fmt.Printf("client %v: IRD %d, ORD %d, private data %x\n", r.RemoteAddr(), peer.IRD, peer.ORD, peer.PrivateData)
	if err := r.Accept(ctx, rdma.ConnParams{IRD: 16, ORD: 16}); err != nil {
		return err
	}
	for pings := 0; ; pings++ {
		addr, key, size, err := s.received()
		if err != nil {
			fmt.Println(pings, "pings")
			if errors.Is(err, rdma.ErrPeerClosed) {
				return nil
			}
			return err
		}
		if size > maxSize {
			return fmt.Errorf("ping of %d bytes", size)
		}
		data := s.sge(2*infoLen, 2*infoLen+size)
		if err := s.do(rdma.SendWR{Op: rdma.OpRead, Flags: rdma.Signaled, SGE: data, RKey: key, RemoteAddr: addr}); err != nil {
			return err
		}
		if err := s.wait(rdma.OpRead); err != nil {
			return err
		}
		if err := s.advertise(0, 0, 0); err != nil {
			return err
		}
		if addr, key, _, err = s.received(); err != nil {
			return err
		}
		if err := s.do(rdma.SendWR{Op: rdma.OpWrite, SGE: data, RKey: key, RemoteAddr: addr}); err != nil {
			return err
		}
		if err := s.advertise(0, 0, 0); err != nil {
			return err
		}
	}
}

func ping(ctx context.Context, p *iwarp.Provider, d rdma.Dialer, count, size int, pause time.Duration) error {
	s, err := newSide(ctx, p, d, 2*size)
	if err != nil {
		return err
	}
	defer s.qp.Close()
	peer, err := d.Connect(ctx, rdma.ConnParams{IRD: 16, ORD: 16})
	if err != nil {
		return err
	}
	ird, ord := s.qp.Depth()
	fmt.Printf("server %v: IRD %d, ORD %d; agreed on %d, %d\n", d.RemoteAddr(), peer.IRD, peer.ORD, ird, ord)
	source, sink := s.mem[2*infoLen:2*infoLen+size], s.mem[2*infoLen+size:]
	time.Sleep(pause)
	begin := time.Now()
	for n := range count {
		for i := range source {
			source[i] = byte('A' + (n+i)%58)
		}
		source[size-1] = 0 // rping writes back as far as strlen says
		clear(sink)
		var windows [2]rdma.Window
		for i, b := range []rdma.Bind{{Buf: source, Access: rdma.RemoteRead}, {Buf: sink, Access: rdma.RemoteWrite}} {
			if windows[i], err = s.pd.AllocWindow(); err != nil {
				return err
			}
			defer windows[i].Close()
			b.Window, b.MR = windows[i], s.mr
			if err := s.do(rdma.SendWR{Op: rdma.OpBind, Bind: b}); err != nil {
				return err
			}
		}
		for _, w := range windows {
			if err := s.advertise(w.Addr(), w.RKey(), size); err != nil {
				return err
			}
			if _, _, _, err := s.received(); err != nil {
				return err
			}
			if err := s.do(rdma.SendWR{Op: rdma.OpLocalInvalidate, RKey: w.RKey()}); err != nil {
				return err
			}
		}
		if !bytes.Equal(source, sink) {
			return fmt.Errorf("ping %d: the bytes differ", n)
		}
	}
	fmt.Printf("%d pings of %d bytes in %v\n", count, size, time.Since(begin))
	return nil
}
