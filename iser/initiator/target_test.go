package initiator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser/initiator/internal/target"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// own is a way to reach our own target.
type own struct {
	*target.Server
	iser *ISER // nil: TCP
}

// ownOptions log in to our own target.
func ownOptions(srv own) Options {
	return Options{Portal: srv.Portal, InitiatorName: testInitiator, TargetName: target.Name, ISER: srv.iser}
}

// starter starts our own target on a portal that serves both transports.
type starter func(t testing.TB, o iscsi.Options, chap *iscsi.CHAP, blocks uint64, blockSize uint32) own

// overAll runs a test over TCP, and over iSER with both ways to log in.
func overAll(t *testing.T, test func(t *testing.T, start starter)) {
	for _, way := range []struct {
		name string
		iser *ISER
	}{{"tcp", nil}, {"iser", &ISER{}}, {"stream", &ISER{Stream: true}}} {
		t.Run(way.name, func(t *testing.T) {
			test(t, func(t testing.TB, o iscsi.Options, chap *iscsi.CHAP, blocks uint64, blockSize uint32) own {
				t.Helper()
				m, err := arena.New(32 << 20)
				if err != nil {
					t.Fatal(err)
				}
				srv := target.StartBoth(t, o, m, chap, blocks, blockSize)
				return own{srv, way.iser}
			})
		})
	}
}

func TestOwnDiscovery(t *testing.T) { overAll(t, testOwnDiscovery) }

func testOwnDiscovery(t *testing.T, start starter) {
	srv := start(t, iscsi.Options{}, nil, 1024, 512)
	found, err := Discover(testContext(t), srv.Portal, Options{InitiatorName: testInitiator})
	if err != nil || len(found) != 2 {
		t.Fatalf("%+v, %v", found, err)
	}
	for _, f := range found {
		if (f.Name != target.Name && f.Name != target.OtherName) || len(f.Portals) != 1 || f.Portals[0].Address != srv.Portal || f.Portals[0].PortalGroup < 0 {
			t.Errorf("%+v", f)
		}
	}
}

func TestOwnCHAP(t *testing.T) { overAll(t, testOwnCHAP) }

func testOwnCHAP(t *testing.T, start starter) {
	srv := start(t, iscsi.Options{}, &iscsi.CHAP{User: "me", Secret: []byte("a-forward-secret"), MutualUser: "you", MutualSecret: []byte("a-reverse-secret")}, 1024, 512)
	o := ownOptions(srv)
	o.TargetName = target.OtherName
	for _, a := range []CHAPAlgorithm{CHAPMD5, CHAPSHA256} {
		for _, reverse := range []string{"", "a-reverse-secret"} {
			o.CHAP = &CHAP{User: "me", Secret: "a-forward-secret", TargetSecret: reverse, Algorithms: []CHAPAlgorithm{a}}
			if reverse != "" {
				o.CHAP.TargetUser = "you"
			}
			s := mustDial(t, o)
			if _, err := s.OpenLUN(testContext(t), target.LUN); err != nil {
				t.Errorf("algorithm %d, reverse secret %q: %v", a, reverse, err)
			}
		}
	}
	var refused *LoginError
	for name, c := range map[string]*CHAP{
		"wrong secret": {User: "me", Secret: "another-secret!!"},
		"wrong user":   {User: "you", Secret: "a-forward-secret"},
		"none":         nil,
		"SHA-1":        {User: "me", Secret: "a-forward-secret", Algorithms: []CHAPAlgorithm{CHAPSHA1}},
	} {
		o.CHAP = c
		if _, err := Dial(testContext(t), o); !errors.As(err, &refused) || refused.Status != pdu.LoginAuthFailure {
			t.Errorf("%s: %v", name, err)
		}
	}
	o.CHAP = &CHAP{User: "me", Secret: "a-forward-secret", TargetSecret: "not-its-secret"}
	if _, err := Dial(testContext(t), o); !errors.Is(err, ErrAuth) {
		t.Errorf("a target that cannot prove itself: %v", err)
	}
	o.TargetName = "iqn.2026-01.com.example:nothing"
	if _, err := Dial(testContext(t), o); !errors.As(err, &refused) || refused.Status != pdu.LoginNotFound {
		t.Errorf("unknown target: %v", err)
	}
}

// Every negotiated shape of a transfer moves the same bytes.
func TestOwnData(t *testing.T) { overAll(t, testOwnData) }

