package initiator

import (
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iwarp"
)

func TestMemory(t *testing.T) {
	r := seeded(t)
	p, err := iwarp.New(iwarp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	pd, err := p.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	m := newMemory(pd)
	var held [][]byte
	for i := range 2000 {
		if len(held) > 4 && r.IntN(2) == 0 { // some stay for what follows
			k := r.IntN(len(held))
			b := held[k]
			for _, c := range b {
				if c != b[0] {
					t.Fatal("pieces overlap")
				}
			}
			m.release(b)
			held = append(held[:k], held[k+1:]...)
			continue
		}
		n := 1 + r.IntN(1<<r.IntN(22))
		b, err := m.alloc(n)
		if err != nil || len(b) != n || addressOf(b)%minPiece != 0 {
			t.Fatalf("%d bytes: %d at %x, %v", n, len(b), addressOf(b), err)
		}
		for j := range b {
			b[j] = byte(i)
		}
		from := r.IntN(n)
		if g := m.find(b[from:]); g == nil || m.find(b) != g {
			t.Fatal("not found")
		}
		held = append(held, b)
	}
	if m.find(make([]byte, 10)) != nil || m.find(held[0][:1:1]) == nil {
		t.Error("find")
	}
	for _, misuse := range []func(){
		func() { m.release(make([]byte, 1)) },
		func() { m.release(held[0][1:]) },
		func() { b := held[0]; held = held[1:]; m.release(b); m.release(b) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("misuse did not panic")
				}
			}()
			misuse()
		}()
	}
	m.close()
	if _, err := m.alloc(1); err == nil {
		t.Error("memory after close")
	}
	for _, b := range held {
		b[0]++ // still there
		m.release(b)
	}
	if len(*m.regions.Load()) != 0 {
		t.Error("regions are left")
	}
	if _, err := pd.Register(make([]byte, 1), 0); err == nil {
		t.Error("the domain is left")
	}
}

func TestParseURL(t *testing.T) {
	o, lun, err := ParseURL("iser://me:a%20secret@h/iqn.2026-01.com.example:a.b/7?crc=off&mpa=1&hello=yes&login=stream&delay=1s&first-burst=4096&initial-r2t=yes&immediate-data=no&lax-statsn=yes")
	if err != nil || lun != 7 || o.Portal != "h:3260" || o.TargetName != "iqn.2026-01.com.example:a.b" || o.CHAP.User != "me" || o.CHAP.Secret != "a secret" ||
		!o.ISER.Hello || !o.ISER.Stream || !o.ISER.LaxStatSN || o.ISER.StartDelay != time.Second || o.ISER.Provider == nil || o.FirstBurstLength != 4096 || !o.InitialR2T || !o.NoImmediateData {
		t.Errorf("%+v, %d, %v", o, lun, err)
	}
	o, lun, err = ParseURL("iscsi://[::1]:5/iqn.a?digests=prefer&max-burst=65536")
	if err != nil || lun != 0 || o.Portal != "[::1]:5" || o.ISER != nil || o.CHAP != nil || o.HeaderDigest != DigestPrefer || o.MaxBurstLength != 65536 {
		t.Errorf("%+v, %d, %v", o, lun, err)
	}
	for _, bad := range []string{
		"", "http://h/iqn.a", "iscsi:iqn.a", "iscsi://h", "iscsi://h/", "iscsi:///iqn.a", "iscsi://h/iqn.a/x", "iscsi://h/iqn.a/16384", "iscsi://h/iqn.a/1/2", "iscsi://u@h/iqn.a",
		"iscsi://h/iqn.a?crc=off", "iser://h/iqn.a?digests=none", "iser://h/iqn.a?crc=maybe", "iser://h/iqn.a?mpa=3", "iser://h/iqn.a?crc=on&crc=off", "iser://h/iqn.a?delay=-1s",
		"iser://h/iqn.a?mpa=1&peer-to-peer=yes", "iscsi://h/iqn.a?first-burst=5", "iscsi://h/iqn.a?what=ever", "iscsi://h/iqn.a#f", "iscsi://h:x/iqn.a", "iser://h/iqn.a?login=x",
	} {
		if o, _, err := ParseURL(bad); err == nil {
			t.Errorf("%q: %+v", bad, o)
		}
	}
}

func TestISEROptions(t *testing.T) {
	for _, i := range []ISER{{RecvSegment: 511}, {SendSegment: 1 << 24}, {Unexpected: 1}, {Unexpected: 5000}, {IRD: -1}, {IRD: 2000}, {WriteBase: 3}, {StartDelay: -1}, {Stream: true, Provider: new(mirror)}} {
		o := iserOptions("h")
		o.ISER = &i
		o.EnsureDefaults()
		if o.Validate() == nil {
			t.Errorf("%+v is valid", i)
		}
	}
}
