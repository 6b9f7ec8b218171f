package pdu

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

// message is what all PDU structs have in common.
type message interface {
	Encode(*Header)
	Decode(*Header) error
}

// messages has one constructor for each opcode.
var messages = map[Opcode]func() message{
	OpNopOut:         func() message { return new(NopOut) },
	OpSCSICommand:    func() message { return new(SCSICommand) },
	OpTaskRequest:    func() message { return new(TaskRequest) },
	OpLoginRequest:   func() message { return new(LoginRequest) },
	OpTextRequest:    func() message { return new(TextRequest) },
	OpDataOut:        func() message { return new(DataOut) },
	OpLogoutRequest:  func() message { return new(LogoutRequest) },
	OpSnack:          func() message { return new(Snack) },
	OpNopIn:          func() message { return new(NopIn) },
	OpSCSIResponse:   func() message { return new(SCSIResponse) },
	OpTaskResponse:   func() message { return new(TaskResponse) },
	OpLoginResponse:  func() message { return new(LoginResponse) },
	OpTextResponse:   func() message { return new(TextResponse) },
	OpDataIn:         func() message { return new(DataIn) },
	OpLogoutResponse: func() message { return new(LogoutResponse) },
	OpR2T:            func() message { return new(R2T) },
	OpAsync:          func() message { return new(Async) },
	OpReject:         func() message { return new(Reject) },
}

