package iwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/xml"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// What Wireshark makes of our frames. A proxy between our two ends records what they send; tshark gets it as a capture file of TCP segments of a chosen size. Nothing needs a privilege.

// chunk is what one side wrote.
type chunk struct {
	back bool // from the responder
	data []byte
}

// recorder is a proxy that keeps what passes.
type recorder struct {
	mu     sync.Mutex
	chunks []chunk
	done   sync.WaitGroup
}

func (r *recorder) conns(t testing.TB) (net.Conn, net.Conn) {
	a, pa := overTCP(t)
	pb, b := overTCP(t)
	r.done.Add(2)
	pass := func(from, to net.Conn, back bool) {
		defer r.done.Done()
		buf := make([]byte, 256<<10)
		for {
			n, err := from.Read(buf)
			r.mu.Lock()
			if n > 0 {
				r.chunks = append(r.chunks, chunk{back, bytes.Clone(buf[:n])})
			}
			r.mu.Unlock()
			to.Write(buf[:n]) // an error comes back by the other direction
			if err != nil {
				to.(*net.TCPConn).CloseWrite()
				return
			}
		}
	}
	go pass(pa, pb, false)
	go pass(pb, pa, true)
	t.Cleanup(func() { pa.Close(); pb.Close() })
	return a, b
}

// stop waits for both directions to end and returns what was sent.
func (r *recorder) stop() []chunk {
	r.done.Wait()
	return r.chunks
}

// pcap writes a capture file: Ethernet, IPv4, TCP with its handshake, and segments of at most mss bytes.
func pcap(chunks []chunk, mss int) []byte {
	var b []byte
	le := binary.LittleEndian
	b = le.AppendUint32(b, 0xa1b2c3d4)
	b = le.AppendUint32(b, 2|4<<16)
	b = append(b, make([]byte, 8)...)
	b = le.AppendUint32(b, 256<<10)
	b = le.AppendUint32(b, 1)
	seq := [2]uint32{1000, 5000} // next of the initiator, of the responder
	packets := 0
	segment := func(from int, flags byte, data []byte) {
		be := binary.BigEndian
		p := make([]byte, 14+20+20, 14+20+20+len(data))
		p[5], p[11], p[12] = byte(2-from), byte(1+from), 8 // addresses 1 and 2
		ip, tcp := p[14:], p[34:]
		ip[0], ip[8], ip[9] = 0x45, 64, 6
		be.PutUint16(ip[2:], uint16(40+len(data)))
		copy(ip[12:], []byte{10, 0, 0, byte(1 + from)})
		copy(ip[16:], []byte{10, 0, 0, byte(2 - from)})
		sum := uint32(0)
		for i := 0; i < 20; i += 2 {
			sum += uint32(be.Uint16(ip[i:]))
		}
		be.PutUint16(ip[10:], ^uint16(sum+sum>>16))
		ports := [2]uint16{40000, 3260}
		be.PutUint16(tcp, ports[from])
		be.PutUint16(tcp[2:], ports[1-from])
		be.PutUint32(tcp[4:], seq[from])
		if flags&0x10 != 0 {
			be.PutUint32(tcp[8:], seq[1-from])
		}
		tcp[12], tcp[13] = 5<<4, flags
		be.PutUint16(tcp[14:], 0xffff)
		p = append(p, data...)
		seq[from] += uint32(len(data))
		if flags&3 != 0 {
			seq[from]++
		}
		packets++
		b = le.AppendUint32(b, uint32(1+packets/1000000))
		b = le.AppendUint32(b, uint32(packets%1000000))
		b = le.AppendUint32(b, uint32(len(p)))
		b = le.AppendUint32(b, uint32(len(p)))
		b = append(b, p...)
	}
	segment(0, 2, nil)
	segment(1, 0x12, nil)
	segment(0, 0x10, nil)
	side := map[bool]int{false: 0, true: 1}
	for i, c := range chunks {
		// What one side wrote without an answer in between is one stream of full segments.
		if i > 0 && chunks[i-1].back == c.back {
			continue
		}
		var all []byte
		for _, d := range chunks[i:] {
			if d.back != c.back {
				break
			}
			all = append(all, d.data...)
		}
		for s := range slices.Chunk(all, mss) {
			segment(side[c.back], 0x18, s)
		}
	}
	segment(0, 0x11, nil)
	segment(1, 0x11, nil)
	segment(0, 0x10, nil)
	return b
}

