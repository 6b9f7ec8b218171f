package initiator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator/internal/tgtd"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

const testInitiator = "iqn.2026-01.com.example:initiator"

// testContext ends when the test has no time left.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// seeded makes a random generator and prints how to repeat the run.
func seeded(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 2))
}

func randomBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := 0; i+8 <= n; i += 8 {
		v := r.Uint64()
		for j := range 8 {
			b[i+j] = byte(v >> (8 * j))
		}
	}
	return b
}

func mustDial(t testing.TB, o Options) *Session {
	t.Helper()
	s, err := Dial(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestTgtdDiscovery(t *testing.T) {
	srv := tgtd.Start(t)
	targets, err := Discover(testContext(t), srv.Portal, Options{InitiatorName: testInitiator})
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, target := range targets {
		found[target.Name] = true
		if len(target.Portals) != 1 || target.Portals[0].Address != srv.Portal {
			t.Errorf("%s at %v, want %s", target.Name, target.Portals, srv.Portal)
		}
	}
	if !found[tgtd.Target] || !found[tgtd.CHAPTarget] {
		t.Errorf("found %v", targets)
	}
}

func TestTgtdCHAP(t *testing.T) {
	srv := tgtd.Start(t)
	o := Options{Portal: srv.Portal, InitiatorName: testInitiator, TargetName: tgtd.CHAPTarget,
		CHAP: &CHAP{User: tgtd.User, Secret: tgtd.Secret, Algorithms: []CHAPAlgorithm{CHAPMD5}}}
	s := mustDial(t, o)
	if _, err := s.OpenLUN(testContext(t), tgtd.LUN); err != nil {
		t.Error(err)
	}
	var refused *LoginError
	o.CHAP = &CHAP{User: tgtd.User, Secret: "not the secret at all"}
	if _, err := Dial(testContext(t), o); !errors.As(err, &refused) || refused.Status.Class() != 2 {
		t.Errorf("wrong secret: %v", err)
	}
	o.CHAP = nil
	if _, err := Dial(testContext(t), o); !errors.As(err, &refused) || refused.Status.Class() != 2 {
		t.Errorf("no CHAP: %v", err)
	}
	o.TargetName = tgtd.Target + "-missing"
	if _, err := Dial(testContext(t), o); !errors.As(err, &refused) {
		t.Errorf("unknown target: %v", err)
	}
}

// Data written in every negotiated shape of a write is read back.
func TestTgtdData(t *testing.T) {
	srv := tgtd.Start(t)
	r := seeded(t)
	base := Options{Portal: srv.Portal, InitiatorName: testInitiator, TargetName: tgtd.Target}
	for _, test := range []struct {
		name   string
		change func(*Options)
		target [][2]string
	}{
		{"defaults", func(*Options) {}, nil},
		{"unsolicited", func(*Options) {}, [][2]string{{"InitialR2T", "No"}, {"ImmediateData", "Yes"}}},
		{"unsolicited without immediate", func(o *Options) { o.NoImmediateData = true }, [][2]string{{"InitialR2T", "No"}}},
		{"R2T only", func(o *Options) { o.InitialR2T, o.NoImmediateData = true, true }, [][2]string{{"InitialR2T", "Yes"}}},
		{"small segments", func(o *Options) {
			o.MaxRecvDataSegmentLength, o.MaxBurstLength, o.FirstBurstLength = 1024, 4096, 1536
		}, nil},
		{"digests", func(o *Options) { o.HeaderDigest, o.DataDigest = DigestRequired, DigestRequired },
			[][2]string{{"HeaderDigest", "CRC32C,None"}, {"DataDigest", "CRC32C,None"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, kv := range test.target {
				srv.Set(kv[0], kv[1])
			}
			o := base
			test.change(&o)
			s := mustDial(t, o)
			p := s.Parameters()
			t.Logf("%+v", p)
			if want := o.HeaderDigest == DigestRequired; p.HeaderDigest != want || p.DataDigest != want {
				t.Errorf("digests: %v, %v", p.HeaderDigest, p.DataDigest)
			}
			ctx := testContext(t)
			l, err := s.OpenLUN(ctx, tgtd.LUN)
			if err != nil {
				t.Fatal(err)
			}
			if int64(l.Size()) != srv.Size {
				t.Errorf("%d bytes, want %d", l.Size(), srv.Size)
			}
			for _, n := range []int{512, 4096, 8192, 8704, 65536, 262144, 1<<20 + 512} {
				lba := r.Uint64N(l.Blocks - uint64(n/512))
				data := randomBytes(r, n)
				if err := l.Write(ctx, lba, data, n%4096 == 0); err != nil {
					t.Fatalf("write of %d bytes: %v", n, err)
				}
				got := make([]byte, n)
				if err := l.Read(ctx, lba, got); err != nil {
					t.Fatalf("read of %d bytes: %v", n, err)
				}
				if !bytes.Equal(got, data) {
					t.Fatalf("%d bytes read back differ", n)
				}
			}
			if err := l.Flush(ctx); err != nil {
				t.Error(err)
			}
			if err := s.Logout(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestTgtdCommands(t *testing.T) {
	srv := tgtd.Start(t)
	ctx := testContext(t)
	s := mustDial(t, Options{Portal: srv.Portal, InitiatorName: testInitiator, TargetName: tgtd.Target})
	l, err := s.OpenLUN(ctx, tgtd.LUN)
	if err != nil {
		t.Fatal(err)
	}
	if in, err := l.Inquiry(ctx); err != nil || len(in) < 36 || in[0] != 0 {
		t.Errorf("INQUIRY: %x, %v", in, err)
	}
	if in, err := l.InquiryPage(ctx, 0x83); err != nil || len(in) < 8 || in[1] != 0x83 {
		t.Errorf("VPD 83: %x, %v", in, err)
	}
	if in, err := l.ModeSense(ctx, 8, 0); err != nil || len(in) < 8 {
		t.Errorf("MODE SENSE: %x, %v", in, err)
	}
	if luns, err := s.ReportLUNs(ctx); err != nil || len(luns) != 2 {
		t.Errorf("REPORT LUNS: %x, %v", luns, err)
	}
	block, got := bytes.Repeat([]byte{0xa5}, 512), make([]byte, 4*512)
	if err := l.WriteSame(ctx, 100, 4, block, false); err != nil {
		t.Errorf("WRITE SAME: %v", err)
	}
	if err := l.Read(ctx, 100, got); err != nil || !bytes.Equal(got, bytes.Repeat(block, 4)) {
		t.Errorf("after WRITE SAME: %v", err)
	}
	if err := l.Unmap(ctx, Range{LBA: 96, Blocks: 16}); err != nil {
		t.Errorf("UNMAP: %v", err)
	}
	if err := l.Read(ctx, 100, got); err != nil || !bytes.Equal(got, make([]byte, len(got))) {
		t.Errorf("after UNMAP: %v", err)
	}
	var status *StatusError
	if err := l.Read(ctx, l.Blocks, block); !errors.As(err, &status) || !status.Sense.Is(KeyIllegalRequest, 0x21, 0) {
		t.Errorf("read past the end: %v", err)
	}
	if echo, err := s.Ping(ctx, []byte("hello")); err != nil || string(echo) != "hello" {
		t.Errorf("ping: %q, %v", echo, err)
	}
	if r, err := s.TaskManagement(ctx, pdu.LogicalUnitReset, tgtd.LUN); err != nil || r != pdu.FunctionComplete {
		t.Errorf("LOGICAL UNIT RESET: %v, %v", r, err)
	}
	if err := l.Read(ctx, 0, block); err != nil { // meets the unit attention of the reset
		t.Errorf("after the reset: %v", err)
	}
	c, err := s.Submit(ctx, tgtd.LUN, pdu.AttrSimple, make([]byte, 6), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if rsp, err := c.Wait(ctx); err != nil || rsp.Err() != nil {
		t.Errorf("%v, %v", rsp, err)
	}
	if r, err := s.AbortTask(ctx, c); err != nil || r == pdu.FunctionComplete {
		t.Logf("ABORT TASK of an ended task: %v, %v", r, err)
	}
}

// Many goroutines share the session; each owns a part of the unit.
func TestTgtdConcurrent(t *testing.T) {
	srv := tgtd.Start(t)
	ctx := testContext(t)
	s := mustDial(t, Options{Portal: srv.Portal, InitiatorName: testInitiator, TargetName: tgtd.Target, QueueDepth: 32,
		HeaderDigest: DigestPrefer, DataDigest: DigestPrefer})
	l, err := s.OpenLUN(ctx, tgtd.LUN)
	if err != nil {
		t.Fatal(err)
	}
	seed := seeded(t).Uint64()
	const workers = 48
	part := l.Blocks / workers
	var wg sync.WaitGroup
	errs := make(chan error, workers)
	for w := range workers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			for range 20 {
				n := 512 * (1 + r.IntN(128))
				lba := uint64(w)*part + r.Uint64N(part-uint64(n/512))
				data, got := randomBytes(r, n), make([]byte, n)
				if err := errors.Join(l.Write(ctx, lba, data, false), l.Read(ctx, lba, got)); err != nil {
					errs <- err
					return
				}
				if !bytes.Equal(data, got) {
					errs <- fmt.Errorf("worker %d: %d bytes at %d differ", w, n, lba)
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}

// A context that ends aborts its command and leaves the session usable.
func TestTgtdCancel(t *testing.T) {
	srv := tgtd.Start(t)
	ctx := testContext(t)
	s := mustDial(t, Options{Portal: srv.Portal, InitiatorName: testInitiator, TargetName: tgtd.Target})
	l, err := s.OpenLUN(ctx, tgtd.LUN)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			p := make([]byte, 256<<10)
			for range 10 {
				some, cancel := context.WithCancel(ctx)
				go cancel()
				if err := l.Write(some, uint64(i)*512, p, false); err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("cancelled write: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if err := l.Read(ctx, 0, make([]byte, 4096)); err != nil {
		t.Errorf("after the cancellations: %v", err)
	}
}
