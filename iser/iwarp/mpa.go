package iwarp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// MPA request and reply frames (RFC 5044, 7.1.1; RFC 6581, 4 and 9). They are the first bytes of each direction; no CRC, no markers.
//
//	 0  16  key: "MPA ID Req Frame" or "MPA ID Rep Frame"
//	16   1  M 0x80: the sender wants markers in what it receives; C 0x40: wants CRC; R 0x20: rejected, of replies; S 0x10: enhanced,
//	        revision 2 only. The rest is reserved (Linux's siw uses 0x08 for itself) and not looked at
//	17   1  revision
//	18   2  length of the private data, 0 to 512
//	20   n  private data. If S: first 4 bytes of two words,
//	        word 0: A 0x8000 peer to peer, B 0x4000 RTR is a Send, 14 bits IRD
//	        word 1: C 0x8000 RTR is a Write, D 0x4000 RTR is a Read, 14 bits ORD
const (
	requestKey = "MPA ID Req Frame"
	replyKey   = "MPA ID Rep Frame"

	frameLen       = 20
	maxPrivateData = 512
	enhancedLen    = 4

	flagMarkers  = 0x80
	flagCRC      = 0x40
	flagReject   = 0x20
	flagEnhanced = 0x10

	// depthMask is the largest IRD or ORD, and means that it is not negotiated (RFC 6581, 9.1).
	depthMask = 0x3fff
)

// RTR is a set of the forms of the first frame in the peer-to-peer model (RFC 6581, 9.2).
type RTR uint8

// Forms. Their order is the order of preference.
const (
	RTRWrite RTR = 1 << iota // zero-length RDMA Write
	RTRRead                  // zero-length RDMA Read
	RTRSend                  // zero-length Send
)

// Errors of the start-up. All of them end the connection.
var (
	// ErrMPA: the peer's request or reply frame is malformed, or not one at all.
	ErrMPA = errors.New("iwarp: not a valid MPA frame")
	// ErrRevision: the peer's revision of MPA, or its use of it, is not one we can talk to.
	ErrRevision = errors.New("iwarp: MPA revision is not supported")
	// ErrNegotiation: no common depths or RTR form.
	ErrNegotiation = errors.New("iwarp: MPA negotiation failed")
)

// frame is a decoded request or reply.
type frame struct {
	markers, crc, reject, enhanced bool

	revision uint8
	peer     bool // A
	rtr      RTR
	ird, ord int
	private  []byte // without the enhanced words
}

// decodeFrame decodes what follows the key in a frame whose private data is complete: b is the whole frame. It keeps a reference to b.
func (f *frame) decode(b []byte, key string) error {
	if len(b) < frameLen || string(b[:16]) != key {
		return fmt.Errorf("%w: wrong key", ErrMPA)
	}
	n := int(binary.BigEndian.Uint16(b[18:]))
	if n > maxPrivateData || n != len(b)-frameLen {
		return fmt.Errorf("%w: %d bytes of private data", ErrMPA, n)
	}
	*f = frame{
		markers: b[16]&flagMarkers != 0, crc: b[16]&flagCRC != 0, reject: b[16]&flagReject != 0, enhanced: b[16]&flagEnhanced != 0,
		revision: b[17], private: b[frameLen:],
	}
	if f.revision < 1 || f.revision > 2 {
		return fmt.Errorf("%w: revision %d", ErrRevision, f.revision)
	}
	if !f.enhanced {
		return nil
	}
	if f.revision < 2 {
		return fmt.Errorf("%w: enhanced set-up in revision %d", ErrRevision, f.revision)
	}
	if n < enhancedLen {
		return fmt.Errorf("%w: %d bytes of private data in an enhanced frame", ErrMPA, n)
	}
	w0, w1 := binary.BigEndian.Uint16(b[20:]), binary.BigEndian.Uint16(b[22:])
	f.ird, f.ord = int(w0&depthMask), int(w1&depthMask)
	if f.peer = w0&0x8000 != 0; f.peer {
		if w0&0x4000 != 0 {
			f.rtr |= RTRSend
		}
		if w1&0x8000 != 0 {
			f.rtr |= RTRWrite
		}
		if w1&0x4000 != 0 {
			f.rtr |= RTRRead
		}
	}
	f.private = b[frameLen+enhancedLen:]
	return nil
}

// append encodes f. The private data must fit.
func (f *frame) append(b []byte, key string) []byte {
	var flags byte
	for _, x := range []struct {
		on   bool
		flag byte
	}{{f.markers, flagMarkers}, {f.crc, flagCRC}, {f.reject, flagReject}, {f.enhanced, flagEnhanced}} {
		if x.on {
			flags |= x.flag
		}
	}
	n := len(f.private)
	if f.enhanced {
		n += enhancedLen
	}
	b = append(b, key...)
	b = append(b, flags, f.revision)
	b = binary.BigEndian.AppendUint16(b, uint16(n))
	if f.enhanced {
		w0, w1 := uint16(f.ird&depthMask), uint16(f.ord&depthMask)
		if f.peer {
			w0 |= 0x8000
			if f.rtr&RTRSend != 0 {
				w0 |= 0x4000
			}
			if f.rtr&RTRWrite != 0 {
				w1 |= 0x8000
			}
			if f.rtr&RTRRead != 0 {
				w1 |= 0x4000
			}
		}
		b = binary.BigEndian.AppendUint16(b, w0)
		b = binary.BigEndian.AppendUint16(b, w1)
	}
	return append(b, f.private...)
}

// room is how much private data of the user fits into a frame like f.
func (f *frame) room() int {
	if f.enhanced {
		return maxPrivateData - enhancedLen
	}
	return maxPrivateData
}

// readFrame reads one frame and not a byte more: what follows are FPDUs. A wrong key is noticed at its first wrong byte.
func readFrame(r io.Reader, key string) (*frame, error) {
	b := make([]byte, frameLen, 64)
	for got := 0; got < len(b); {
		n, err := r.Read(b[got:])
		got += n
		if k := min(got, len(key)); string(b[:k]) != key[:k] {
			return nil, fmt.Errorf("%w: wrong key", ErrMPA)
		}
		if err != nil && got < len(b) {
			return nil, cut(err, got)
		}
	}
	n := int(binary.BigEndian.Uint16(b[18:]))
	if n > maxPrivateData {
		return nil, fmt.Errorf("%w: %d bytes of private data", ErrMPA, n)
	}
	b = append(b, make([]byte, n)...)
	if got, err := io.ReadFull(r, b[frameLen:]); err != nil {
		return nil, cut(err, frameLen+got)
	}
	f := new(frame)
	return f, f.decode(b, key)
}

// cut names the end of a connection within a frame.
func cut(err error, got int) error {
	if got > 0 && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)) {
		return fmt.Errorf("%w: it ends after %d bytes", ErrMPA, got)
	}
	return fmt.Errorf("iwarp: waiting for the peer's MPA frame: %w", err)
}