// dissection is what tshark says of a capture.
type dissection struct {
	requests, replies int
	ulpdus            []int // their lengths, sorted
	opcodes           map[opcode]int
	crcs              int
	terminates        []string // layer, type, code
	complaints        []string
}

// dissect runs tshark, of Debian's package of that name.
func dissect(t *testing.T, capture []byte) *dissection {
	t.Helper()
	path, err := exec.LookPath("tshark")
	if err != nil {
		if os.Getenv("ISERGATE_REQUIRE_ALL") == "1" {
			t.Fatalf("%v, and ISERGATE_REQUIRE_ALL=1 asks for it", err)
		}
		t.Skipf("%v (Debian: tshark)", err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "capture.pcap")
	if err := os.WriteFile(file, capture, 0o600); err != nil {
		t.Fatal(err)
	}
	// Two protocols above RDMAP guess at every Send whether it is theirs.
	args := []string{"-n", "-r", file, "--disable-protocol", "rpcordma", "--disable-protocol", "smb_direct", "-T", "pdml",
		"-Y", "iwarp_mpa || _ws.malformed || _ws.expert.severity > \"Note\""}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_CONFIG_HOME="+dir) // a person's settings do not matter
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("tshark: %v\n%s", err, stderr.Bytes())
	}
	d := &dissection{opcodes: make(map[opcode]int)}
	packet, terminate := 0, []string(nil)
	for line := range strings.Lines(stdout.String()) { // each is an element at most
		if !strings.Contains(line, `name="iwarp_`) && !strings.Contains(line, `name="_ws.`) && !strings.Contains(line, `name="frame.number"`) {
			continue
		}
		token, err := xml.NewDecoder(strings.NewReader(strings.TrimSpace(line))).Token()
		if err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		element, ok := token.(xml.StartElement)
		if !ok {
			t.Fatalf("%q", line)
		}
		a := make(map[string]string)
		for _, attr := range element.Attr {
			a[attr.Name.Local] = attr.Value
		}
		number := func() int {
			n, err := strconv.ParseUint(a["show"], 0, 64)
			if err != nil {
				t.Fatalf("%v: %v", a, err)
			}
			return int(n)
		}
		complain := func() {
			d.complaints = append(d.complaints, fmt.Sprintf("packet %d: %s %s", packet, a["name"], a["showname"]))
		}
		switch name := a["name"]; name {
		case "frame.number":
			packet = number()
		case "iwarp_mpa.key.req":
			d.requests++
		case "iwarp_mpa.key.rep":
			d.replies++
		case "iwarp_mpa.ulpdulength":
			d.ulpdus = append(d.ulpdus, number())
		case "iwarp_rdma.opcode":
			d.opcodes[opcode(number())]++
		case "iwarp_mpa.crc_check":
			if strings.Contains(a["showname"], "Good CRC32") {
				d.crcs++
			} else {
				complain()
			}
		case "_ws.malformed":
			complain()
		case "_ws.expert.severity":
			if number() > severityNote {
				complain()
			}
		case "iwarp_rdma.term_layer", "iwarp_rdma.term_etype_rdma", "iwarp_rdma.term_etype_ddp", "iwarp_rdma.term_etype_llp":
			terminate = append(terminate, strconv.Itoa(number()))
		case "iwarp_rdma.term_errcode_rdma", "iwarp_rdma.term_errcode_ddp_tagged", "iwarp_rdma.term_errcode_ddp_untagged", "iwarp_rdma.term_errcode_llp":
			d.terminates = append(d.terminates, strings.Join(append(terminate, strconv.Itoa(number())), "/"))
		}
	}
	slices.Sort(d.ulpdus)
	return d
}