// seed makes a random generator and prints how to repeat the run.
func seeded(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// Any header that decodes is reproduced by its PDU as far as the PDU has fields, and
// every field survives.
func TestRoundTrip(t *testing.T) {
	r := seeded(t)
	for op, make := range messages {
		decoded := 0
		for range 2000 {
			var h Header
			for i := range h {
				h[i] = byte(r.Uint32())
			}
			h[0] = byte(op) | h[0]&0x40
			if r.IntN(4) == 0 { // combinations that are legal are rare in noise
				h[1] |= 0x80
				h[1] &^= 0x46
			}
			m := make()
			err := m.Decode(&h)
			if err != nil {
				if !errors.Is(err, ErrFormat) {
					t.Fatalf("%v: decode of %x: %v", op, h[:], err)
				}
				continue
			}
			decoded++
			var out Header
			m.Encode(&out)
			again := make()
			if err := again.Decode(&out); err != nil {
				t.Fatalf("%v: decode of its own encoding %x: %v", op, out[:], err)
			}
			if !reflect.DeepEqual(m, again) {
				t.Fatalf("%v: %+v became %+v", op, m, again)
			}
			if out.AHSLength() != 0 || out.DataLength() != 0 {
				t.Fatalf("%v: Encode set lengths", op)
			}
		}
		if op != OpNopIn && decoded == 0 { // random tags of a NOP-In are both valid
			t.Errorf("%v: no random header decoded", op)
		}
	}
}

func TestNopInTags(t *testing.T) {
	for _, p := range []NopIn{{ITT: 1, TTT: ReservedTag, StatSN: 4}, {ITT: ReservedTag, TTT: 9, LUN: 5}, {ITT: ReservedTag, TTT: ReservedTag, MaxCmdSN: 7}} {
		var h Header
		var q NopIn
		p.Encode(&h)
		if err := q.Decode(&h); err != nil || p != q {
			t.Errorf("%+v became %+v, %v", p, q, err)
		}
	}
}

// Each field has its own place: the expected bytes are written out from the standard's pictures.
func TestLayout(t *testing.T) {
	tests := []struct {
		m    message
		want string
	}{
		{&NopOut{Immediate: true, LUN: LUNOf(1), ITT: 0x01020304, TTT: 0x05060708, CmdSN: 0x11121314, ExpStatSN: 0x21222324},
			"40800000 00000000 00010000 00000000 01020304 05060708 11121314 21222324 00000000 00000000 00000000 00000000"},
		{&SCSICommand{Final: true, Read: true, Attr: AttrSimple, Priority: 0xa, LUN: LUNOf(300), ITT: 1, EDTL: 0x1000, CmdSN: 2, ExpStatSN: 3, CDB: [16]byte{0x28, 15: 0xff}},
			"01c1a000 00000000 412c0000 00000000 00000001 00001000 00000002 00000003 28000000 00000000 00000000 000000ff"},
		{&SCSIResponse{BidiOverflow: true, Underflow: true, Response: TargetFailure, Status: 2, StatusQualifier: 0x0a0b, ITT: 1, SnackTag: 2, StatSN: 3, ExpCmdSN: 4, MaxCmdSN: 5, ExpDataSN: 6, BidiResidual: 7, Residual: 8},
			"21920102 00000000 0a0b0000 00000000 00000001 00000002 00000003 00000004 00000005 00000006 00000007 00000008"},
		{&TaskRequest{Immediate: true, Function: AbortTask, LUN: LUNOf(2), ITT: 1, Referenced: 2, CmdSN: 3, ExpStatSN: 4, RefCmdSN: 5, ExpDataSN: 6},
			"42810000 00000000 00020000 00000000 00000001 00000002 00000003 00000004 00000005 00000006 00000000 00000000"},
		{&TaskResponse{Response: FunctionRejected, Additional: [3]byte{1, 2, 3}, ITT: 1, StatSN: 3, ExpCmdSN: 4, MaxCmdSN: 5},
			"2280ff00 00000000 01020300 00000000 00000001 00000000 00000003 00000004 00000005 00000000 00000000 00000000"},
		{&LoginRequest{Transit: true, CSG: StageOperational, NSG: StageFullFeature, VersionMax: 1, VersionMin: 2, ISID: ISID{0x40, 1, 2, 3, 4, 5}, TSIH: 0x0607, ITT: 1, CID: 0x0809, CmdSN: 2, ExpStatSN: 3},
			"43870102 00000000 40010203 04050607 00000001 08090000 00000002 00000003 00000000 00000000 00000000 00000000"},
		{&LoginResponse{Continue: true, CSG: StageSecurity, VersionMax: 1, VersionActive: 2, ISID: ISID{0x40, 1, 2, 3, 4, 5}, TSIH: 0x0607, ITT: 1, StatSN: 2, ExpCmdSN: 3, MaxCmdSN: 4, Status: LoginAuthFailure},
			"23400102 00000000 40010203 04050607 00000001 00000000 00000002 00000003 00000004 02010000 00000000 00000000"},
		{&TextRequest{Final: true, LUN: 0, ITT: 1, TTT: ReservedTag, CmdSN: 2, ExpStatSN: 3},
			"04800000 00000000 00000000 00000000 00000001 ffffffff 00000002 00000003 00000000 00000000 00000000 00000000"},
		{&TextResponse{Continue: true, ITT: 1, TTT: 9, StatSN: 2, ExpCmdSN: 3, MaxCmdSN: 4},
			"24400000 00000000 00000000 00000000 00000001 00000009 00000002 00000003 00000004 00000000 00000000 00000000"},
		{&DataOut{Final: true, LUN: LUNOf(1), ITT: 1, TTT: 2, ExpStatSN: 3, DataSN: 4, Offset: 5},
			"05800000 00000000 00010000 00000000 00000001 00000002 00000000 00000003 00000000 00000004 00000005 00000000"},
		{&DataIn{Final: true, HasStatus: true, Underflow: true, Status: 4, ITT: 1, TTT: ReservedTag, StatSN: 2, ExpCmdSN: 3, MaxCmdSN: 4, DataSN: 5, Offset: 6, Residual: 7},
			"25830004 00000000 00000000 00000000 00000001 ffffffff 00000002 00000003 00000004 00000005 00000006 00000007"},
		{&R2T{LUN: LUNOf(1), ITT: 1, TTT: 2, StatSN: 3, ExpCmdSN: 4, MaxCmdSN: 5, R2TSN: 6, Offset: 7, Length: 8},
			"31800000 00000000 00010000 00000000 00000001 00000002 00000003 00000004 00000005 00000006 00000007 00000008"},
		{&LogoutRequest{Reason: CloseConnection, ITT: 1, CID: 0x0203, CmdSN: 4, ExpStatSN: 5},
			"06810000 00000000 00000000 00000000 00000001 02030000 00000004 00000005 00000000 00000000 00000000 00000000"},
		{&LogoutResponse{Response: LogoutNoRecovery, ITT: 1, StatSN: 2, ExpCmdSN: 3, MaxCmdSN: 4, Time2Wait: 5, Time2Retain: 6},
			"26800200 00000000 00000000 00000000 00000001 00000000 00000002 00000003 00000004 00000000 00050006 00000000"},
		{&Async{LUN: LUNOf(1), StatSN: 2, ExpCmdSN: 3, MaxCmdSN: 4, Event: AsyncDropConnection, VendorCode: 5, Param1: 6, Param2: 7, Param3: 8},
			"32800000 00000000 00010000 00000000 ffffffff 00000000 00000002 00000003 00000004 02050006 00070008 00000000"},
		{&Reject{Reason: RejectInvalidField, StatSN: 2, ExpCmdSN: 3, MaxCmdSN: 4, DataSN: 5},
			"3f800900 00000000 00000000 00000000 ffffffff 00000000 00000002 00000003 00000004 00000005 00000000 00000000"},
		{&Snack{Type: SnackStatus, LUN: LUNOf(1), ITT: ReservedTag, TTT: 2, ExpStatSN: 3, BegRun: 4, RunLength: 5},
			"10810000 00000000 00010000 00000000 ffffffff 00000002 00000000 00000003 00000000 00000000 00000004 00000005"},
	}
	seen := map[Opcode]bool{}
	for _, test := range tests {
		want, err := hex.DecodeString(string(bytes.ReplaceAll([]byte(test.want), []byte(" "), nil)))
		if err != nil || len(want) != HeaderLen {
			t.Fatalf("%T: bad test, %d bytes, %v", test.m, len(want), err)
		}
		var h Header
		test.m.Encode(&h)
		if !bytes.Equal(h[:], want) {
			t.Errorf("%T:\n got %x\nwant %x", test.m, h[:], want)
		}
		back := messages[h.Opcode()]()
		if err := back.Decode(&h); err != nil || !reflect.DeepEqual(back, test.m) {
			t.Errorf("%T: decoded as %+v, %v", test.m, back, err)
		}
		seen[h.Opcode()] = true
	}
	for op := range messages {
		if !seen[op] && op != OpNopIn {
			t.Errorf("%v has no layout test", op)
		}
	}
}

func TestPrefixesFail(t *testing.T) {
	var h Header
	(&SCSICommand{Final: true}).Encode(&h)
	for n := range HeaderLen {
		if _, err := ParseHeader(h[:n]); !errors.Is(err, ErrShort) {
			t.Errorf("prefix of %d bytes: %v", n, err)
		}
	}
	if got, err := ParseHeader(h[:]); err != nil || got != h {
		t.Errorf("whole header: %v", err)
	}
}

func TestWrongOpcode(t *testing.T) {
	for op, make := range messages {
		var h Header
		h[0] = byte(op)
		for other, makeOther := range messages {
			if other == op {
				continue
			}
			if err := makeOther().Decode(&h); !errors.Is(err, ErrOpcode) {
				t.Errorf("%v decoded as %v: %v", op, other, err)
			}
		}
		_ = make
	}
}

func TestFormatErrors(t *testing.T) {
	for _, m := range []message{
		&NopOut{ITT: ReservedTag},
		&NopIn{ITT: 1, TTT: 1},
		&SCSICommand{Final: true, ITT: ReservedTag},
		&SCSICommand{},
		&SCSICommand{Final: true, EDTL: 1},
		&SCSICommand{Final: true, Attr: 5},
		&TaskRequest{ITT: ReservedTag},
		&TextRequest{Final: true, Continue: true},
		&TextRequest{ITT: ReservedTag},
		&TextResponse{Final: true, TTT: 3},
		&TextResponse{TTT: ReservedTag},
		&LogoutRequest{ITT: ReservedTag},
		&LoginRequest{Transit: true, Continue: true, NSG: 1},
		&LoginRequest{CSG: 2},
		&LoginRequest{CSG: 3},
		&LoginRequest{Transit: true, CSG: 1, NSG: 1},
		&LoginRequest{Transit: true, NSG: 2},
		&LoginResponse{Transit: true, NSG: 0},
		&SCSIResponse{Overflow: true, Underflow: true},
		&SCSIResponse{BidiOverflow: true, BidiUnderflow: true},
		&DataIn{HasStatus: true},
		&DataIn{Final: true, HasStatus: true, Overflow: true, Underflow: true},
		&R2T{TTT: ReservedTag, Length: 1},
		&R2T{},
		&R2T{Offset: 1<<32 - 1, Length: 2},
	} {
		var h Header
		m.Encode(&h)
		err := messages[h.Opcode()]().Decode(&h)
		var fe *FormatError
		if !errors.Is(err, ErrFormat) || !errors.As(err, &fe) || fe.Opcode != h.Opcode() {
			t.Errorf("%T %+v: %v", m, m, err)
		}
	}
}

func TestHeaderLengths(t *testing.T) {
	var h Header
	for _, n := range []int{0, 1, 255, 256, 65536, MaxDataLength} {
		h.SetDataLength(n)
		if h.DataLength() != n {
			t.Errorf("data length %d became %d", n, h.DataLength())
		}
	}
	for _, n := range []int{0, 4, MaxAHSLength} {
		h.SetAHSLength(n)
		if h.AHSLength() != n {
			t.Errorf("AHS length %d became %d", n, h.AHSLength())
		}
	}
}

func TestLUN(t *testing.T) {
	for _, n := range []uint16{0, 1, 255, 256, 300, 16383} {
		if got, ok := LUNOf(n).Number(); !ok || got != n {
			t.Errorf("LUN %d became %d, %v", n, got, ok)
		}
	}
	for _, l := range []LUN{0xc101 << 48, 0x0101 << 48, 1, 0x8000 << 48} {
		if n, ok := l.Number(); ok {
			t.Errorf("LUN field %016x became %d", uint64(l), n)
		}
	}
}

func TestAHS(t *testing.T) {
	r := seeded(t)
	for range 2000 {
		var a AHS
		if n := r.IntN(MaxCDBLength - FixedCDBLength + 1); n > 0 {
			a.CDB = make([]byte, n)
			for i := range a.CDB {
				a.CDB[i] = byte(r.Uint32())
			}
		}
		if r.IntN(2) == 0 {
			a.HasBidiRead, a.BidiReadLength = true, r.Uint32()
		}
		b := a.Append(nil)
		if len(b)%4 != 0 || len(b) > MaxAHSLength {
			t.Fatalf("%d bytes", len(b))
		}
		var back AHS
		if err := back.Decode(b); err != nil || !reflect.DeepEqual(a, back) {
			t.Fatalf("%+v became %+v, %v", a, back, err)
		}
		// A prefix at a segment boundary is a list of fewer segments; any other must fail.
		for n := 1; n < len(b); n++ {
			var p AHS
			if err := p.Decode(b[:n]); err == nil && (p.HasBidiRead == a.HasBidiRead && (p.CDB == nil) == (a.CDB == nil)) {
				t.Fatalf("prefix of %d bytes of %d decoded whole", n, len(b))
			}
		}
	}
	for _, bad := range [][]byte{
		{0, 0, 1, 0}, {0, 1, 1, 0}, {0, 5, 3, 0, 1, 2, 3, 4}, {0, 4, 2, 0, 1, 2, 3, 0},
		{0, 5, 2, 0, 1, 2, 3, 4, 0, 5, 2, 0, 1, 2, 3, 4}, {0, 2, 1, 0, 9, 0, 0, 0, 0, 2, 1, 0, 9, 0, 0, 0},
	} {
		if err := new(AHS).Decode(bad); !errors.Is(err, ErrFormat) {
			t.Errorf("%x: %v", bad, err)
		}
	}
}

func TestSerial(t *testing.T) {
	tests := []struct {
		a, b   Serial
		before bool
	}{
		{0, 1, true}, {1, 0, false}, {5, 5, false}, {0xffffffff, 0, true}, {0, 0xffffffff, false},
		{0, 0x7fffffff, true}, {0, 0x80000000, false}, {0x80000000, 0, false}, {0xfffffff0, 10, true},
	}
	for _, test := range tests {
		if test.a.Before(test.b) != test.before || test.b.After(test.a) != test.before {
			t.Errorf("%x before %x: %v", test.a, test.b, !test.before)
		}
	}
	if Serial(0xffffffff).Next() != 0 || Serial(1).Add(-2) != 0xffffffff || Serial(0xfffffffe).Distance(1) != 3 || Serial(1).Distance(0xfffffffe) != -3 {
		t.Error("arithmetic does not wrap")
	}
	for _, test := range []struct {
		s, first, last Serial
		in             bool
	}{
		{5, 5, 5, true}, {5, 5, 4, false}, {4, 5, 8, false}, {0, 0xfffffffe, 2, true}, {3, 0xfffffffe, 2, false},
	} {
		if test.s.InWindow(test.first, test.last) != test.in {
			t.Errorf("%x in [%x, %x]: %v", test.s, test.first, test.last, !test.in)
		}
	}
}

// The examples of RFC 7143, appendix A.4.
func TestDigest(t *testing.T) {
	up, down := make([]byte, 32), make([]byte, 32)
	for i := range up {
		up[i], down[i] = byte(i), byte(31-i)
	}
	read := []byte{1, 0xc0, 18: 0, 16: 0x14, 22: 4, 27: 0x14, 31: 0x18, 32: 0x28, 40: 2, 47: 0}
	for _, test := range []struct {
		in   []byte
		want string
	}{
		{make([]byte, 32), "aa36918a"}, {bytes.Repeat([]byte{0xff}, 32), "43aba862"}, {up, "4e79dd46"}, {down, "5cdb3f11"}, {read, "563a96d9"},
	} {
		wire := AppendDigest(nil, Digest(0, test.in))
		if hex.EncodeToString(wire) != test.want {
			t.Errorf("digest of %x: %x, want %s", test.in, wire, test.want)
		}
		if DigestAt((*[4]byte)(wire)) != Digest(0, test.in) {
			t.Errorf("%x reads as another digest", wire)
		}
	}
	var h Header
	copy(h[:], read)
	if HeaderDigest(&h, up) != Digest(0, append(bytes.Clone(read), up...)) {
		t.Error("the header digest does not cover the AHS")
	}
	for n := range 9 {
		padded := make([]byte, n+Padding(n))
		copy(padded, "abcdefghi"[:n])
		if len(padded)%4 != 0 || PadDigest(Digest(0, padded[:n]), n) != Digest(0, padded) {
			t.Errorf("padding of %d bytes", n)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	var h Header
	cmd := SCSICommand{Final: true, Read: true, EDTL: 4096}
	in := DataIn{Final: true, HasStatus: true}
	if n := testing.AllocsPerRun(100, func() {
		cmd.Encode(&h)
		if cmd.Decode(&h) != nil {
			t.Fatal("command")
		}
		in.Encode(&h)
		if in.Decode(&h) != nil {
			t.Fatal("data-in")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkSCSICommand(b *testing.B) {
	b.ReportAllocs()
	var h Header
	p := SCSICommand{Final: true, Read: true, EDTL: 4096}
	for b.Loop() {
		p.Encode(&h)
		if err := p.Decode(&h); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for op := range messages {
		h := make([]byte, HeaderLen)
		h[0], h[1] = byte(op), 0x80
		f.Add(h, []byte{0, 5, 2, 0, 0, 0, 16, 0})
	}
	f.Fuzz(func(t *testing.T, b, ahs []byte) {
		h, err := ParseHeader(b)
		if err != nil {
			if len(b) >= HeaderLen {
				t.Fatal(err)
			}
			return
		}
		_ = h.String()
		if make, ok := messages[h.Opcode()]; ok {
			m := make()
			if m.Decode(&h) == nil {
				var out Header
				m.Encode(&out)
				again := make()
				if err := again.Decode(&out); err != nil || !reflect.DeepEqual(m, again) {
					t.Fatalf("%+v became %+v, %v", m, again, err)
				}
			}
		}
		var a AHS
		if a.Decode(ahs) == nil {
			var back AHS
			if err := back.Decode(a.Append(nil)); err != nil || !reflect.DeepEqual(a, back) {
				t.Fatalf("%+v became %+v, %v", a, back, err)
			}
		}
	})
}