func testOwnData(t *testing.T, start starter) {
	r := seeded(t)
	for _, block := range []uint32{512, 4096} {
		srv := start(t, iscsi.Options{QueueDepth: 4, FirstBurstLength: 32768, UnsolicitedData: true}, nil, 4<<20/uint64(block), block)
		for _, test := range []struct {
			name   string
			change func(*Options)
		}{
			{"defaults", func(*Options) {}},
			{"unsolicited without immediate", func(o *Options) { o.NoImmediateData = true }},
			{"immediate and R2T", func(o *Options) { o.InitialR2T = true }},
			{"R2T only", func(o *Options) { o.InitialR2T, o.NoImmediateData = true, true }},
			{"small", func(o *Options) {
				o.MaxRecvDataSegmentLength, o.MaxBurstLength, o.FirstBurstLength, o.MaxOutstandingR2T = 1024, 4096, 1536, 1
			}},
			{"digests", func(o *Options) { o.HeaderDigest, o.DataDigest = DigestRequired, DigestRequired }},
			{"digests, small", func(o *Options) {
				o.HeaderDigest, o.DataDigest, o.MaxRecvDataSegmentLength, o.FirstBurstLength = DigestRequired, DigestRequired, 520, 512
			}},
		} {
			t.Run(fmt.Sprintf("%d/%s", block, test.name), func(t *testing.T) {
				o := ownOptions(srv)
				test.change(&o)
				s := mustDial(t, o)
				p := s.Parameters()
				if p.InitialR2T != o.InitialR2T || p.ImmediateData == o.NoImmediateData || p.ISER != (o.ISER != nil) ||
					p.HeaderDigest != (o.HeaderDigest == DigestRequired && o.ISER == nil) {
					t.Errorf("%+v", p)
				}
				ctx := testContext(t)
				l, err := s.OpenLUN(ctx, target.LUN)
				if err != nil {
					t.Fatal(err)
				}
				for _, n := range []int{4096, 8192, 12288, 65536, 69632, 262144, 1<<20 + 4096} {
					lba := r.Uint64N(l.Blocks - uint64(n)/uint64(block))
					data, got := randomBytes(r, n), make([]byte, n)
					if err := errors.Join(l.Write(ctx, lba, data, n > 65536), l.Read(ctx, lba, got)); err != nil {
						t.Fatalf("%d bytes: %v", n, err)
					}
					if !bytes.Equal(got, data) {
						t.Fatalf("%d bytes at %d: what was read differs from byte %d on", n, lba, firstDifference(got, data))
					}
					if m := srv.Medium.Bytes()[lba*uint64(block):][:n]; !bytes.Equal(m, data) {
						t.Fatalf("%d bytes at %d: the medium differs from byte %d on", n, lba, firstDifference(m, data))
					}
				}
				if err := errors.Join(l.Flush(ctx), s.Logout(ctx)); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

func TestOwnCommands(t *testing.T) { overAll(t, testOwnCommands) }

func testOwnCommands(t *testing.T, start starter) {
	srv := start(t, iscsi.Options{}, nil, 4096, 512)
	ctx := testContext(t)
	s := mustDial(t, ownOptions(srv))
	l, err := s.OpenLUN(ctx, target.LUN)
	if err != nil {
		t.Fatal(err)
	}
	ones, zero, got := bytes.Repeat([]byte{0xa5}, 512), make([]byte, 512), make([]byte, 16*512)
	check := func(what string, err error, want ...[]byte) {
		t.Helper()
		if err == nil {
			err = l.Read(ctx, 64, got)
		}
		if err != nil || !bytes.Equal(got, bytes.Join(want, nil)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	check("WRITE SAME", l.WriteSame(ctx, 64, 16, ones, false), bytes.Repeat(ones, 16))
	check("COMPARE AND WRITE", l.CompareAndWrite(ctx, 65, ones, zero), ones, zero, bytes.Repeat(ones, 14))
	if err := l.CompareAndWrite(ctx, 65, ones, zero); !errors.Is(err, ErrMiscompare) {
		t.Errorf("COMPARE AND WRITE of other data: %v", err)
	}
	check("UNMAP", l.Unmap(ctx, Range{LBA: 64, Blocks: 8}), bytes.Repeat(zero, 8), bytes.Repeat(ones, 8))
	check("WRITE SAME with UNMAP", l.WriteSame(ctx, 72, 8, zero, true), bytes.Repeat(zero, 16))
	for name, f := range map[string]func() ([]byte, error){
		"INQUIRY":    func() ([]byte, error) { return l.Inquiry(ctx) },
		"VPD 83":     func() ([]byte, error) { return l.InquiryPage(ctx, 0x83) },
		"VPD B2":     func() ([]byte, error) { return l.InquiryPage(ctx, 0xb2) },
		"MODE SENSE": func() ([]byte, error) { return l.ModeSense(ctx, 0x08, 0) },
		"LOG SENSE":  func() ([]byte, error) { return l.LogSense(ctx, 0, 0) },
	} {
		if b, err := f(); err != nil || len(b) < 4 {
			t.Errorf("%s: %x, %v", name, b, err)
		}
	}
	if luns, err := s.ReportLUNs(ctx); err != nil || len(luns) != 1 || luns[0] != 0 {
		t.Errorf("REPORT LUNS: %x, %v", luns, err)
	}
	var status *StatusError
	if err := l.Read(ctx, l.Blocks, zero); !errors.As(err, &status) || !status.Sense.Is(KeyIllegalRequest, 0x21, 0) {
		t.Errorf("read past the end: %v", err)
	}
	if echo, err := s.Ping(ctx, []byte("hello")); err != nil || string(echo) != "hello" {
		t.Errorf("ping: %q, %v", echo, err)
	}
	rsp, err := s.Execute(ctx, target.LUN, []byte{0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0}, nil, got)
	if err != nil || rsp.Err() != nil || !rsp.Underflow || rsp.Residual != 15*512 || rsp.Transferred != 512 {
		t.Errorf("a read shorter than expected: %+v, %v", rsp, err)
	}
	rsp, err = s.Execute(ctx, target.LUN, []byte{0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0}, nil, zero)
	if err != nil || rsp.Err() != nil || !rsp.Overflow || rsp.Residual != 15*512 || rsp.Transferred != 512 {
		t.Errorf("a read longer than expected: %+v, %v", rsp, err)
	}
	if _, err := s.Execute(ctx, 7, make([]byte, 6), nil, nil); err != nil {
		t.Errorf("a LUN that does not exist is a status, not an error: %v", err)
	}
	targets, err := s.SendTargets(ctx, "")
	if err != nil || len(targets) != 1 || targets[0].Name != target.Name {
		t.Errorf("SendTargets in a normal session: %+v, %v", targets, err)
	}
}

func TestOwnTaskManagement(t *testing.T) { overAll(t, testOwnTaskManagement) }

func testOwnTaskManagement(t *testing.T, start starter) {
	srv := start(t, iscsi.Options{}, nil, 4096, 512)
	ctx := testContext(t)
	o := ownOptions(srv)
	o.ProtocolLevel = 2
	s := mustDial(t, o)
	if s.Parameters().ProtocolLevel != 2 {
		t.Fatalf("%+v", s.Parameters())
	}
	l, err := s.OpenLUN(ctx, target.LUN)
	if err != nil {
		t.Fatal(err)
	}
	g := srv.Hold(scsitest.OpRead)
	submit := func() *Command {
		t.Helper()
		c, err := s.Submit(ctx, target.LUN, pdu.AttrSimple, []byte{0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0}, nil, make([]byte, 512))
		if err != nil {
			t.Fatal(err)
		}
		<-g.Entered
		return c
	}
	c := submit()
	if r, err := s.QueryTask(ctx, c); err != nil || r != pdu.FunctionSucceeded {
		t.Errorf("QUERY TASK: %v, %v", r, err)
	}
	if r, err := s.AbortTask(ctx, c); err != nil || r != pdu.FunctionComplete {
		t.Errorf("ABORT TASK: %v, %v", r, err)
	}
	if _, err := c.Wait(ctx); !errors.Is(err, ErrAborted) {
		t.Errorf("the aborted command: %v", err)
	}
	if r, err := s.QueryTask(ctx, c); err != nil || r != pdu.FunctionComplete {
		t.Errorf("QUERY TASK after the abort: %v, %v", r, err)
	}
	for _, f := range []pdu.TaskFunction{pdu.AbortTaskSet, pdu.LogicalUnitReset} {
		c1, c2 := submit(), submit()
		if r, err := s.TaskManagement(ctx, f, target.LUN); err != nil || r != pdu.FunctionComplete {
			t.Errorf("%v: %v, %v", f, r, err)
		}
		for _, c := range []*Command{c1, c2} {
			if _, err := c.Wait(ctx); !errors.Is(err, ErrAborted) {
				t.Errorf("%v: a covered command: %v", f, err)
			}
		}
	}
	g.Open()
	if err := l.Read(ctx, 0, make([]byte, 512)); err != nil { // past the unit attention of the reset
		t.Error(err)
	}
	if r, err := s.TaskManagement(ctx, pdu.LogicalUnitReset, 9); err != nil || r != pdu.LUNDoesNotExist {
		t.Errorf("reset of a LUN that does not exist: %v, %v", r, err)
	}
}

// A context that ends aborts its command wherever it is: waiting for an R2T, at the medium, or done.
func TestOwnCancel(t *testing.T) { overAll(t, testOwnCancel) }

func testOwnCancel(t *testing.T, start starter) {
	srv := start(t, iscsi.Options{}, nil, 16<<20/512, 512)
	seed := seeded(t).Uint64()
	ctx := testContext(t)
	s := mustDial(t, ownOptions(srv))
	l, err := s.OpenLUN(ctx, target.LUN)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			p := make([]byte, 256<<10)
			for range 25 {
				some, cancel := context.WithCancel(ctx)
				go cancel()
				var err error
				if r.IntN(2) == 0 {
					err = l.Write(some, uint64(w)*512, p[:4096<<r.IntN(7)], false)
				} else {
					err = l.Read(some, uint64(w)*512, p[:4096<<r.IntN(7)])
				}
				if err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("a cancelled command: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if err := l.Read(ctx, 0, make([]byte, 4096)); err != nil {
		t.Errorf("after the cancellations: %v", err)
	}
}

func TestOwnConcurrent(t *testing.T) { overAll(t, testOwnConcurrent) }

func testOwnConcurrent(t *testing.T, start starter) {
	srv := start(t, iscsi.Options{QueueDepth: 16}, nil, 64<<20/512, 512)
	ctx := testContext(t)
	seed := seeded(t).Uint64()
	o := ownOptions(srv)
	o.HeaderDigest, o.DataDigest = DigestPrefer, DigestPrefer
	s := mustDial(t, o)
	l, err := s.OpenLUN(ctx, target.LUN)
	if err != nil {
		t.Fatal(err)
	}
	const workers = 48
	part := l.Blocks / workers
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			for range 12 {
				n := 512 * (1 + r.IntN(256))
				lba := uint64(w)*part + r.Uint64N(part-uint64(n/512))
				data, got := randomBytes(r, n), make([]byte, n)
				if err := errors.Join(l.Write(ctx, lba, data, false), l.Read(ctx, lba, got)); err != nil {
					t.Error(err)
					return
				}
				if !bytes.Equal(data, got) {
					t.Errorf("worker %d: %d bytes at %d differ", w, n, lba)
					return
				}
			}
		})
	}
	wg.Wait()
}

// A second login of the same initiator port takes the session over.
func TestOwnReinstatement(t *testing.T) { overAll(t, testOwnReinstatement) }

func testOwnReinstatement(t *testing.T, start starter) {
	srv := start(t, iscsi.Options{}, nil, 1024, 512)
	ctx := testContext(t)
	o := ownOptions(srv)
	o.ISID = pdu.ISID{0x80, 1, 2, 3, 4, 5}
	g := srv.Hold(scsitest.OpRead)
	old := mustDial(t, o)
	l, err := old.OpenLUN(ctx, target.LUN)
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() { failed <- l.Read(ctx, 0, make([]byte, 512)) }()
	<-g.Entered
	young := mustDial(t, o)
	if err := <-failed; !errors.Is(err, ErrConnection) {
		t.Errorf("the command of the old session: %v", err)
	}
	<-old.Done()
	g.Open()
	if l, err := young.OpenLUN(ctx, target.LUN); err != nil || l.Read(ctx, 0, make([]byte, 512)) != nil {
		t.Errorf("the new session: %v", err)
	}
}

// Shutdown of the target asks for a logout, and the session follows.
func TestOwnShutdown(t *testing.T) { overAll(t, testOwnShutdown) }

func testOwnShutdown(t *testing.T, start starter) {
	srv := start(t, iscsi.Options{}, nil, 1024, 512)
	ctx := testContext(t)
	s := mustDial(t, ownOptions(srv))
	if _, err := s.OpenLUN(ctx, target.LUN); err != nil {
		t.Fatal(err)
	}
	if err := srv.Target.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	<-s.Done()
	if _, err := s.Execute(ctx, target.LUN, make([]byte, 6), nil, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("%v", err)
	}
}
