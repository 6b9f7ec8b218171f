package iwarp

import "fmt"

// agreed is what two frames agree on.
type agreed struct {
	crc      bool
	markers  bool // in what we send
	ird, ord int  // of our side
	rtr      RTR  // forms of the first frame; 0 if it is an ordinary one
}

// wish is what our side brings to the negotiation.
type wish struct {
	crc      bool
	ird, ord int
}

// answer makes the responder's reply to request, which is valid (RFC 5044, 7.1; RFC 6581, 9).
func answer(request *frame, w wish, private []byte) (*frame, agreed) {
	a := agreed{crc: request.crc || w.crc, markers: request.markers, ird: w.ird, ord: w.ord}
	reply := &frame{crc: a.crc, enhanced: request.enhanced, revision: request.revision, private: private}
	if !request.enhanced {
		return reply, a
	}
	// Our ORD is at most the initiator's IRD, our IRD what its ORD needs, if we can. A depth that
	// is not negotiated leaves our own value, and the reply says the same (RFC 6581, 9.1).
	if request.ird == depthMask {
		reply.ord = depthMask
	} else {
		a.ord = min(a.ord, request.ird)
		reply.ord = a.ord
	}
	if request.ord == depthMask {
		reply.ird = depthMask
	} else {
		a.ird = min(a.ird, request.ord)
		reply.ird = a.ird
	}
	if request.peer {
		reply.peer = true
		// We take all forms, but a Read needs a place to be served from.
		a.rtr = RTRWrite | RTRRead | RTRSend
		if a.ird == 0 {
			a.rtr &^= RTRRead
		}
		if a.rtr &= request.rtr; a.rtr == 0 {
			a.rtr = RTRWrite // RFC 6581: at least one
		}
		reply.rtr = a.rtr
	}
	return reply, a
}

// conclude is the initiator's reading of a reply to request. If terminate is not nil, the peer is owed a Terminate, because it thinks the connection is there.
func conclude(request, reply *frame, w wish) (a agreed, terminate *fault, err error) {
	if reply.enhanced != request.enhanced || reply.revision < request.revision && request.enhanced {
		return a, nil, fmt.Errorf("%w: the reply is of revision %d, enhanced %v", ErrRevision, reply.revision, reply.enhanced)
	}
	a = agreed{crc: request.crc || reply.crc, markers: reply.markers, ird: w.ird, ord: w.ord}
	if !request.enhanced {
		return a, nil, nil
	}
	if reply.ird != depthMask && request.ord != depthMask {
		a.ord = min(a.ord, reply.ird)
	}
	if reply.ord != depthMask && request.ird != depthMask && reply.ord > a.ird {
		f := faultOf(layerMPA, 0, mpaInsufficientIRD)
		return a, &f, fmt.Errorf("%w: the peer wants %d RDMA Reads served at once, we serve %d", ErrNegotiation, reply.ord, a.ird)
	}
	if request.peer {
		usable := request.rtr & reply.rtr
		if a.ord == 0 {
			usable &^= RTRRead
		}
		if !reply.peer || usable == 0 {
			f := faultOf(layerMPA, 0, mpaNoRTR)
			return a, &f, fmt.Errorf("%w: no common form of the first frame", ErrNegotiation)
		}
		a.rtr = usable & -usable // the lowest bit is the form we prefer
	}
	return a, nil, nil
}