// severityNote is that of connections that open and close, at most.
const severityNote = 0x400000

// summary is what our own reading of both directions says, of frames without markers.
func summary(t *testing.T, chunks []chunk) *dissection {
	d := &dissection{opcodes: make(map[opcode]int)}
	for _, back := range []bool{false, true} {
		var b []byte
		for _, c := range chunks {
			if c.back == back {
				b = append(b, c.data...)
			}
		}
		b = b[frameLen+int(binary.BigEndian.Uint16(b[18:])):]
		for len(b) > 0 {
			n := int(binary.BigEndian.Uint16(b))
			s, p := segmentOf(t, b)
			d.ulpdus = append(d.ulpdus, n)
			d.opcodes[s.op]++
			if s.op == opTerminate {
				d.terminates = append(d.terminates, fmt.Sprintf("%d/%d/%d", p[0]>>4, p[0]&15, p[1]))
			}
			b = b[lengthLen+n+padding(n)+crcLen:]
		}
	}
	slices.Sort(d.ulpdus)
	return d
}

// traffic has every kind of message of ours in it, of every padding, and ends with the Terminate for a wrong write or read. It returns how many
// messages of which kind there were.
func traffic(i, r *end, wrongRead bool) map[opcode]int {
	w := i.bind(0, 400_000, rdma.RemoteRead|rdma.RemoteWrite)
	sizes := []int{0, 1, 2, 3, 4, 76, 4096, 4097, 70_000}
	count := make(map[opcode]int)
	for n, size := range sizes {
		r.recv(rdma.RecvWR{ID: uint64(n), SGE: []rdma.SGE{r.sge(400_000, 100_000)}})
		wr := rdma.SendWR{Op: rdma.OpSend, SGE: []rdma.SGE{i.sge(0, size)}}
		if n%2 > 0 {
			wr.Flags = rdma.Solicited
			count[opSendSolicited]++
		} else {
			count[opSend]++
		}
		i.send(wr)
		r.good(1)
	}
	for _, size := range append(sizes, 400_000) {
		r.send(
			rdma.SendWR{Op: rdma.OpWrite, SGE: []rdma.SGE{r.sge(0, size)}, RKey: w.RKey(), RemoteAddr: w.Addr()},
			rdma.SendWR{Op: rdma.OpRead, SGE: []rdma.SGE{r.sge(0, size)}, RKey: w.RKey(), RemoteAddr: w.Addr(), Flags: rdma.Signaled})
		r.good(1)
		count[opWrite]++
		count[opReadRequest]++
		count[opReadResponse]++
	}
	for n := range 2 {
		x := i.bind(500_000, 100, rdma.RemoteWrite)
		i.recv(rdma.RecvWR{SGE: []rdma.SGE{i.sge(600_000, 100)}})
		wr := rdma.SendWR{Op: rdma.OpSendInvalidate, RKey: x.RKey(), SGE: []rdma.SGE{r.sge(0, 76)}}
		if n == 0 {
			wr.Flags = rdma.Solicited
			count[opSendSolicitedInvalidate]++
		} else {
			count[opSendInvalidate]++
		}
		r.send(wr)
		i.good(1)
		x.Close()
	}
	if wrongRead {
		r.send(rdma.SendWR{Op: rdma.OpRead, SGE: []rdma.SGE{r.sge(0, 100)}, RKey: w.RKey(), RemoteAddr: w.Addr() + 399_999})
		count[opReadRequest]++
	} else {
		r.send(rdma.SendWR{Op: rdma.OpWrite, SGE: []rdma.SGE{r.sge(0, 5)}, RKey: w.RKey() + 1, RemoteAddr: w.Addr()})
		count[opWrite]++
	}
	count[opTerminate]++
	r.ended()
	i.ended()
	r.qp.Close()
	i.qp.Close()
	w.Close()
	return count
}

