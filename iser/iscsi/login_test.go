package iscsi

import (
	"context"
	"crypto/md5"
	"crypto/sha256"
	"errors"
	"strings"
	"testing"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
)

const (
	testInitiator = "iqn.2001-04.com.example:host"
	testTarget    = "iqn.2024-01.net.isergate:disk"
)

var testCHAP = CHAP{User: "joe", Secret: []byte("a secret of joe"), MutualUser: "target", MutualSecret: []byte("a secret of target")}

// stubBackend grants what its fields say.
type stubBackend struct {
	chap *CHAP
	err  error
}

func (b *stubBackend) Authorize(_ context.Context, initiator, target string) (Access, error) {
	if b.err != nil {
		return Access{}, b.err
	}
	if target != "" && target != testTarget {
		return Access{}, ErrNotFound
	}
	return Access{CHAP: b.chap, Alias: "disk", Units: scsi.NewInventory()}, nil
}

func (b *stubBackend) Targets(context.Context, string) []string { return []string{testTarget} }

// exchange is one request of a login script, and what must come back.
type exchange struct {
	transit, cont bool
	csg, nsg      pdu.Stage
	keys          []string // key=value
	raw           string   // instead of keys
	change        func(*pdu.LoginRequest)

	status    pdu.LoginStatus
	want      []string // exact answer, in order; "*" at the end allows more
	transited bool
	continues bool
}

var testOffer = offer{maxRecv: 262144, maxConns: 4, maxBurst: 1 << 20, firstBurst: 65536, maxR2T: 8, protocolLevel: 2}

func testLogin(b Backend, book *challenges, join func(sessionKey, uint16) (*session, bool)) *loginMachine {
	if join == nil {
		join = func(sessionKey, uint16) (*session, bool) { return nil, false }
	}
	return newLogin(context.Background(), loginConfig{backend: b, offer: testOffer, group: 1, book: book, session: join,
		algorithms: []CHAPAlgorithm{CHAPSHA256, CHAPMD5}})
}

func (x *exchange) send(m *loginMachine) (pdu.LoginResponse, []byte) {
	req := pdu.LoginRequest{Transit: x.transit, Continue: x.cont, CSG: x.csg, NSG: x.nsg, ISID: pdu.ISID{0x40, 1, 2, 3, 4, 5}, ITT: 7, CID: 1, CmdSN: 100}
	if x.change != nil {
		x.change(&req)
	}
	var h pdu.Header
	req.Encode(&h)
	text := x.raw
	for _, k := range x.keys {
		text += k + "\x00"
	}
	h.SetDataLength(len(text))
	return m.step(&h, []byte(text))
}

func (x *exchange) check(t *testing.T, i int, r pdu.LoginResponse, text []byte) {
	t.Helper()
	if r.Status != x.status {
		t.Fatalf("exchange %d: status %v, want %v", i, r.Status, x.status)
	}
	if r.Transit != x.transited || r.Continue != x.continues {
		t.Errorf("exchange %d: T=%v C=%v, want T=%v C=%v", i, r.Transit, r.Continue, x.transited, x.continues)
	}
	if x.want == nil {
		return
	}
	got := strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
	if string(text) == "" {
		got = nil
	}
	want := x.want
	if len(want) > 0 && want[len(want)-1] == "*" {
		want = want[:len(want)-1]
		got = got[:min(len(got), len(want))]
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("exchange %d: answer\n %q, want\n %q", i, got, want)
	}
}

func names(more ...string) []string {
	return append([]string{"InitiatorName=" + testInitiator, "TargetName=" + testTarget}, more...)
}

