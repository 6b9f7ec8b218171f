package iscsi

import (
	"crypto/md5"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"sync"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// CHAPAlgorithm is a number of the IANA registry of CHAP algorithms.
type CHAPAlgorithm uint8

// The algorithms that the target implements. MD5 is mandatory (RFC 7143, 12.1.3).
const (
	CHAPMD5    CHAPAlgorithm = 5
	CHAPSHA256 CHAPAlgorithm = 7
)

// MinSecretLength is the shortest CHAP secret in bytes: 96 bits, below which RFC 7143, 9.2.1 demands IPsec.
const MinSecretLength = 12

// ErrSecret means that CHAP credentials are not fit for use.
var ErrSecret = errors.New("iscsi: unusable CHAP credentials")

// Validate returns an error that Is ErrSecret and says why, unless c can be used.
func (c *CHAP) Validate() error {
	switch {
	case c.User == "" || len(c.User) > pdu.MaxValueLength:
		return fmt.Errorf("%w: the user name must have 1 to 255 bytes", ErrSecret)
	case len(c.Secret) < MinSecretLength:
		return fmt.Errorf("%w: the secret of user %q has less than 12 bytes", ErrSecret, c.User)
	case len(c.MutualSecret) == 0:
		return nil
	case c.MutualUser == "" || len(c.MutualUser) > pdu.MaxValueLength:
		return fmt.Errorf("%w: the mutual user name must have 1 to 255 bytes", ErrSecret)
	case len(c.MutualSecret) < MinSecretLength:
		return fmt.Errorf("%w: the mutual secret has less than 12 bytes", ErrSecret)
	case subtle.ConstantTimeCompare(c.Secret, c.MutualSecret) == 1:
		return fmt.Errorf("%w: the two directions have the same secret", ErrSecret)
	}
	return nil
}

// size returns the length of a response, and 0 for an algorithm that is not implemented.
func (a CHAPAlgorithm) size() int {
	switch a {
	case CHAPMD5:
		return md5.Size
	case CHAPSHA256:
		return sha256.Size
	}
	return 0
}

// response is H(identifier, secret, challenge) (RFC 1994, 4.1).
func (a CHAPAlgorithm) response(id byte, secret, challenge []byte) []byte {
	msg := make([]byte, 0, 1+len(secret)+len(challenge))
	msg = append(msg, id)
	msg = append(msg, secret...)
	msg = append(msg, challenge...)
	switch a {
	case CHAPMD5:
		sum := md5.Sum(msg)
		return sum[:]
	case CHAPSHA256:
		sum := sha256.Sum256(msg)
		return sum[:]
	}
	return nil
}

// challenges remembers the challenges of all logins that are under way, so that a peer cannot have another connection of
// the target answer them (RFC 7143, 12.1.3). Each login holds at most one.
type challenges struct {
	mu sync.Mutex
	// open is guarded by mu.
	open map[string]struct{}
}

// issue returns a fresh challenge of n bytes and its identifier.
func (c *challenges) issue(n int) (id byte, challenge []byte) {
	b := make([]byte, n+1)
	rand.Read(b)
	id, challenge = b[n], b[:n:n]
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == nil {
		c.open = make(map[string]struct{})
	}
	c.open[string(challenge)] = struct{}{}
	return id, challenge
}

// ours reports whether the target issued the challenge in a login that has not ended.
func (c *challenges) ours(challenge []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, found := c.open[string(challenge)]
	return found
}

// withdraw forgets a challenge.
func (c *challenges) withdraw(challenge []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, string(challenge))
}

// chapExchange is one CHAP authentication, target side. It is pure apart from the challenge book.
type chapExchange struct {
	creds     *CHAP
	allowed   []CHAPAlgorithm
	book      *challenges
	algorithm CHAPAlgorithm // 0 before the choice
	id        byte
	challenge []byte
	done      bool
}

// step answers the keys of one request. The result is the answer, or the status with which the login fails.
func (x *chapExchange) step(in pdu.Pairs) (pdu.Pairs, pdu.LoginStatus) {
	if x.algorithm == 0 {
		return x.choose(in)
	}
	return x.verify(in)
}

func (x *chapExchange) choose(in pdu.Pairs) (pdu.Pairs, pdu.LoginStatus) {
	list, ok := in.Get("CHAP_A")
	if !ok {
		return nil, pdu.LoginMissingParameter
	}
	for _, item := range pdu.SplitList(list) {
		n, err := pdu.ParseNumber(item, 0, 255)
		if err != nil {
			continue
		}
		for _, a := range x.allowed {
			if a == CHAPAlgorithm(n) {
				x.algorithm = a
				x.id, x.challenge = x.book.issue(a.size())
				return pdu.Pairs{{Key: "CHAP_A", Value: itoa(uint8(a))}, {Key: "CHAP_I", Value: itoa(x.id)},
					{Key: "CHAP_C", Value: pdu.FormatHex(x.challenge)}}, pdu.LoginSuccess
			}
		}
	}
	return nil, pdu.LoginAuthFailure
}

func (x *chapExchange) verify(in pdu.Pairs) (pdu.Pairs, pdu.LoginStatus) {
	name, hasName := in.Get("CHAP_N")
	response, hasResponse := in.Get("CHAP_R")
	if !hasName || !hasResponse {
		// A missing CHAP_R must not be taken for a question (ISCSI-32).
		return nil, pdu.LoginMissingParameter
	}
	got, err := pdu.ParseBinary(response, pdu.MaxBinary)
	if err != nil {
		return nil, pdu.LoginInitiatorError
	}
	want := x.algorithm.response(x.id, x.creds.Secret, x.challenge)
	nameOK := subtle.ConstantTimeCompare([]byte(name), []byte(x.creds.User))
	responseOK := subtle.ConstantTimeCompare(got, want)
	if nameOK&responseOK != 1 {
		return nil, pdu.LoginAuthFailure
	}

	idText, hasID := in.Get("CHAP_I")
	challengeText, hasChallenge := in.Get("CHAP_C")
	if !hasID && !hasChallenge {
		x.finish()
		return nil, pdu.LoginSuccess
	}
	if !hasID || !hasChallenge {
		return nil, pdu.LoginMissingParameter
	}
	id, err := pdu.ParseNumber(idText, 0, 255)
	if err != nil {
		return nil, pdu.LoginInitiatorError
	}
	challenge, err := pdu.ParseBinary(challengeText, pdu.MaxBinary)
	if err != nil {
		return nil, pdu.LoginInitiatorError
	}
	if len(x.creds.MutualSecret) == 0 || x.book.ours(challenge) {
		return nil, pdu.LoginAuthFailure
	}
	answer := x.algorithm.response(byte(id), x.creds.MutualSecret, challenge)
	if subtle.ConstantTimeCompare(answer, got) == 1 {
		return nil, pdu.LoginAuthFailure
	}
	x.finish()
	return pdu.Pairs{{Key: "CHAP_N", Value: x.creds.MutualUser}, {Key: "CHAP_R", Value: pdu.FormatHex(answer)}}, pdu.LoginSuccess
}

func (x *chapExchange) finish() {
	x.done = true
	x.book.withdraw(x.challenge)
}

// close withdraws what the exchange left open.
func (x *chapExchange) close() {
	if x != nil && x.challenge != nil {
		x.book.withdraw(x.challenge)
	}
}
