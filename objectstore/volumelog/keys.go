package volumelog

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/google/uuid"
)

// Position is a place in the log: the object Seq of Epoch. The first one of a
// volume is {1, 0}; the zero Position means the start of the log.
type Position struct {
	Epoch uint64
	Seq   uint64
}

// Before tells whether p comes before q in the log.
func (p Position) Before(q Position) bool {
	return p.Epoch < q.Epoch || (p.Epoch == q.Epoch && p.Seq < q.Seq)
}

// IsZero tells whether p is the zero Position.
func (p Position) IsZero() bool { return p == Position{} }

func (p Position) String() string { return fmt.Sprintf("%d/%d", p.Epoch, p.Seq) }

const (
	volumesPrefix = "volumes/"
	hexDigits     = 16
)

func volumePrefix(id uuid.UUID) string     { return volumesPrefix + id.String() + "/" }
func logPrefix(id uuid.UUID) string        { return volumePrefix(id) + "log/" }
func checkpointPrefix(id uuid.UUID) string { return volumePrefix(id) + "checkpoint/" }
func partPrefix(id uuid.UUID) string       { return volumePrefix(id) + "checkpoint-part/" }

func (p Position) path() string { return fmt.Sprintf("%016x/%016x", p.Epoch, p.Seq) }

// LogKey is the key of the log object at p, relative to the bucket's prefix.
func LogKey(id uuid.UUID, p Position) string { return logPrefix(id) + p.path() }

func checkpointKey(id uuid.UUID, p Position) string { return checkpointPrefix(id) + p.path() }

func partKey(id uuid.UUID, p Position, attempt uuid.UUID, n int) string {
	return fmt.Sprintf("%s%s/%s/%08x", partPrefix(id), p.path(), attempt, n)
}

// justBefore is a key that is smaller than the log key of p and not smaller than
// that of any position before p.
func justBefore(id uuid.UUID, p Position) string {
	if p.Seq == 0 {
		return logPrefix(id) + fmt.Sprintf("%016x/", p.Epoch)
	}
	return LogKey(id, Position{p.Epoch, p.Seq - 1})
}

// parsePosition reads "<epoch>/<seq>" and nothing else.
func parsePosition(s string) (Position, bool) {
	if len(s) != 2*hexDigits+1 || s[hexDigits] != '/' {
		return Position{}, false
	}
	e, ok1 := parseHex(s[:hexDigits])
	q, ok2 := parseHex(s[hexDigits+1:])
	return Position{e, q}, ok1 && ok2
}

func parseHex(s string) (uint64, bool) {
	if strings.ContainsAny(s, "ABCDEF+-_") {
		return 0, false
	}
	v, err := strconv.ParseUint(s, 16, 64)
	return v, err == nil
}