func TestLogin(t *testing.T) {
	const sec, op, ffp = pdu.StageSecurity, pdu.StageOperational, pdu.StageFullFeature
	long := strings.Repeat("x", 200)
	var many []string
	for _, a := range "abcdefghijklmnopqrstuvwxy" {
		for _, b := range "abcde" {
			many = append(many, "X-"+strings.Repeat(string(a)+string(b), 30)+"=1")
		}
	}
	tests := []struct {
		name    string // begins with the requirement
		backend stubBackend
		join    func(sessionKey, uint16) (*session, bool)
		script  []exchange
		done    bool
	}{
		{name: "ISCSI-7 operational stage at once", done: true, script: []exchange{
			{transit: true, csg: op, nsg: ffp, keys: names("HeaderDigest=CRC32C,None", "MaxRecvDataSegmentLength=4096"), transited: true,
				want: []string{"TargetPortalGroupTag=1", "TargetAlias=disk", "HeaderDigest=CRC32C", "MaxRecvDataSegmentLength=262144"}}}},
		{name: "ISCSI-7 security then operational", done: true, script: []exchange{
			{transit: true, csg: sec, nsg: op, keys: names("AuthMethod=CHAP,None"), transited: true,
				want: []string{"TargetPortalGroupTag=1", "TargetAlias=disk", "AuthMethod=None"}},
			{transit: true, csg: op, nsg: ffp, keys: []string{"InitialR2T=No"}, transited: true, want: []string{"InitialR2T=No", "MaxRecvDataSegmentLength=262144"}}}},
		{name: "ISCSI-7 security straight to full feature", done: true, script: []exchange{
			{transit: true, csg: sec, nsg: ffp, keys: names("AuthMethod=None"), transited: true}}},
		{name: "ISCSI-7 T only after T", done: true, script: []exchange{
			{csg: op, keys: names(), want: []string{"TargetPortalGroupTag=1", "*"}},
			{csg: op, keys: []string{"InitialR2T=Yes"}, want: []string{"InitialR2T=Yes"}},
			{transit: true, csg: op, nsg: ffp, transited: true}}},
		{name: "ISCSI-7 back to an earlier stage", script: []exchange{
			{transit: true, csg: sec, nsg: op, keys: names(), transited: true},
			{transit: true, csg: sec, nsg: op, status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-7 stage 2 does not exist", script: []exchange{{transit: true, csg: op, nsg: 2, keys: names(), status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-8 T with C", script: []exchange{{transit: true, cont: true, csg: op, nsg: ffp, keys: names(), status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-8 keys are answered after the last piece", done: true, script: []exchange{
			{cont: true, csg: op, raw: "InitiatorName=" + testInitiator + "\x00TargetNa", want: []string{}},
			{transit: true, csg: op, nsg: ffp, raw: "me=" + testTarget + "\x00", transited: true, want: []string{"TargetPortalGroupTag=1", "*"}}}},
		{name: "ISCSI-3 InitiatorName missing", script: []exchange{{csg: op, keys: []string{"TargetName=" + testTarget}, status: pdu.LoginMissingParameter}}},
		{name: "ISCSI-3 TargetName missing", script: []exchange{{csg: op, keys: []string{"InitiatorName=" + testInitiator}, status: pdu.LoginMissingParameter}}},
		{name: "ISCSI-3 discovery needs no TargetName", done: true, script: []exchange{
			{transit: true, csg: op, nsg: ffp, keys: []string{"InitiatorName=" + testInitiator, "SessionType=Discovery"}, transited: true}}},
		{name: "ISCSI-4 version", script: []exchange{{csg: op, keys: names(), change: func(r *pdu.LoginRequest) { r.VersionMin, r.VersionMax = 1, 2 }, status: pdu.LoginUnsupportedVersion}}},
		{name: "ISCSI-4 ISID changes", script: []exchange{{csg: op, keys: names(), want: []string{"*"}},
			{csg: op, change: func(r *pdu.LoginRequest) { r.ISID[0]++ }, status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-4 CID changes", script: []exchange{{csg: op, keys: names(), want: []string{"*"}},
			{csg: op, change: func(r *pdu.LoginRequest) { r.CID++ }, status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-4 ITT changes", script: []exchange{{csg: op, keys: names(), want: []string{"*"}},
			{csg: op, change: func(r *pdu.LoginRequest) { r.ITT++ }, status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-9 key twice in a request", script: []exchange{{csg: op, keys: names("InitialR2T=No", "InitialR2T=No"), status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-9 key twice in the login", script: []exchange{{csg: op, keys: names("InitialR2T=No"), want: []string{"*"}},
			{csg: op, keys: []string{"InitialR2T=Yes"}, status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-9 operational key in security", script: []exchange{{csg: sec, keys: names("InitialR2T=No"), status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-9 security key in operational", script: []exchange{{csg: op, keys: names("AuthMethod=None"), status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-9 SendTargets in login", script: []exchange{{csg: op, keys: names("SendTargets=All"), status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-9 a target's key from the initiator", script: []exchange{{csg: op, keys: names("TargetPortalGroupTag=1"), status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-9 SessionType too late", script: []exchange{{csg: op, keys: names(), want: []string{"*"}},
			{csg: op, keys: []string{"SessionType=Normal"}, status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-11 8192 bytes of keys in pieces", done: true, script: []exchange{
			{cont: true, csg: op, raw: strings.Join(names("X-a="+long, "X-b="+long, ""), "\x00") + strings.Repeat("\x00", 5000)},
			{cont: true, csg: op, raw: strings.Repeat("\x00", 2600)},
			{transit: true, csg: op, nsg: ffp, transited: true, want: []string{"TargetPortalGroupTag=1", "TargetAlias=disk", "X-a=NotUnderstood", "X-b=NotUnderstood", "*"}}}},
		{name: "ISCSI-16 too much text", script: []exchange{
			{cont: true, csg: op, raw: strings.Repeat("\x00", 8192)},
			{cont: true, csg: op, raw: strings.Repeat("\x00", 8192)},
			{cont: true, csg: op, raw: "\x00", status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-8 long answers come in pieces", done: true, script: []exchange{
			{transit: true, csg: op, nsg: ffp, keys: append(names(), many...), continues: true, want: []string{"TargetPortalGroupTag=1", "*"}},
			{transit: true, csg: op, nsg: ffp, transited: true}}},
		{name: "ISCSI-13 authentication skipped", backend: stubBackend{chap: &testCHAP}, script: []exchange{
			{transit: true, csg: op, nsg: ffp, keys: names(), status: pdu.LoginAuthFailure}}},
		{name: "ISCSI-13 security stage left without CHAP", backend: stubBackend{chap: &testCHAP}, script: []exchange{
			{transit: true, csg: sec, nsg: op, keys: names(), status: pdu.LoginAuthFailure}}},
		{name: "ISCSI-13 AuthMethod=None where CHAP is needed", backend: stubBackend{chap: &testCHAP}, script: []exchange{
			{transit: true, csg: sec, nsg: op, keys: names("AuthMethod=None"), status: pdu.LoginAuthFailure}}},
		{name: "ISCSI-20 text without a key", script: []exchange{{csg: op, raw: "nonsense\x00", status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-22 unknown key", script: []exchange{{csg: op, keys: names("X-net.example.key=1"), want: []string{"TargetPortalGroupTag=1", "TargetAlias=disk", "X-net.example.key=NotUnderstood", "*"}}}},
		{name: "ISCSI-26 the initiator does not understand what we declared", done: true, script: []exchange{
			{csg: op, keys: names(), want: []string{"TargetPortalGroupTag=1", "TargetAlias=disk", "MaxRecvDataSegmentLength=262144"}},
			{transit: true, csg: op, nsg: ffp, keys: []string{"TargetPortalGroupTag=NotUnderstood", "TargetAlias=NotUnderstood", "MaxRecvDataSegmentLength=NotUnderstood"}, transited: true, want: []string{}}}},
		{name: "ISCSI-22 reserved word as a proposal", script: []exchange{{csg: op, keys: names("InitialR2T=Irrelevant"), status: pdu.LoginInitiatorError}}},
		{name: "ISCSI-25 FirstBurstLength above MaxBurstLength in a later text", script: []exchange{
			{csg: op, keys: names("FirstBurstLength=65536"), want: []string{"TargetPortalGroupTag=1", "TargetAlias=disk", "FirstBurstLength=65536", "*"}},
			{transit: true, csg: op, nsg: ffp, keys: []string{"MaxBurstLength=512"}, status: pdu.LoginInitiatorError}}},
		{name: "status 0202", backend: stubBackend{err: ErrForbidden}, script: []exchange{{csg: op, keys: names(), status: pdu.LoginForbidden}}},
		{name: "status 0203", backend: stubBackend{err: ErrNotFound}, script: []exchange{{csg: op, keys: names(), status: pdu.LoginNotFound}}},
		{name: "status 0204", backend: stubBackend{err: ErrRemoved}, script: []exchange{{csg: op, keys: names(), status: pdu.LoginRemoved}}},
		{name: "status 0301", backend: stubBackend{err: ErrUnavailable}, script: []exchange{{csg: op, keys: names(), status: pdu.LoginServiceUnavailable}}},
		{name: "status 0300", backend: stubBackend{err: errors.New("broken")}, script: []exchange{{csg: op, keys: names(), status: pdu.LoginTargetError}}},
		{name: "ISCSI-34 short secret", backend: stubBackend{chap: &CHAP{User: "joe", Secret: []byte("short")}}, script: []exchange{{csg: sec, keys: names(), status: pdu.LoginTargetError}}},
		{name: "status 0209", script: []exchange{{csg: op, keys: names("SessionType=Other"), status: pdu.LoginUnsupportedType}}},
		{name: "6.3.1 unknown TSIH", script: []exchange{{csg: op, keys: names(), change: func(r *pdu.LoginRequest) { r.TSIH = 9 }, status: pdu.LoginNoSession}}},
		{name: "6.3.1 new connection: session-wide keys are not negotiated again", done: true,
			join: func(sessionKey, uint16) (*session, bool) { return &session{params: defaults()}, true },
			script: []exchange{{transit: true, csg: op, nsg: ffp, keys: names("InitialR2T=No", "HeaderDigest=CRC32C"), change: func(r *pdu.LoginRequest) { r.TSIH = 9 }, transited: true,
				want: []string{"TargetPortalGroupTag=1", "TargetAlias=disk", "InitialR2T=Reject", "HeaderDigest=CRC32C", "*"}}}},
		{name: "ISCSI-95 name", script: []exchange{{csg: op, keys: []string{"InitiatorName=Joe", "TargetName=" + testTarget}, status: pdu.LoginInitiatorError}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := testLogin(&tt.backend, new(challenges), tt.join)
			defer m.close()
			for i := range tt.script {
				r, text := tt.script[i].send(m)
				if len(text) > loginSegment {
					t.Errorf("exchange %d: %d bytes of text", i, len(text))
				}
				tt.script[i].check(t, i, r, text)
			}
			if m.done != tt.done {
				t.Errorf("done is %v", m.done)
			}
		})
	}
}

// ISCSI-12: after a failure nothing is accepted any more.
func TestLoginIsOverAfterFailure(t *testing.T) {
	m := testLogin(&stubBackend{err: ErrForbidden}, new(challenges), nil)
	x := exchange{csg: pdu.StageOperational, keys: names()}
	x.send(m)
	if r, _ := x.send(m); r.Status != pdu.LoginInvalidRequest {
		t.Errorf("status %v", r.Status)
	}
}

func TestNegotiation(t *testing.T) {
	rdma := testOffer
	rdma.rdma = true
	tests := []struct {
		name      string
		offer     offer
		discovery bool
		in, want  string
		check     func(p *Parameters) bool
	}{
		{name: "what open-iscsi offers (ISCSI-26b)", in: "HeaderDigest=None DataDigest=None DefaultTime2Wait=2 DefaultTime2Retain=0 IFMarker=No OFMarker=No ErrorRecoveryLevel=0 " +
			"InitialR2T=No ImmediateData=Yes MaxBurstLength=16776192 FirstBurstLength=262144 MaxOutstandingR2T=1 MaxConnections=1 DataPDUInOrder=Yes DataSequenceInOrder=Yes MaxRecvDataSegmentLength=262144",
			want: "HeaderDigest=None DataDigest=None DefaultTime2Wait=2 DefaultTime2Retain=0 IFMarker=No OFMarker=No ErrorRecoveryLevel=0 " +
				"InitialR2T=No ImmediateData=Yes MaxBurstLength=1048576 FirstBurstLength=65536 MaxOutstandingR2T=1 MaxConnections=1 DataPDUInOrder=Yes DataSequenceInOrder=Yes",
			check: func(p *Parameters) bool {
				return !p.InitialR2T && p.ImmediateData && p.FirstBurstLength == 65536 && p.InitiatorMaxRecvDataSegmentLength == 262144
			}},
		{name: "ISCSI-23 lists", in: "HeaderDigest=X,None,CRC32C DataDigest=CRC32C,None TaskReporting=FastAbort,RFC3720", want: "HeaderDigest=None DataDigest=CRC32C TaskReporting=RFC3720",
			check: func(p *Parameters) bool { return !p.HeaderDigest && p.DataDigest }},
		{name: "ISCSI-23 nothing supported", in: "HeaderDigest=SHA1 TaskReporting=Other", want: "HeaderDigest=Reject TaskReporting=Reject"},
		{name: "ISCSI-21 hexadecimal", in: "MaxBurstLength=0x1000", want: "MaxBurstLength=4096"},
		{name: "ISCSI-21 bad values", in: "MaxBurstLength=1k InitialR2T=yes MaxConnections=-1 ErrorRecoveryLevel=99999999999999999999", want: "MaxBurstLength=Reject InitialR2T=Reject MaxConnections=Reject ErrorRecoveryLevel=Reject"},
		{name: "ISCSI-25 out of range", in: "MaxBurstLength=511 FirstBurstLength=16777216 MaxConnections=0 DefaultTime2Wait=3601 ErrorRecoveryLevel=3 iSCSIProtocolLevel=32",
			want: "MaxBurstLength=Reject FirstBurstLength=Reject MaxConnections=Reject DefaultTime2Wait=Reject ErrorRecoveryLevel=Reject iSCSIProtocolLevel=Reject"},
		{name: "ISCSI-25 FirstBurstLength stays within MaxBurstLength, whatever the order", in: "FirstBurstLength=65536 MaxBurstLength=1024", want: "FirstBurstLength=1024 MaxBurstLength=1024"},
		{name: "ISCSI-25 the default of FirstBurstLength too", in: "MaxBurstLength=1024", want: "MaxBurstLength=1024", check: func(p *Parameters) bool { return p.FirstBurstLength == 1024 }},
		{name: "ISCSI-24 booleans are answered", in: "ImmediateData=No DataPDUInOrder=No DataSequenceInOrder=No InitialR2T=Yes", want: "ImmediateData=No DataPDUInOrder=Yes DataSequenceInOrder=Yes InitialR2T=Yes",
			check: func(p *Parameters) bool { return p.Unsolicited() == 0 }},
		{name: "13.25 markers", in: "IFMarker=Yes OFMarker=Yes IFMarkInt=1~2 OFMarkInt=2048", want: "IFMarker=No OFMarker=No IFMarkInt=Reject OFMarkInt=Reject"},
		{name: "ISCSI-82 recovery level", in: "ErrorRecoveryLevel=2", want: "ErrorRecoveryLevel=0"},
		{name: "ISCSI-97 protocol level", in: "iSCSIProtocolLevel=31", want: "iSCSIProtocolLevel=2", check: func(p *Parameters) bool { return p.ProtocolLevel == 2 }},
		{name: "declarations are not answered", in: "InitiatorAlias=me X#NodeArchitecture=PDP MaxRecvDataSegmentLength=512", want: "", check: func(p *Parameters) bool { return p.initiatorAlias == "me" }},
		{name: "ISCSI-74 irrelevant in discovery", discovery: true, in: "MaxConnections=2 InitialR2T=No MaxBurstLength=512 TaskReporting=RFC3720 ErrorRecoveryLevel=1 HeaderDigest=CRC32C",
			want: "MaxConnections=Irrelevant InitialR2T=Irrelevant MaxBurstLength=Irrelevant TaskReporting=Irrelevant ErrorRecoveryLevel=0 HeaderDigest=CRC32C"},
		{name: "ISER-1 RDMAExtensions over TCP", in: "RDMAExtensions=Yes TargetRecvDataSegmentLength=4096", want: "RDMAExtensions=No TargetRecvDataSegmentLength=Irrelevant"},
		{name: "ISER-6 digests are None", offer: rdma, in: "HeaderDigest=CRC32C,None TargetRecvDataSegmentLength=4096 InitiatorRecvDataSegmentLength=4096 RDMAExtensions=Yes",
			want: "HeaderDigest=None TargetRecvDataSegmentLength=4096 InitiatorRecvDataSegmentLength=4096 RDMAExtensions=Yes", check: func(p *Parameters) bool { return p.RDMAExtensions && !p.HeaderDigest }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.offer == (offer{}) {
				tt.offer = testOffer
			}
			n := negotiation{offer: tt.offer, p: defaults(), leading: true, discovery: tt.discovery}
			var in pdu.Pairs
			for _, kv := range strings.Fields(tt.in) {
				k, v, _ := strings.Cut(kv, "=")
				in.Add(k, v)
			}
			out, ok := n.evaluate(in)
			if !ok || !n.finish() {
				t.Fatal("protocol error")
			}
			var got []string
			for _, kv := range out {
				got = append(got, kv.Key+"="+kv.Value)
			}
			if s := strings.Join(got, " "); s != tt.want {
				t.Errorf("answer\n %s, want\n %s", s, tt.want)
			}
			if tt.check != nil && !tt.check(&n.p) {
				t.Errorf("parameters %+v", n.p)
			}
		})
	}
}

// ISCSI-26a: whatever the initiator offers, the target originates only keys that open-iscsi knows.
func TestTargetOriginatesKnownKeysOnly(t *testing.T) {
	m := testLogin(&stubBackend{}, new(challenges), nil)
	x := exchange{transit: true, csg: pdu.StageOperational, nsg: pdu.StageFullFeature, keys: names()}
	_, text := x.send(m)
	pairs, err := pdu.ParseText(text)
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range pairs {
		switch kv.Key {
		case "TargetPortalGroupTag", "TargetAlias", "MaxRecvDataSegmentLength":
		default:
			t.Errorf("originated %s", kv.Key)
		}
	}
}

// chapLogin runs a login with CHAP; answer makes the keys of the third request from id and challenge.
func chapLogin(t *testing.T, m *loginMachine, list string, answer func(id byte, challenge []byte) []string) (pdu.LoginResponse, pdu.Pairs) {
	t.Helper()
	const sec, op = pdu.StageSecurity, pdu.StageOperational
	x := exchange{csg: sec, keys: names("AuthMethod=CHAP,None")}
	if r, _ := x.send(m); r.Status != pdu.LoginSuccess {
		t.Fatalf("AuthMethod: %v", r.Status)
	}
	x = exchange{csg: sec, keys: []string{"CHAP_A=" + list}}
	r, text := x.send(m)
	if r.Status != pdu.LoginSuccess {
		return r, nil
	}
	p, _ := pdu.ParseText(text)
	idText, _ := p.Get("CHAP_I")
	challengeText, _ := p.Get("CHAP_C")
	id, err := pdu.ParseNumber(idText, 0, 255)
	if err != nil {
		t.Fatal(err)
	}
	challenge, err := pdu.ParseBinary(challengeText, 1024)
	if err != nil {
		t.Fatal(err)
	}
	x = exchange{transit: true, csg: sec, nsg: op, keys: answer(byte(id), challenge)}
	r, text = x.send(m)
	p, _ = pdu.ParseText(text)
	return r, p
}

func chapMD5(id byte, secret string, c []byte) string {
	s := md5.Sum(append(append([]byte{id}, secret...), c...))
	return pdu.FormatHex(s[:])
}

func TestCHAP(t *testing.T) {
	secret, mutual := string(testCHAP.Secret), string(testCHAP.MutualSecret)
	sha := func(id byte, c []byte) []string {
		s := sha256.Sum256(append(append([]byte{id}, secret...), c...))
		return []string{"CHAP_N=joe", "CHAP_R=" + pdu.FormatHex(s[:])}
	}
	good := func(more ...string) func(byte, []byte) []string {
		return func(id byte, c []byte) []string {
			return append([]string{"CHAP_N=joe", "CHAP_R=" + chapMD5(id, secret, c)}, more...)
		}
	}
	tests := []struct {
		name   string
		list   string
		answer func(byte, []byte) []string
		status pdu.LoginStatus
		mutual string
	}{
		{name: "ISCSI-30 MD5", list: "5", answer: good()},
		{name: "ISCSI-30 SHA-256", list: "7,5", answer: sha},
		{name: "ISCSI-36 first of the initiator's list", list: "6,5,7", answer: good()},
		{name: "ISCSI-36 none acceptable", list: "6,8", status: pdu.LoginAuthFailure},
		{name: "ISCSI-36 empty list", list: "", status: pdu.LoginAuthFailure},
		{name: "ISCSI-31 base64", list: "5", answer: func(id byte, c []byte) []string {
			s := md5.Sum(append(append([]byte{id}, secret...), c...))
			return []string{"CHAP_N=joe", "CHAP_R=" + pdu.FormatBase64(s[:])}
		}},
		{name: "ISCSI-31 response too long", list: "5", status: pdu.LoginInitiatorError, answer: func(byte, []byte) []string {
			return []string{"CHAP_N=joe", "CHAP_R=" + pdu.FormatBase64(make([]byte, 1025))}
		}},
		{name: "ISCSI-32 wrong secret", list: "5", status: pdu.LoginAuthFailure, answer: func(id byte, c []byte) []string {
			return []string{"CHAP_N=joe", "CHAP_R=" + chapMD5(id, "another secret", c)}
		}},
		{name: "ISCSI-32 wrong length", list: "5", status: pdu.LoginAuthFailure, answer: func(byte, []byte) []string { return []string{"CHAP_N=joe", "CHAP_R=0x00"} }},
		{name: "ISCSI-35 wrong user", list: "5", status: pdu.LoginAuthFailure, answer: func(id byte, c []byte) []string {
			return []string{"CHAP_N=jim", "CHAP_R=" + chapMD5(id, secret, c)}
		}},
		{name: "ISCSI-32 missing CHAP_R", list: "5", status: pdu.LoginMissingParameter, answer: func(byte, []byte) []string { return []string{"CHAP_N=joe", "CHAP_I=1", "CHAP_C=0x1122"} }},
		{name: "ISCSI-32 missing CHAP_N", list: "5", status: pdu.LoginMissingParameter, answer: func(id byte, c []byte) []string { return []string{"CHAP_R=" + chapMD5(id, secret, c)} }},
		{name: "ISCSI-32 malformed CHAP_R", list: "5", status: pdu.LoginInitiatorError, answer: func(byte, []byte) []string { return []string{"CHAP_N=joe", "CHAP_R=12"} }},
		{name: "ISCSI-30 mutual", list: "5", answer: good("CHAP_I=3", "CHAP_C=0x0102030405060708"), mutual: chapMD5(3, mutual, []byte{1, 2, 3, 4, 5, 6, 7, 8})},
		{name: "ISCSI-32 mutual without CHAP_C", list: "5", answer: good("CHAP_I=3"), status: pdu.LoginMissingParameter},
		{name: "ISCSI-33 reflection of our challenge", list: "5", status: pdu.LoginAuthFailure, answer: func(id byte, c []byte) []string {
			return append(good()(id, c), "CHAP_I=3", "CHAP_C="+pdu.FormatHex(c))
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			book := new(challenges)
			m := testLogin(&stubBackend{chap: &testCHAP}, book, nil)
			r, keys := chapLogin(t, m, tt.list, tt.answer)
			if r.Status != tt.status {
				t.Fatalf("status %v, want %v", r.Status, tt.status)
			}
			if tt.status == pdu.LoginSuccess && (!r.Transit || !m.authenticated) {
				t.Error("not authenticated")
			}
			if got, _ := keys.Get("CHAP_R"); got != tt.mutual {
				t.Errorf("mutual response %q, want %q", got, tt.mutual)
			}
			if tt.mutual != "" {
				if n, _ := keys.Get("CHAP_N"); n != "target" {
					t.Errorf("CHAP_N=%s", n)
				}
			}
			m.close()
			if len(book.open) != 0 {
				t.Error("a challenge is left")
			}
		})
	}
}

// ISCSI-33: a challenge of one connection is not answered on another.
func TestCHAPReflectionAcrossConnections(t *testing.T) {
	book := new(challenges)
	first := testLogin(&stubBackend{chap: &testCHAP}, book, nil)
	defer first.close()
	for _, x := range []exchange{{keys: names("AuthMethod=CHAP")}, {keys: []string{"CHAP_A=5"}}} {
		x.send(first)
	}
	second := testLogin(&stubBackend{chap: &testCHAP}, book, nil)
	defer second.close()
	r, _ := chapLogin(t, second, "5", func(id byte, c []byte) []string {
		return []string{"CHAP_N=joe", "CHAP_R=" + chapMD5(id, string(testCHAP.Secret), c), "CHAP_I=" + itoa(first.chap.id), "CHAP_C=" + pdu.FormatHex(first.chap.challenge)}
	})
	if r.Status != pdu.LoginAuthFailure {
		t.Errorf("status %v", r.Status)
	}
}

// ISCSI-15: all connections of a session authenticate as the same user.
func TestCHAPUserOfTheSession(t *testing.T) {
	for user, want := range map[string]pdu.LoginStatus{"joe": pdu.LoginSuccess, "jim": pdu.LoginAuthFailure} {
		m := testLogin(&stubBackend{chap: &testCHAP}, new(challenges), nil)
		m.cfg.session = func(sessionKey, uint16) (*session, bool) { return &session{chapUser: user, params: defaults()}, true }
		m.first = &pdu.LoginRequest{TSIH: 5}
		m.joins, m.access = &session{chapUser: user}, Access{CHAP: &testCHAP}
		m.chap = &chapExchange{creds: &testCHAP, allowed: []CHAPAlgorithm{CHAPMD5}, book: m.cfg.book, algorithm: CHAPMD5, id: 1, challenge: []byte("challenge")}
		_, status, _ := m.authenticate(pdu.Pairs{{Key: "CHAP_N", Value: "joe"}, {Key: "CHAP_R", Value: chapMD5(1, string(testCHAP.Secret), []byte("challenge"))}})
		if status != want {
			t.Errorf("%s: %v, want %v", user, status, want)
		}
	}
}

// ISCSI-34.
func TestCHAPValidate(t *testing.T) {
	good := []byte("twelve bytes")
	for _, tt := range []struct {
		c  CHAP
		ok bool
	}{
		{CHAP{User: "u", Secret: good}, true},
		{CHAP{User: "u", Secret: good, MutualUser: "t", MutualSecret: []byte("another secret")}, true},
		{CHAP{Secret: good}, false},
		{CHAP{User: "u", Secret: good[:11]}, false},
		{CHAP{User: "u", Secret: good, MutualUser: "t", MutualSecret: good}, false},
		{CHAP{User: "u", Secret: good, MutualSecret: []byte("another secret")}, false},
		{CHAP{User: "u", Secret: good, MutualUser: "t", MutualSecret: []byte("short")}, false},
	} {
		if err := tt.c.Validate(); (err == nil) != tt.ok || err != nil && !errors.Is(err, ErrSecret) {
			t.Errorf("%+v: %v", tt.c, err)
		}
	}
}

func TestCheckName(t *testing.T) {
	for name, ok := range map[string]bool{
		"iqn.2001-04.com.example":                    true,
		"iqn.2001-04.com.example:storage:disk.1":     true,
		"iqn.2001-04.com.example:speicher.für.alle":  true,
		"iqn.2007-10.com.github:sahlberg:libiscsi:x": true,
		"eui.02004567A425678D":                       true,
		"naa.52004567BA64678D":                       true,
		"naa.62004567BA64678D0123456789ABCDEF":       true,
		"":                                           false,
		"iqn":                                        false,
		"iqn.":                                       false,
		"iqn.2001-13.com.example":                    false,
		"iqn.01-04.com.example":                      false,
		"iqn.2001-04.com.Example":                    false,
		"iqn.2001-04.com.example:a b":                false,
		"iqn.2001-04.com.example:a\x00":              false,
		"iqn.2001-04.com.example:\xff":               false,
		"eui.02004567A425678":                        false,
		"naa.52004567BA64678DX":                      false,
		"disk":                                       false,
		"iqn.2001-04.x" + strings.Repeat("y", 220):   false,
	} {
		if err := CheckName(name); (err == nil) != ok || err != nil && !errors.Is(err, ErrName) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// FuzzLoginText feeds a login arbitrary requests: it never panics, never answers more than a segment, and
// never completes without the name of an initiator that the backend let in.
func FuzzLoginText(f *testing.F) {
	f.Add(byte(0x87), []byte(strings.Join(names("HeaderDigest=CRC32C"), "\x00")+"\x00"), byte(0x87), []byte{})
	f.Add(byte(0x81), []byte(strings.Join(names("AuthMethod=CHAP"), "\x00")+"\x00"), byte(0x00), []byte("CHAP_A=5,7\x00"))
	f.Add(byte(0x44), []byte("InitiatorName=iqn.2001-04"), byte(0x87), []byte(".com.example:host\x00SessionType=Discovery\x00"))
	f.Fuzz(func(t *testing.T, flags1 byte, text1 []byte, flags2 byte, text2 []byte) {
		for _, b := range []*stubBackend{{}, {chap: &testCHAP}} {
			m := testLogin(b, new(challenges), nil)
			for _, x := range []struct {
				flags byte
				text  []byte
			}{{flags1, text1}, {flags2, text2}, {flags2, text1}} {
				var h pdu.Header
				req := pdu.LoginRequest{ISID: pdu.ISID{0x40}, ITT: 1}
				req.Encode(&h)
				h[1] = x.flags
				r, out := m.step(&h, x.text)
				if len(out) > loginSegment || r.Transit && r.Continue || r.Status != 0 && r.Transit {
					t.Fatalf("response %+v with %d bytes", r, len(out))
				}
			}
			if m.done && (CheckName(m.initiator) != nil || b.chap != nil && !m.authenticated) {
				t.Fatalf("logged in as %q", m.initiator)
			}
			m.close()
		}
	})
}
