package initiator

import (
	"crypto/md5"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha3"
	"crypto/subtle"
	"errors"
	"fmt"
	"hash"
	"strconv"
	"strings"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// CHAPAlgorithm is the number of a CHAP hash (RFC 7143, 12.1.3 and IANA).
type CHAPAlgorithm uint8

// CHAP algorithms.
const (
	CHAPMD5      CHAPAlgorithm = 5
	CHAPSHA1     CHAPAlgorithm = 6
	CHAPSHA256   CHAPAlgorithm = 7
	CHAPSHA3_256 CHAPAlgorithm = 8
)

func (a CHAPAlgorithm) hash() hash.Hash {
	switch a {
	case CHAPMD5:
		return md5.New()
	case CHAPSHA1:
		return sha1.New()
	case CHAPSHA256:
		return sha256.New()
	case CHAPSHA3_256:
		return sha3.New256()
	}
	return nil
}

// response is H(identifier || secret || challenge).
func (a CHAPAlgorithm) response(id byte, secret string, challenge []byte) []byte {
	h := a.hash()
	h.Write([]byte{id})
	h.Write([]byte(secret))
	h.Write(challenge)
	return h.Sum(nil)
}

// CHAP are the credentials of one-way or mutual CHAP.
type CHAP struct {
	User, Secret string
	// TargetSecret, if set, makes the target prove that it knows it (mutual CHAP); TargetUser, if
	// set too, is the CHAP_N it must give.
	TargetUser, TargetSecret string
	Algorithms               []CHAPAlgorithm // in order of preference; default SHA-256, MD5
}

func (c *CHAP) validate() error {
	var errs []error
	if c.User == "" || c.Secret == "" {
		errs = append(errs, errors.New("initiator: CHAP needs a user and a secret"))
	}
	if c.TargetSecret == c.Secret && c.Secret != "" {
		errs = append(errs, errors.New("initiator: the CHAP secrets of the two directions must differ"))
	}
	for _, a := range c.Algorithms {
		if a.hash() == nil {
			errs = append(errs, fmt.Errorf("initiator: CHAP algorithm %d is not known", a))
		}
	}
	return errors.Join(errs...)
}

func (c *CHAP) offer() string {
	names := make([]string, len(c.Algorithms))
	for i, a := range c.Algorithms {
		names[i] = strconv.Itoa(int(a))
	}
	return strings.Join(names, ",")
}

// chapExchange is the state of one authentication.
type chapExchange struct {
	creds     *CHAP
	algorithm CHAPAlgorithm
	id        byte // of the challenge that we send
	challenge []byte
}

// answer takes CHAP_A, CHAP_I and CHAP_C and returns CHAP_N and CHAP_R, with our own challenge if mutual.
func (x *chapExchange) answer(keys pdu.Pairs) (pdu.Pairs, error) {
	a, _ := keys.Get("CHAP_A")
	n, err := pdu.ParseNumber(a, 0, 255)
	if err != nil {
		return nil, fmt.Errorf("%w: the target chose no CHAP algorithm (CHAP_A=%q)", ErrAuth, a)
	}
	for _, offered := range x.creds.Algorithms {
		if offered == CHAPAlgorithm(n) {
			x.algorithm = offered
		}
	}
	if x.algorithm == 0 {
		return nil, fmt.Errorf("%w: the target chose CHAP algorithm %d, which was not offered", ErrAuth, n)
	}
	i, _ := keys.Get("CHAP_I")
	id, err := pdu.ParseNumber(i, 0, 255)
	if err != nil {
		return nil, protocolError("CHAP_I=%q", i)
	}
	c, _ := keys.Get("CHAP_C")
	challenge, err := pdu.ParseBinary(c, pdu.MaxBinary)
	if err != nil {
		return nil, protocolError("CHAP_C is not a binary value of 1 to 1024 bytes")
	}
	out := pdu.Pairs{
		{Key: "CHAP_N", Value: x.creds.User},
		{Key: "CHAP_R", Value: pdu.FormatHex(x.algorithm.response(byte(id), x.creds.Secret, challenge))},
	}
	if x.creds.TargetSecret != "" {
		x.challenge = make([]byte, 32)
		rand.Read(x.challenge)
		x.id = x.challenge[0] ^ byte(id) ^ 0xff
		out.Add("CHAP_I", strconv.Itoa(int(x.id)))
		out.Add("CHAP_C", pdu.FormatHex(x.challenge))
	}
	return out, nil
}

// verify checks the target's CHAP_N and CHAP_R of mutual CHAP.
func (x *chapExchange) verify(keys pdu.Pairs) error {
	if x.creds.TargetSecret == "" {
		return nil
	}
	name, ok := keys.Get("CHAP_N")
	if !ok || x.creds.TargetUser != "" && name != x.creds.TargetUser {
		return fmt.Errorf("%w: the target calls itself %q", ErrAuth, name)
	}
	r, _ := keys.Get("CHAP_R")
	got, err := pdu.ParseBinary(r, pdu.MaxBinary)
	if err != nil {
		return fmt.Errorf("%w: the target gave no CHAP_R", ErrAuth)
	}
	if subtle.ConstantTimeCompare(got, x.algorithm.response(x.id, x.creds.TargetSecret, x.challenge)) != 1 {
		return fmt.Errorf("%w: the target does not know its secret", ErrAuth)
	}
	return nil
}