// tshark reads every frame of ours, with and without CRC, of all sizes of segments, and finds nothing wrong: the same lengths and opcodes that we sent. One bit more or less, and it complains.
func TestTshark(t *testing.T) {
	for _, tt := range []struct {
		name      string
		opt       Options
		mss       int
		crc       bool
		wrongRead bool
		control   bool
	}{
		{"Ethernet", Options{MaxULPDU: 1442}, 1448, true, false, true},
		{"Ethernet, no CRC", Options{MaxULPDU: 1442, NoCRC: true}, 1448, false, true, false},
		{"jumbo frames", Options{MaxULPDU: 8942}, 8948, true, true, false},
		{"loopback", Options{MaxULPDU: maxULPDU}, 65_483, true, false, false},
		{"large FPDUs in small segments", Options{MaxULPDU: maxULPDU}, 1448, true, true, false},
		{"small FPDUs in large segments", Options{MaxULPDU: 128}, 5000, true, false, false},
		{"revision 1", Options{Revision: 1}, 1448, true, true, false},
		{"first frame is a Write", Options{PeerToPeer: true, RTR: RTRWrite}, 1448, true, true, false},
		{"first frame is a Read", Options{PeerToPeer: true, RTR: RTRRead}, 1448, true, true, false},
		{"first frame is a Send", Options{PeerToPeer: true, RTR: RTRSend}, 1448, true, true, false},
	} {
		if testing.Short() && !tt.control {
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			var rec recorder
			i, r := pair(t, rec.conns, tt.opt, tt.opt)
			messages := traffic(i, r, tt.wrongRead)
			chunks := rec.stop()
			want := summary(t, chunks)
			got := dissect(t, pcap(chunks, tt.mss))
			for _, c := range got.complaints {
				t.Errorf("tshark complains: %s", c)
			}
			if got.requests != 1 || got.replies != 1 {
				t.Errorf("%d MPA requests, %d replies", got.requests, got.replies)
			}
			if !maps.Equal(got.opcodes, want.opcodes) || !slices.Equal(got.ulpdus, want.ulpdus) || !slices.Equal(got.terminates, want.terminates) {
				t.Errorf("tshark sees %d ULPDUs, %v, Terminates %q; we %d, %v, %q", len(got.ulpdus), got.opcodes, got.terminates, len(want.ulpdus), want.opcodes, want.terminates)
			}
			for op, n := range messages {
				if got.opcodes[op] < n {
					t.Errorf("%d FPDUs of %d messages %v", got.opcodes[op], n, op)
				}
			}
			crcs := 0
			if tt.crc {
				crcs = len(want.ulpdus)
			}
			if got.crcs != crcs {
				t.Errorf("%d CRCs were checked, want %d", got.crcs, crcs)
			}
			if !tt.control {
				return
			}
			for k := len(chunks) - 1; ; k-- {
				if c := chunks[k]; !c.back && len(c.data) > frameLen+enhancedLen {
					c.data[len(c.data)-1] ^= 1 // of a CRC
					break
				}
			}
			if d := dissect(t, pcap(chunks, tt.mss)); len(d.complaints) == 0 {
				t.Error("tshark does not notice a wrong CRC")
			}
		})
	}
}

// tshark counts in the captures of the kernel's sessions what we count.
func TestTsharkCaptures(t *testing.T) {
	for _, c := range captures {
		got := dissect(t, unpack(t, c.name))
		if got.requests != 2 || got.replies != 2 || !maps.Equal(got.opcodes, c.fpdus) {
			t.Errorf("%s: tshark sees %d requests, %d replies, %v", c.name, got.requests, got.replies, got.opcodes)
		}
	}
}
